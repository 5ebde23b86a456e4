"""Advantages made of what the policy that sampled says of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.objectives.advantages import Advantage, LeaveOneOutAdvantage, check_epsilon, positions
from tepo.objectives.batch import TokenBatch

SMALLEST_ENTROPY = 1e-6
"""Nats; a token with less counts as having this much where its entropy is divided by."""


@dataclass(frozen=True)
class SelfReward(Advantage):
    """The response's own likelihood or certainty as its reward, against the rest of the group (EM-RL, 2505.15134).

    of: "logp", R_i = sum_t log pi_old(o_it); or "entropy", R_i = - sum_t H_old,it. Answers are not looked at.
    """

    name: ClassVar[str] = "self"
    of: Literal["logp", "entropy"] = "logp"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_logp" if self.of == "logp" else "old_entropy"})

    def per_token(self, batch: TokenBatch) -> Tensor:
        values = batch.old_logp if self.of == "logp" else -_old_entropy(batch)
        rewards = batch.sequence_mean(values) * batch.lengths
        return LeaveOneOutAdvantage()(rewards, batch.group)[batch.sequence]


@dataclass(frozen=True)
class EntropyShare(Advantage):
    """Token rewards by the share of entropy at each position (GTPO), or response rewards by mean entropy (GRPO-S).

    Within a group, with d successes and h failures (reward above 0 or not) still alive at position t (2508.04349):

        success:  a1 R_i + a2 d H_it / sum_k H_kt            failure:  - a1 - a2 h (1/H_it) / sum_k (1/H_kt)

    and the rewards of each set are then standardized by themselves. level "response" does the same with the mean
    entropies of whole responses. H is the entropy when a token was sampled; tokens of a response stand in their order.
    """

    name: ClassVar[str] = "entropy_share"
    level: Literal["token", "response"] = "token"
    a1: float = 1.0
    a2: float = 0.1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_entropy"})

    def per_token(self, batch: TokenBatch) -> Tensor:
        if batch.rewards is None:
            raise ValueError("the batch has neither advantages nor rewards")
        entropy, success = _old_entropy(batch), batch.rewards > 0
        _, group = torch.unique(batch.group, return_inverse=True)
        side = 2 * group + success.long()  # [S], one label for the successes and one for the failures of a group
        if self.level == "response":
            shaped = self.shaped(batch.sequence_mean(entropy), batch.rewards, success, side)
            return standardize_within(shaped, side, self.epsilon)[batch.sequence]
        longest = int(batch.lengths.max()) if batch.num_tokens else 0
        place = side[batch.sequence] * longest + positions(batch)
        shaped = self.shaped(entropy, batch.rewards[batch.sequence], success[batch.sequence], place)
        return standardize_within(shaped, side[batch.sequence], self.epsilon)

    def shaped(self, entropy: Tensor, rewards: Tensor, success: Tensor, place: Tensor) -> Tensor:
        """[K] shaped rewards of K items, from entropies, rewards, success, and the label of those who share."""
        weight = torch.where(success, entropy.clamp(min=SMALLEST_ENTROPY), 1 / entropy.clamp(min=SMALLEST_ENTROPY))
        total, count = _sums_within(weight, place)
        bonus = self.a2 * weight * count / total  # a number times a count would be float32
        return torch.where(success, self.a1 * rewards.to(entropy.dtype) + bonus, -self.a1 - bonus)


def standardize_within(values: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """[K] (v - mean) / (std + epsilon) within each label, ddof 1; exactly 0 where a label's values are equal.

    Equal up to rounding: the entropies of equal responses differ in their last digits, and a rounding residue divided
    by epsilon is no signal.
    """
    total, count = _sums_within(values, labels)
    centered = values - total / count
    variance = _sums_within(centered.square(), labels)[0] / (count - 1).clamp(min=1)
    _, index = torch.unique(labels, return_inverse=True)
    spread = torch.zeros_like(values).scatter_reduce(0, index, centered.abs(), "amax")[index]
    size = torch.zeros_like(values).scatter_reduce(0, index, values.abs(), "amax")[index]
    return torch.where(spread > 100 * torch.finfo(values.dtype).eps * size, centered / (variance.sqrt() + epsilon), 0.0)


def _sums_within(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[K] sum and count of the values that share each value's label."""
    _, index, count = torch.unique(labels, return_inverse=True, return_counts=True)
    total = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return total[index], count[index]


def _old_entropy(batch: TokenBatch) -> Tensor:
    if batch.old_entropy is None:
        raise ValueError("the advantage reads old_entropy, which the batch does not have")
    return batch.old_entropy
