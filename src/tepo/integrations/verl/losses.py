"""Our objectives as losses and advantage estimators of verl, in its registries once this module is imported.

`policy_loss` has verl's signature for policy losses, which knows log-probs and advantages. `ObjectiveLoss` goes into
the engine (`set_loss_fn`) and sees the whole batch: old and new entropies and the reference too. Both divide by the
counts of the whole mini-batch, over micro-batches and ranks, as verl's engine hands them over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.padding import no_padding_2_padding

from tepo.integrations.verl.settings import carried, check_actor, objective_of, verl_names
from tepo.objectives import Objective, ObjectiveOutput, TokenBatch, Totals

COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")
"""What verl's engine counts for a mini-batch, over its micro-batches and ranks."""


@dataclasses.dataclass
class ObjectiveLossConfig(PolicyLossConfig):  # type: ignore[misc, unused-ignore]
    """verl's section `policy_loss` with the options of an objective (those of `tepo.objectives.get_objective`).

    actor_rollout_ref.actor.policy_loss._target_=tepo.integrations.verl.losses.ObjectiveLossConfig
    +actor_rollout_ref.actor.policy_loss.options.clip_low=0.002

    Raises ValueError for an objective or options that there are not, and for what verl cannot give the objective.
    """

    loss_mode: str = "tepo"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        carried(objective_of(self))


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A policy loss of verl: the objective that `config.policy_loss` names. All tensors [B, T].

    Its metrics are means over the tokens of the micro-batch, which verl averages over micro-batches. Raises ValueError
    for an objective that reads more than the signature has, settings of verl's own losses, and missing counts.
    """
    assert config is not None
    objective = objective_of(config.policy_loss)
    check_actor(config, objective, whole_batch=False)
    out, scale = _loss(
        objective, config.global_batch_info, config.rollout_n,
        logp=log_prob, old_logp=old_log_prob, mask=response_mask, advantages=_weighted(advantages, rollout_is_weights),
    )  # fmt: skip
    return out.loss * scale, {f"actor/objective/{name}": value for name, value in out.metrics.items()}


@dataclasses.dataclass(frozen=True)
class ObjectiveLoss:
    """A loss for verl's engine: `actor_rollout_wg.set_loss_fn(ObjectiveLoss(objective, actor_config))`.

    Reads of the batch, all nested [B, response]: `response_mask`, `old_log_probs`, `advantages`, and where they are
    there `entropy` (of the policy that sampled), `ref_log_prob`, `rollout_is_weights` and `on_policy` (1 in rows of a
    rollout's first update, where the scores at hand are the old ones, exactly).

    Raises ValueError when what the objective reads is missing, naming the key of verl that provides it.
    """

    objective: Objective
    config: ActorConfig

    def __post_init__(self) -> None:
        check_actor(self.config, self.objective, whole_batch=True)

    def __call__(
        self, model_output: Mapping[str, Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Metric]]:
        counts = {name: tensordict_utils.get(data, name, None) for name in COUNTS}
        padded = {name: no_padding_2_padding(value, data) for name, value in model_output.items() if value is not None}
        optional = ("entropy", "ref_log_prob", "rollout_is_weights", "on_policy")
        present = [name for name in optional if name in data]
        given = data.select("response_mask", "old_log_probs", "advantages", *present).to_padded_tensor()
        logp, entropy = padded["log_probs"], padded.get("entropy")
        old_logp, old_entropy = given["old_log_probs"], given.get("entropy", None)
        self._check_needs(entropy, old_entropy, given.get("ref_log_prob", None))
        if "on_policy" in given:
            fresh = given["on_policy"].bool()
            old_logp = torch.where(fresh, logp.detach().to(old_logp.dtype), old_logp)
            if entropy is not None and old_entropy is not None:
                old_entropy = torch.where(fresh, entropy.detach().to(old_entropy.dtype), old_entropy)
        out, scale = _loss(
            self.objective, counts, self.config.rollout_n, logp=logp, old_logp=old_logp, mask=given["response_mask"],
            advantages=_weighted(given["advantages"], given.get("rollout_is_weights", None)),
            entropy=entropy, old_entropy=old_entropy, ref_logp=given.get("ref_log_prob", None),
        )  # fmt: skip
        return out.loss * scale, _metrics(out, counts)

    def _check_needs(self, entropy: Tensor | None, old_entropy: Tensor | None, reference: Tensor | None) -> None:
        actor = "actor_rollout_ref.actor"
        providers = {
            "entropy": (entropy, f"{actor}.calculate_entropy=True"),
            "old_entropy": (
                old_entropy,
                "algorithm.rollout_correction.bypass_mode=False and trainer.use_v1=True (whose pass for the old "
                "log-probs keeps them)",
            ),
            "ref_logp": (reference, f"{actor}.use_kl_loss=True (the objective's ref_kl is the weight)"),
        }
        for need, (value, key) in providers.items():
            if need in self.objective.needs and value is None:
                raise ValueError(
                    f"objective {self.objective.name} reads {need}, which the batch does not have: set {key}"
                )


def _loss(
    objective: Objective, counts: Mapping[str, Any], responses_per_prompt: int, **padded: Tensor | None
) -> tuple[ObjectiveOutput, int]:
    """The objective on a micro-batch of the mini-batch that `counts` counts; its factor, as gradients are averaged."""
    if missing := [name for name in COUNTS if counts.get(name) is None]:
        raise ValueError(
            f"verl gave the loss no {', '.join(missing)}: without the counts of the whole mini-batch the loss of a "
            "micro-batch has no right weight. Its engine workers (trainer.use_v1=True) give them"
        )
    responses = int(counts["global_batch_size"])
    totals = Totals(int(counts["batch_num_tokens"]), responses, max(responses // responses_per_prompt, 1))
    mask = padded.pop("mask")
    assert mask is not None
    batch = TokenBatch.from_padded(mask=mask.bool(), **padded)  # type: ignore[arg-type]
    return objective(batch, totals), int(counts["dp_size"])


def _weighted(advantages: Tensor, weights: Tensor | None) -> Tensor:
    """Advantages under verl's rollout correction, for tokens sampled by an engine that is not quite the policy."""
    return advantages if weights is None else advantages * weights


def _metrics(out: ObjectiveOutput, counts: Mapping[str, Any]) -> dict[str, Metric]:
    """As means over the tokens of the mini-batch: verl sums over micro-batches and averages over ranks."""
    ranks = int(counts["dp_size"])
    share = ranks * out.num_tokens / max(int(counts["batch_num_tokens"]), 1)
    metrics = {}
    for name, value in out.metrics.items():
        factor = 1.0 if name.endswith("_max") else float(ranks) if name.endswith("loss") else share
        kind = AggregationType.MAX if name.endswith("_max") else AggregationType.SUM
        metrics[f"objective/{name}"] = Metric(value=value * factor, aggregation=kind)
    return metrics


@dataclasses.dataclass(frozen=True)
class ObjectiveAdvantages:
    """An advantage estimator of verl: that of an objective, with the options of `+algorithm.options`."""

    name: str

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, index: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """token_level_rewards, response_mask [B, T], index [B] the prompts -> advantages [B, T], twice.

        A response that stands alone in its group has no baseline, and gets 0 where the group is the baseline.
        """
        options = (config.get("options") if config is not None else None) or {}
        objective = objective_of({"loss_mode": self.name, "options": options})
        if objective.advantage.needs:
            needs = ", ".join(sorted(objective.advantage.needs))
            raise ValueError(
                f"the advantage of objective {objective.name} is made of {needs}, which verl does not give estimators: "
                "set trainer.v1.trainer_mode=tepo, which makes it"
            )
        if index is None:
            raise ValueError("verl gave no uid: which responses answer one prompt is not known")
        rewards, lengths = token_level_rewards.sum(dim=-1), response_mask.sum(dim=-1)
        groups = group_labels(index).to(rewards.device)
        rows = comparable(objective, groups, lengths > 0)
        advantages = torch.zeros_like(rewards)
        advantages[rows] = objective.advantages(rewards[rows], groups[rows], lengths[rows])
        per_token = advantages[:, None] * response_mask
        return per_token, per_token


def group_labels(index: Any) -> Tensor:
    """[B] whole numbers, equal where the labels are."""
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in index])


def comparable(objective: Objective, groups: Tensor, present: Tensor) -> Tensor:
    """[B] bool: responses with a token, without those that are alone where the group is the baseline."""
    if not objective.advantage.relative_to_group:
        return present
    return present & (torch.bincount(groups[present], minlength=int(groups.max()) + 1)[groups] > 1)


for _name, _objective in verl_names().items():
    register_policy_loss(_name)(policy_loss)
    register_adv_est(_name)(ObjectiveAdvantages(_objective.name))
