"""From the rewards of a group to one advantage for each response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, widest

PerGroup = Callable[[Tensor], Tensor]
Scale = Callable[[Tensor, PerGroup, Tensor], Tensor]
"""Scales centered rewards [S], given a sum within groups ([S] -> [S]) and the size of each response's group [S]."""


class Advantage:
    """From rewards to advantages, over a whole rollout. Subclasses are frozen dataclasses.

    across_groups: whether the advantages of a group depend on the others.
    exchangeable: whether another kind can stand in its place; not where other parts read what this one alone gives.
    needs: fields of TokenBatch that it reads beside the rewards; where there are any, the advantages vary within a
        response and can be had from `per_token` alone.
    """

    name: ClassVar[str]
    across_groups: ClassVar[bool] = False
    exchangeable: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def relative_to_group(self) -> bool:
        """Whether a group needs two responses."""
        return True

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S], lengths [S] in tokens (equal when not given) -> advantages [S]."""
        raise ValueError(f"the advantage {self.name!r} reads {', '.join(sorted(self.needs))}: one value a token")

    def per_token(self, batch: TokenBatch) -> Tensor:
        """The whole rollout -> advantages [N]."""
        if batch.rewards is None:
            raise ValueError("the batch has neither advantages nor rewards")
        return self(batch.rewards, batch.group, batch.lengths)[batch.sequence]

    def returns(self, batch: TokenBatch) -> Tensor | None:
        """[N] what the values of a critic are trained towards; None where no critic is there."""
        return None


@dataclass(frozen=True)
class StandardizedAdvantage(Advantage):
    """A_i = (R_i - mean R) / (std R + epsilon) over the responses to one prompt (GRPO, 2402.03300).

    The standard deviation is that of a sample (ddof 1).
    """

    name: ClassVar[str] = "standardized"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""

        def standardize(centered: Tensor, per_group: PerGroup, count: Tensor) -> Tensor:
            return centered / (torch.sqrt(per_group(centered.square()) / (count - 1)) + self.epsilon)

        return relative_to_group(rewards, groups, standardize)


@dataclass(frozen=True)
class CenteredAdvantage(Advantage):
    """A_i = R_i - mean R over the responses to one prompt (Dr.GRPO, 2503.20783)."""

    name: ClassVar[str] = "centered"

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""
        return relative_to_group(rewards, groups)


@dataclass(frozen=True)
class LeaveOneOutAdvantage(Advantage):
    """A_i = R_i - mean of the other rewards of its group = G/(G-1) (R_i - mean R) (RLOO, 2402.14740)."""

    name: ClassVar[str] = "leave_one_out"

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""
        return relative_to_group(rewards, groups, lambda centered, _, count: centered * count / (count - 1))


@dataclass(frozen=True)
class InformativeAdvantage(Advantage):
    """A_i = B/(B - M) (R_i - mean R), with B responses, M of them in groups of equal rewards (GPG, 2504.02546).

    What the groups without a signal take out of the mean is given back to the others. B and M count the rollout; verl
    counts non-zero scores instead, which is another number wherever a group is all right.
    """

    name: ClassVar[str] = "informative"
    across_groups: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""

        def scale(centered: Tensor, per_group: PerGroup, count: Tensor) -> Tensor:
            informative = per_group(centered.abs()) > 0
            return centered * len(centered) / informative.sum().clamp(min=1)

        return relative_to_group(rewards, groups, scale)


@dataclass(frozen=True)
class BatchAdvantage(Advantage):
    """A_i = (R_i - mean) / (std + epsilon) over all tokens of the rollout (REINFORCE++, 2501.03262).

    A response's reward stands at each of its tokens, so that mean and standard deviation (ddof 1) weigh responses by
    their length, as in verl (and OpenRLHF, with ddof 0). baseline: take off the mean of the group first.
    """

    name: ClassVar[str] = "batch"
    across_groups: ClassVar[bool] = True
    baseline: bool = False
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    @property
    def relative_to_group(self) -> bool:
        return self.baseline

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S], lengths [S] in tokens (equal when not given) -> advantages [S]."""
        check_rewards(rewards, groups)
        values = rewards.to(widest(rewards.device))
        weights = torch.ones_like(values) if lengths is None else lengths.to(values.dtype)
        if self.baseline:
            values = relative_to_group(values, groups)
        present = values[weights > 0]
        if len(present) < 2 or bool((present == present[0]).all()):
            return torch.zeros_like(values).to(floating(rewards))
        total = weights.sum()
        mean = (weights * values).sum() / total
        if self.baseline and bool((weights == weights[0]).all()):
            mean = torch.zeros_like(mean)  # which it is but for rounding: a group of equal rewards keeps exactly 0
        centered = values - mean
        variance = (weights * centered.square()).sum() / (total - 1).clamp(min=1)
        return (centered / (variance.sqrt() + self.epsilon)).to(floating(rewards))


def relative_to_group(rewards: Tensor, groups: Tensor, scale: Scale | None = None) -> Tensor:
    """Rewards less the mean of their group, then scaled.

    rewards: [S]. groups: [S], any integer labels. scale: takes the centered rewards [S], a function that sums within
    groups ([S] -> [S]) and the size of each response's group [S].
    -> [S], in the dtype of the rewards (integers: the default one). A group whose rewards are all equal gets exactly 0:
    decided by equality, since a rounding residue divided by epsilon is a large number.
    Raises ValueError for a group of one response and for rewards that are not finite.
    """
    check_rewards(rewards, groups)
    values = rewards.to(widest(rewards.device))
    labels, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index, minlength=len(labels))
    if bool((count == 1).any()):
        raise ValueError(
            f"groups {labels[count == 1].tolist()} have one response: an advantage relative to the group needs two"
        )

    def per_group(x: Tensor) -> Tensor:
        return torch.zeros(len(labels), dtype=x.dtype, device=x.device).index_add(0, index, x)[index]

    largest = torch.full((len(labels),), -torch.inf, dtype=values.dtype, device=values.device)
    largest = largest.scatter_reduce(0, index, values, "amax")[index]
    unequal = per_group((values < largest).to(values.dtype)) > 0
    advantages = torch.where(unequal, values - per_group(values) / count[index], 0.0)
    if scale is not None:
        advantages = torch.where(unequal, scale(advantages, per_group, count[index]), 0.0)
    return advantages.to(floating(rewards))


def check_rewards(rewards: Tensor, groups: Tensor) -> None:
    """Raise ValueError unless there is one finite reward and one label a response."""
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, groups {list(groups.shape)}: one of each a response"
        )
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(f"rewards of responses {rows} are not finite: {rewards[rows].tolist()}")


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless the summand of a divisor is finite and not negative."""
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"advantage_epsilon is {epsilon}; a number of 0 or more is allowed")


def floating(rewards: Tensor) -> torch.dtype:
    """The dtype of advantages: that of the rewards, or the default one for integers."""
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()


def positions(batch: TokenBatch) -> Tensor:
    """[N] the position of each token within its response, from 0; the tokens of a response stand in their order."""
    order = torch.argsort(batch.sequence, stable=True)
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    place = torch.empty_like(order)
    place[order] = torch.arange(batch.num_tokens, device=order.device) - starts[batch.sequence[order]]
    return place
