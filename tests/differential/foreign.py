"""Losses and advantages computed by TRL and verl, with their own code, on random ragged batches.

Nothing of them is imported before it is called. TRL: the trainer's real methods, on an object whose model is replaced.
verl: the registered policy losses, put together the way that verl's `workers/utils/losses.py` does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import TokenBatch

GROUP_SIZE = 4
NO_DUAL_CLIP = 1e9
"""verl's dual clip is always on; this `clip_ratio_c` puts it out of reach."""


@dataclass(frozen=True)
class Step:
    """The padded tensors of one optimizer step, or of a part of it: [S, T]; rewards and groups [S].

    advantages: [S], or [S, T] when they vary inside a response. shared: the last response of a group stands for a
    prefix that the others share. What stands in the padding is noise.
    """

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    groups: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    shared: Tensor

    def rows(self, index: slice) -> Step:
        """Some responses; gradients flow back into the whole."""
        return Step(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})

    def token_advantages(self) -> Tensor:
        """[S, T], 0 in the padding."""
        return (self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]) * self.mask

    def token_rewards(self) -> Tensor:
        """[S, T]: the reward of a response stands at its last token."""
        last = (self.mask.cumsum(-1) == self.mask.sum(-1, keepdim=True)) & self.mask.bool()
        return self.rewards[:, None] * last

    def in_pairs(self) -> Step:
        """+1 for the response of a group with the highest reward, -1 for that with the lowest; log-probs below 0."""
        advantages = torch.zeros_like(self.rewards)
        for group in self.groups.unique():
            rows = torch.nonzero(self.groups == group).flatten()
            advantages[rows[self.rewards[rows].argmax()]] = 1
            advantages[rows[self.rewards[rows].argmin()]] = -1
        logp = (-self.logp.detach().abs() - 0.01).requires_grad_()
        return dataclasses.replace(self, advantages=advantages, logp=logp)

    def pairs(self) -> list[tuple[int, int]]:
        """The rows of the chosen and of the rejected response of each group (after `in_pairs`)."""
        chosen, rejected = (torch.nonzero(self.advantages == sign).flatten() for sign in (1, -1))
        partner = {int(self.groups[row]): int(row) for row in rejected}
        return [(int(row), partner[int(self.groups[row])]) for row in chosen]

    def rollout(self) -> TokenBatch:
        """For our advantages: rewards in the advantages' place."""
        return dataclasses.replace(self.batch(), advantages=None, returns=None, rewards=self.rewards)

    def batch(self) -> TokenBatch:
        """The same for our objectives."""
        return TokenBatch.from_padded(
            self.logp,
            self.old_logp,
            self.mask,
            advantages=self.advantages,
            groups=self.groups,
            entropy=self.entropy,
            old_entropy=self.entropy.detach(),
            ref_logp=self.ref_logp,
            values=self.values,
            old_values=self.old_values,
            returns=self.returns,
            shared=self.shared,
        )


@dataclass(frozen=True)
class Window:
    """The counts of a whole optimizer step that is computed in `parts` pieces."""

    tokens: int
    sequences: int
    parts: int


Loss = Callable[[Step, Window], Tensor]
"""(a part of a step, the counts of the whole) -> its share of the loss, with a gradient in logp, entropy and values."""

Advantages = Callable[[Step], Tensor]
"""A step -> advantages [S, T], 0 in the padding."""


def random_step(seed: int, drift: float, vary_advantages: bool = False, empty_responses: int = 0) -> Step:
    """A ragged step of 12 responses with 1 to 9 tokens, in groups of GROUP_SIZE, in float64.

    drift: standard deviation of logp - old_logp, and twice that of the mean of a response's.
    empty_responses: how many (the first ones) have no token in the mask.
    """
    responses, width = 12, 9
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*(shape or (responses, width)), generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (responses,), generator=generator)
    lengths[:2] = torch.tensor([1, width])
    lengths = lengths[torch.randperm(responses, generator=generator)]
    lengths[:empty_responses] = 0
    old_logp = -normal().abs() - 0.05
    logp = old_logp + drift * (normal() + 2 * normal(responses, 1))
    advantages = normal() if vary_advantages else normal(responses)
    advantages[responses // 2] = 0.0
    step = Step(
        logp=logp.requires_grad_(),
        old_logp=old_logp,
        ref_logp=logp.detach() + 0.3 * normal(),
        # Of float32 precision: TRL rounds the threshold of its entropy mask to it.
        entropy=normal().abs().float().double().requires_grad_(),
        mask=(torch.arange(width) < lengths[:, None]).long(),
        advantages=advantages,
        rewards=normal(responses),
        groups=torch.arange(responses) // GROUP_SIZE,
        values=normal().requires_grad_(),
        old_values=normal(),
        returns=normal(),
        shared=(torch.arange(responses) % GROUP_SIZE == GROUP_SIZE - 1)[:, None].expand(responses, width),
    )
    return dataclasses.replace(step, old_values=step.values.detach() + drift * step.old_values)


def window(step: Step, parts: int) -> Window:
    """The counts of a step."""
    return Window(int(step.mask.sum()), int((step.mask.sum(-1) > 0).sum()), parts)


@contextlib.contextmanager
def float64_constants() -> Iterator[None]:
    """Python numbers become float64 inside the foreign code (TRL's SAPO makes a tensor of two of them)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------------------------------------------------------- TRL


GRPO = ("trl.trainer.grpo_trainer", "GRPOTrainer")
GMPO = ("trl.experimental.gmpo", "GMPOTrainer")
RLOO = ("trl.trainer.rloo_trainer", "RLOOTrainer")


def trl_stand_in(trainer: tuple[str, str], step: Step, parts: int, **settings: Any) -> Any:
    """A trainer of TRL (module, class) without a model: log-probs, entropies, samples and rewards are the step's.

    settings: fields of the class's own config, which keeps its defaults and its checks.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    module = importlib.import_module(trainer[0])
    base = getattr(module, trainer[1])
    config = getattr(module, trainer[1].replace("Trainer", "Config"))(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=len(step.mask),
        gradient_accumulation_steps=parts,
        **settings,
    )

    def logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return step.logp, step.entropy, None

    def generate(self: Any, prompts: list[str]) -> tuple[Any, ...]:
        samples = ([[1] for _ in prompts], [[1] * int(length) for length in step.mask.sum(-1)], ["" for _ in prompts])
        if trainer == RLOO:
            return samples
        return samples[0], samples[1], None, samples[2], None, {}, None, None

    def calculate_rewards(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return step.rewards[:, None]

    replaced = {
        "_get_per_token_logps_and_entropies": logps_and_entropies,
        "_generate": generate,
        "_calculate_rewards": calculate_rewards,
    }
    self: Any = object.__new__(type(f"StandIn{trainer[1]}", (base,), replaced))
    # The constructor copies most fields of the config to the trainer; what it makes in another way follows.
    for field in dataclasses.fields(config):
        setattr(self, field.name, getattr(config, field.name))
    self.args = config
    self.accelerator = one_process()
    self.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
    self.epsilon_low = config.epsilon
    self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    self.current_gradient_accumulation_steps = parts
    self.aux_loss_enabled = False
    self.tools = self.environments = self.environment_factories = self.pad_to_multiple_of = None
    self._tokenizer = types.SimpleNamespace(pad_token_id=0)
    self.reward_weights, self.reward_funcs, self.reward_func_names = torch.ones(1), [None], ["reward"]
    self._metrics = defaultdict(lambda: defaultdict(list))
    self._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    self._pending_extra_logs, self._pending_metrics = {}, {}
    if trainer != RLOO:
        self._entropy_bonus_enabled = config.entropy_coef != 0.0 or config.use_adaptive_entropy
    return self


def one_process() -> Any:
    """What accelerate's Accelerator does where there is one process."""

    def same(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    communication = dict.fromkeys(("gather", "gather_for_metrics", "reduce", "pad_across_processes"), same)
    return types.SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), sync_gradients=True, **communication
    )


def trl(loss_type: str | None, trainer: tuple[str, str] = GRPO, **settings: Any) -> Loss:
    """`_compute_loss` of a TRL trainer, with these fields of its config (loss_type None: it has no such field)."""
    if loss_type is not None:
        settings["loss_type"] = loss_type

    def loss(part: Step, whole: Window) -> Tensor:
        self = trl_stand_in(trainer, part, whole.parts, **settings)
        prompts = torch.zeros(len(part.mask), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompts,
            "completion_ids": torch.zeros_like(part.mask),
            "completion_mask": part.mask,
            "advantages": part.advantages,
            "old_per_token_logps": part.old_logp,
            "old_logps": (part.old_logp * part.mask).sum(-1),
            "ref_per_token_logps": part.ref_logp,
            "num_items_in_batch": torch.tensor(whole.tokens),
        }
        with float64_constants():
            value: Tensor = self._compute_loss(None, inputs)
        return value

    return loss


def trl_advantages(trainer: tuple[str, str] = GRPO, **settings: Any) -> Advantages:
    """The advantages that `_generate_and_score_completions` of a TRL trainer makes of the rewards of a step."""

    def advantages(step: Step) -> Tensor:
        with float64_constants():
            self = trl_stand_in(trainer, step, 1, **settings)
            found: Tensor = self._generate_and_score_completions([{"prompt": ""}] * len(step.mask))["advantages"]
        return found[:, None] * step.mask

    return advantages


def bare_trainer(module: str, name: str, **settings: Any) -> Any:
    """A TRL trainer on which no constructor ran, with the fields of its config, which keeps its defaults."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    found = importlib.import_module(module)
    config = getattr(found, f"{name}Config")(
        output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings
    )
    self: Any = object.__new__(getattr(found, f"{name}Trainer"))
    for field in dataclasses.fields(config):
        setattr(self, field.name, getattr(config, field.name))
    self.args, self.accelerator, self.aux_loss_enabled = config, one_process(), False
    return self


def trl_dpo(beta: float) -> Loss:
    """`_compute_loss` of DPOTrainer on the pairs of a step, whose prompts are one token long."""

    def loss(part: Step, whole: Window) -> Tensor:
        self = bare_trainer("trl.trainer.dpo_trainer", "DPO", beta=beta)
        rows = torch.tensor(part.pairs()).T.flatten()
        mask = part.mask[rows]

        def model(log_probs: Tensor) -> Any:
            """What the fused head gives: log-probs, 0 where there is no label; the rest is for metrics."""
            noted = {name: torch.zeros_like(mask).double() for name in ("entropy", "mean_logits")}
            given = types.SimpleNamespace(log_probs=log_probs[rows] * mask, is_top1=mask.bool(), **noted)
            return lambda **kwargs: given

        self.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.ref_model, self.precompute_ref_logps = model(part.ref_logp), False
        self.loss_types, self.loss_weights = ["sigmoid"], [1.0]
        self._metrics = defaultdict(lambda: defaultdict(list))
        self._total_train_tokens, self._tp_size = 0, 1
        completion = torch.nn.functional.pad(mask, (1, 0))
        inputs = {
            "input_ids": torch.zeros_like(completion),
            "attention_mask": torch.nn.functional.pad(mask, (1, 0), value=1),
            "completion_mask": completion,
        }
        value: Tensor = self._compute_loss(model(part.logp), inputs, False)
        return value

    return loss


def trl_orpo(beta: float) -> Loss:
    """`get_batch_loss_metrics` of ORPOTrainer, one pair at a time.

    Its NLL is a mean over the tokens of a batch, those of prompts among them: a batch of one pair with a prompt of one
    token, which nothing predicts, has the mean over the chosen response. Two words stand in for a vocabulary.
    """

    def loss(part: Step, whole: Window) -> Tensor:
        self = bare_trainer("trl.experimental.orpo.orpo_trainer", "ORPO", beta=beta)
        self.is_encoder_decoder, self.padding_value = False, 0
        losses = []
        for rows in part.pairs():
            index = torch.tensor(rows)
            mask, logp = part.mask[index], part.logp[index]
            logits = torch.stack([logp, torch.log(-torch.expm1(logp))], -1)
            output = types.SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 0, 0, 1)))
            attention = torch.nn.functional.pad(mask, (1, 0), value=1)
            labels = torch.where(torch.nn.functional.pad(mask, (1, 0)).bool(), 0, -100)
            batch = {}
            for i, side in enumerate(("chosen", "rejected")):
                batch[f"{side}_input_ids"] = torch.zeros_like(attention[[i]])
                batch[f"{side}_attention_mask"], batch[f"{side}_labels"] = attention[[i]], labels[[i]]
            value, _ = self.get_batch_loss_metrics(lambda *args, given=output, **kwargs: given, batch)
            losses.append(value)
        return torch.stack(losses).mean()

    return loss


# --------------------------------------------------------------------------------------------------------------- verl


@functools.cache
def verl_core() -> Any:
    """verl.trainer.ppo.core_algos. Importing verl imports ray for the name of one type: without ray, a stub has it."""
    stub = None
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        stub = types.ModuleType("ray")
        stub.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        stub.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]
        sys.modules["ray"] = stub
    try:
        return importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        if stub is not None:
            del sys.modules["ray"]


def verl(
    loss_mode: str,
    aggregate: str = "token-mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    length: int | None = None,
    kl: tuple[float, str] | None = None,
    entropy: float = 0.0,
    policy: dict[str, float] | None = None,
    value_clip: float | None = None,
    **settings: Any,
) -> Loss:
    """A policy loss of verl's registry, plus coefficient * KL to the reference, minus entropy * bonus, plus the critic's.

    length: its `loss_scale_factor`. policy: fields of its PolicyLossConfig. settings: of its ActorConfig.
    """

    def loss(part: Step, whole: Window) -> Tensor:
        core = verl_core()
        from verl.workers.config import ActorConfig, PolicyLossConfig

        # One part: verl counts for itself. Several: its trainer hands the counts of the whole step to each.
        counts = {"batch_num_tokens": whole.tokens, "global_batch_size": whole.sequences} if whole.parts > 1 else {}
        scale: dict[str, Any] = {**counts, "loss_scale_factor": length}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=GROUP_SIZE,
            ppo_micro_batch_size_per_gpu=len(part.mask),
            clip_ratio_low=clip_low,
            clip_ratio_high=clip_high,
            loss_agg_mode=aggregate,
            policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(policy or {})),
            global_batch_info=scale,
            **settings,
        )
        mask = part.mask.double()
        value: Tensor
        value, _ = core.get_policy_loss_fn(loss_mode)(
            old_log_prob=part.old_logp,
            log_prob=part.logp,
            advantages=part.token_advantages(),
            response_mask=mask,
            loss_agg_mode=aggregate,
            config=config,
        )
        if entropy:
            value = value - entropy * core.agg_loss(part.entropy, mask, aggregate, **scale)
        if kl is not None:
            coefficient, estimator = kl
            tokens = core.kl_penalty(part.logp, part.ref_logp, estimator)
            value = value + coefficient * core.agg_loss(tokens, mask, aggregate, **scale)
        if value_clip is not None:
            critics = (part.values, part.returns, part.old_values, mask, value_clip, aggregate)
            value = value + core.compute_value_loss(*critics, **scale)[0]
        return value

    return loss


def verl_advantages(estimator: str, **settings: Any) -> Advantages:
    """An advantage estimator of verl's registry: [S, T], 0 in the padding."""

    def advantages(step: Step) -> Tensor:
        core = verl_core()
        found: Tensor = core.get_adv_estimator_fn(estimator)(
            token_level_rewards=step.token_rewards(),
            response_mask=step.mask.double(),
            config=types.SimpleNamespace(gamma=1.0),
            **({} if estimator == "reinforce_plus_plus" else {"index": step.groups.numpy()}),
            **settings,
        )[0]
        return found

    return advantages


def verl_gae(step: Step, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [S, T] of verl's GAE, 0 in the padding."""
    found: tuple[Tensor, Tensor] = verl_core().get_adv_estimator_fn("gae")(
        token_level_rewards=step.token_rewards(),
        values=step.old_values,
        response_mask=step.mask.double(),
        gamma=gamma,
        lam=lam,
    )
    return found[0] * step.mask, found[1] * step.mask


def verl_gae_advantages(gamma: float, lam: float) -> Advantages:
    """The advantages alone."""
    return lambda step: verl_gae(step, gamma, lam)[0]
