"""SKPO (2604.08690): responses that share their beginning; one credit for it, another for how they go on.

The tokens of the prefix are marked as `shared`. They stand in one row of a group and in no other: before the tokens of
one of its responses, or in a row of their own, which is no response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.advantages import Advantage, StandardizedAdvantage, check_epsilon, check_rewards
from tepo.objectives.aggregates import Aggregate
from tepo.objectives.batch import TokenBatch, Totals
from tepo.objectives.surrogates import Clip, ClippedWeight, Surrogate, SurrogateOutput, check_clip


@dataclass(frozen=True)
class SharedPrefixAdvantage(Advantage):
    """For the responses of a group its standardized advantages; for their prefix mean R - baseline (SKPO).

    mean R is that of the responses, whatever a row of the prefix alone has for a reward; the baseline is what responses
    to the prompt earned in earlier rollouts (TokenBatch.baseline). epsilon: see StandardizedAdvantage.
    """

    name: ClassVar[str] = "shared_prefix"
    exchangeable: ClassVar[bool] = False
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"shared", "baseline"})

    def per_token(self, batch: TokenBatch) -> Tensor:
        if batch.rewards is None or batch.shared is None or batch.baseline is None:
            raise ValueError(
                "the advantage 'shared_prefix' reads rewards, shared and baseline, which are not all there"
            )
        check_rewards(batch.rewards, batch.group)
        own = torch.bincount(batch.sequence[~batch.shared], minlength=batch.num_sequences)
        prefix = (batch.lengths > 0) & (own == 0)
        rewards, groups = batch.rewards[~prefix], batch.group[~prefix]
        if alone := set(batch.group.tolist()) - set(groups.tolist()):
            raise ValueError(f"groups {sorted(alone)} have a shared prefix and no response that goes on from it")
        responses = torch.zeros_like(batch.rewards)
        responses[~prefix] = StandardizedAdvantage(self.epsilon)(rewards, groups)
        labels, index = torch.unique(groups, return_inverse=True)
        total = torch.zeros(len(labels), dtype=rewards.dtype, device=rewards.device).index_add(0, index, rewards)
        mean = (total / torch.bincount(index))[torch.searchsorted(labels, batch.group)]
        return torch.where(batch.shared, mean[batch.sequence] - batch.baseline, responses[batch.sequence])


@dataclass(frozen=True)
class PrefixAndRest(Surrogate):
    """PPO's clip on the tokens of the prefix, CISPO's clipped weight on the others.

    low, high: how far the weight goes from 1. prefix_low, prefix_high: how far the ratio of a prefix token may.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"shared"})
    low: float = 0.2
    high: float = 0.28
    prefix_low: float = 0.2
    prefix_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip(self.low, self.high)
        check_clip(self.prefix_low, self.prefix_high)

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N], advantages [N]."""
        assert batch.shared is not None
        prefix, prefix_clipped = Clip(self.prefix_low, self.prefix_high)(batch, log_ratio, advantages)
        rest, rest_clipped = ClippedWeight(self.low, self.high)(batch, log_ratio, advantages)
        return torch.where(batch.shared, prefix, rest), torch.where(batch.shared, prefix_clipped, rest_clipped)


@dataclass(frozen=True)
class LevelMean(Aggregate):
    """share/N_prefix for the tokens of prefixes, (1 - share)/N_rest for the others: two token means, weighed."""

    name: ClassVar[str] = "level_mean"
    needs: ClassVar[frozenset[str]] = frozenset({"shared"})
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"prefix_share is {self.share}; 0 to 1 is allowed")

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        assert batch.shared is not None
        prefix = self.share / max(totals.shared_tokens, 1)
        rest = (1 - self.share) / max(totals.tokens - totals.shared_tokens, 1)
        return torch.full_like(batch.old_logp, rest).masked_fill(batch.shared, prefix)
