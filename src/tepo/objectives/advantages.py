"""From the rewards of a group to one advantage for each response."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupAdvantage:
    """A_i = (R_i - mean R) / (std R + epsilon) over the responses to one prompt (GRPO, 2402.03300).

    normalize: divide by the sample standard deviation (ddof 1); without it A_i = R_i - mean R (Dr.GRPO, 2503.20783).
    """

    normalize: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < float("inf"):
            raise ValueError(f"advantage_epsilon is {self.epsilon}; a number of 0 or more is allowed")

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """rewards [S], groups [S] (any integer labels) -> advantages [S], in their dtype (integers: the default one).

        A group whose rewards are all equal gets exactly 0: decided by equality, since a rounding residue divided by
        epsilon is a large number. Raises ValueError for a group of one response and for rewards that are not finite.
        """
        if rewards.shape != groups.shape or rewards.dim() != 1:
            raise ValueError(
                f"rewards has shape {list(rewards.shape)}, groups {list(groups.shape)}: one of each a response"
            )
        values = rewards.double()
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
            return torch.zeros(len(labels), dtype=x.dtype, device=x.device).index_add(0, index, x)

        centred = values - (per_group(values) / count)[index]
        largest = torch.full((len(labels),), -torch.inf, dtype=values.dtype, device=values.device)
        largest = largest.scatter_reduce(0, index, values, "amax")
        smallest = -torch.full_like(largest, -torch.inf).scatter_reduce(0, index, -values, "amax")
        if self.normalize:
            deviation = torch.sqrt(per_group(centred.square()) / (count - 1))
            centred = centred / (deviation[index] + self.epsilon)
        centred = torch.where((largest == smallest)[index], 0.0, centred)
        return centred.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
