"""Advantages from a process reward model, on segments of a response that end where its entropy spikes (PRPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.advantages import Advantage, CenteredAdvantage
from tepo.objectives.batch import TokenBatch

PROCESS_MEAN, PROCESS_SPREAD = 0.5, math.sqrt(1 / 24)
"""What scores in 0 ... 1 are centred on and divided by: those of the mean of two uniform numbers."""


@dataclass(frozen=True)
class SegmentAdvantage(Advantage):
    """A_t = (process reward of the segment of t - 0.5) / sqrt(1/24) + (R_i - mean R) (PRPO, 2601.07182).

    The paper's outcome rewards are +1 and -1. A response is cut where its next-token entropy is highest: before at most
    `cuts` tokens, `gap` tokens apart from one another and from the start.
    """

    name: ClassVar[str] = "segment"
    cuts: int = 5
    gap: int = 10

    def __post_init__(self) -> None:
        for name, least in (("cuts", 0), ("gap", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; a whole number of {least} or more is allowed")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"process_reward"})

    def segments(self, entropy: Tensor) -> list[int]:
        """Where the segments of one response start, 0 first, from the entropies [n] of its tokens when sampled."""
        starts = [0]
        for spike in torch.argsort(entropy, descending=True, stable=True).tolist():
            if len(starts) > self.cuts:
                break
            if all(abs(spike - start) >= self.gap for start in starts):
                starts.append(spike)
        return sorted(starts)

    def per_token(self, batch: TokenBatch) -> Tensor:
        if batch.rewards is None or batch.process_reward is None:
            raise ValueError("the advantage 'segment' reads rewards and process_reward, which the batch does not have")
        outcome = CenteredAdvantage()(batch.rewards, batch.group)[batch.sequence]
        return (batch.process_reward - PROCESS_MEAN) / PROCESS_SPREAD + outcome
