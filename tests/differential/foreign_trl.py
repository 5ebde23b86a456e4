"""Losses and advantages computed by TRL: its trainers' real methods, on objects whose models are replaced.

Nothing of TRL is imported before it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from foreign import GROUP_SIZE, Advantages, Loss, Step, Window
from torch import Tensor

GRPO = ("trl.trainer.grpo_trainer", "GRPOTrainer")
GMPO = ("trl.experimental.gmpo", "GMPOTrainer")
RLOO = ("trl.trainer.rloo_trainer", "RLOOTrainer")


@contextlib.contextmanager
def float64_constants() -> Iterator[None]:
    """Python numbers become float64 inside the foreign code (TRL's SAPO makes a tensor of two of them)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    self.model = Untouched()
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


class Untouched(torch.nn.Module):
    """A model in training mode that TRL looks at and never calls; it may ask whether it is an adapter."""

    is_gradient_checkpointing = False


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

        self.model = Untouched()
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
