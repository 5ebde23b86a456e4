"""From the rewards of a group to one advantage for each response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.objectives.batch import widest


@dataclass(frozen=True)
class StandardizedAdvantage:
    """A_i = (R_i - mean R) / (std R + epsilon) over the responses to one prompt (GRPO, 2402.03300).

    The standard deviation is that of a sample (ddof 1).
    """

    name = "standardized"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < float("inf"):
            raise ValueError(f"advantage_epsilon is {self.epsilon}; a number of 0 or more is allowed")

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""

        def standardize(centered: Tensor, per_group: Callable[[Tensor], Tensor], count: Tensor) -> Tensor:
            return centered / (torch.sqrt(per_group(centered.square()) / (count - 1)) + self.epsilon)

        return relative_to_group(rewards, groups, standardize)


@dataclass(frozen=True)
class CenteredAdvantage:
    """A_i = R_i - mean R over the responses to one prompt (Dr.GRPO, 2503.20783)."""

    name = "centered"

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """rewards [S], groups [S] -> advantages [S]; see `relative_to_group`."""
        return relative_to_group(rewards, groups)


Advantage = StandardizedAdvantage | CenteredAdvantage
ADVANTAGES: dict[str, type[Advantage]] = {kind.name: kind for kind in (StandardizedAdvantage, CenteredAdvantage)}

Scale = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], Tensor]


def relative_to_group(rewards: Tensor, groups: Tensor, scale: Scale | None = None) -> Tensor:
    """Rewards less the mean of their group, then scaled.

    rewards: [S]. groups: [S], any integer labels. scale: takes the centered rewards [S], a function that sums within
    groups ([S] -> [S]) and the size of each response's group [S].
    -> [S], in the dtype of the rewards (integers: the default one). A group whose rewards are all equal gets exactly 0:
    decided by equality, since a rounding residue divided by epsilon is a large number.
    Raises ValueError for a group of one response and for rewards that are not finite.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, groups {list(groups.shape)}: one of each a response"
        )
    values = rewards.to(widest(rewards.device))
    if not bool(torch.isfinite(values).all()):
        rows = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        raise ValueError(f"rewards of responses {rows} are not finite: {rewards[rows].tolist()}")
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
    advantages = values - per_group(values) / count[index]
    if scale is not None:
        advantages = scale(advantages, per_group, count[index])
    advantages = torch.where(unequal, advantages, 0.0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
