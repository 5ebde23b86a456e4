"""Terms whose coefficient adapts from step to step; their fields are their whole state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tepo.objectives.batch import TokenBatch, Totals
from tepo.objectives.terms import Term, TermOutput, check_coefficient, k3


@dataclass(frozen=True)
class AdaptiveEntropy(Term):
    """- coefficient * mean H~ over the tokens of the step, the coefficient kept adapting (AEnt, 2509.03493).

    H~ is the entropy of the distribution renormalised on the most likely (1 - dropped) share of the vocabulary, so that
    it rewards a choice between likely tokens and not a long tail. After each step beyond the warm-up

        coefficient <- clip(coefficient - rate [min(0, H~ - low) + max(0, H~ - high)], smallest, largest)

    low, high: the range, in nats, that H~ is led into. updates: steps so far; it is part of the state.
    """

    name: ClassVar[str] = "adaptive_entropy"
    strength: ClassVar[str] = "coefficient"
    coefficient: float = 0.002
    dropped: float = 0.33
    low: float = 0.15
    high: float = 0.24
    rate: float = 0.002
    smallest: float = 0.0006
    largest: float = 0.009
    warmup: int = 30
    updates: int = 0

    def __post_init__(self) -> None:
        for name in ("coefficient", "low", "high", "rate", "smallest", "largest"):
            check_coefficient(f"adaptive_entropy.{name}", getattr(self, name))
        if not 0 <= self.dropped < 1:
            raise ValueError(
                f"adaptive_entropy.dropped is {self.dropped}; a share of the vocabulary below 1 is allowed"
            )
        if self.low > self.high or self.smallest > self.largest:
            raise ValueError("adaptive_entropy: low must not be above high, nor smallest above largest")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"top_entropy"})

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        assert batch.top_entropy is not None
        cost = -self.coefficient * batch.top_entropy.sum() / max(totals.tokens, 1)
        return TermOutput(cost, {"top_entropy": batch.top_entropy.detach()}, {"entropy_coefficient": self.coefficient})

    def adapted(self, metrics: Mapping[str, float]) -> AdaptiveEntropy:
        updates = self.updates + 1
        if updates <= self.warmup or "top_entropy" not in metrics:
            return dataclasses.replace(self, updates=updates)
        entropy = metrics["top_entropy"]
        moved = self.coefficient - self.rate * (min(0.0, entropy - self.low) + max(0.0, entropy - self.high))
        return dataclasses.replace(self, updates=updates, coefficient=min(max(moved, self.smallest), self.largest))


@dataclass(frozen=True)
class PolicyKL(Term):
    """+ beta KL(pi_old || pi) over the tokens of the step, beta adapting to a target (TRPO's constraint as a penalty).

    The estimate r - 1 - log r is unbiased for tokens sampled by pi_old and never negative. After each step beta doubles
    where the divergence is above 1.5 x target and halves where it is below target / 1.5 (PPO's adaptive penalty,
    1707.06347, section 4). target: nats a token.
    """

    name: ClassVar[str] = "policy_kl"
    touches_zero_advantage: ClassVar[bool] = True
    beta: float = 1.0
    target: float = 0.01

    def __post_init__(self) -> None:
        check_coefficient("policy_kl.beta", self.beta)
        check_coefficient("policy_kl.target", self.target)

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        kl = k3(batch.logp - batch.old_logp)
        return TermOutput(
            self.beta * kl.sum() / max(totals.tokens, 1), {"policy_kl": kl.detach()}, {"policy_kl_beta": self.beta}
        )

    def adapted(self, metrics: Mapping[str, float]) -> PolicyKL:
        divergence = metrics.get("policy_kl", self.target)
        factor = 2.0 if divergence > 1.5 * self.target else 0.5 if divergence < self.target / 1.5 else 1.0
        return dataclasses.replace(self, beta=min(max(self.beta * factor, 1e-6), 1e6))
