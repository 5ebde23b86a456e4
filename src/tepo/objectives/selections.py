"""Choosing some of the tokens of an optimizer step: by entropy, or by how reward and likelihood vary together.

A selection is made over the whole step, never within a micro-batch (verl issues 7829, 7913): `Objective.prepare`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch

Use = Literal["keep", "drop", "mark"]
"""`keep`: only selected tokens are in the loss, its denominators and the ratios of whole responses. `drop`: selected
tokens contribute nothing, the denominators stay. `mark`: a term treats them (CovarianceKL)."""


def check_share(name: str, share: float) -> None:
    """Raise ValueError unless `share` is a part of the whole."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} is {share}; a share of the tokens, above 0 and at most 1, is allowed")


def largest(values: Tensor, share: float) -> Tensor:
    """[N] bool: the `share` of the tokens with the largest values, rounded up, one at least."""
    chosen = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    if len(values):
        # The share of a count may come out a rounding error above the whole number that it is.
        chosen[values.topk(max(1, math.ceil(share * len(values) - 1e-9))).indices] = True
    return chosen


def covariance(batch: TokenBatch, advantages: Tensor) -> Tensor:
    """[N] (A - mean A)(logp - mean logp) over the tokens of the step (2505.22617): what drives the entropy down."""
    logp = batch.logp.detach()
    return (advantages - advantages.mean()) * (logp - logp.mean())


@dataclass(frozen=True)
class TopEntropy:
    """The tokens with the highest entropy, where the model decides: "forking tokens" (2506.01939, the 80/20 rule).

    The others are as if they were not there: a sequence or power-mean ratio is that of the tokens chosen.
    """

    share: float = 0.2
    use: ClassVar[Use] = "keep"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        check_share("share", self.share)

    def __call__(self, batch: TokenBatch, advantages: Tensor, clipped: Tensor) -> Tensor:
        """The whole step -> [N] bool."""
        assert batch.entropy is not None
        return largest(batch.entropy.detach(), self.share)


@dataclass(frozen=True)
class TopCovariance:
    """The tokens with the highest covariance of advantage and log-prob (KL-Cov, 2505.22617).

    share: 2e-3 for 7B, 2e-4 for 32B in the paper; rounded down as there, one token at least.
    """

    share: float = 2e-3
    use: ClassVar[Use] = "mark"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_share("share", self.share)

    def __call__(self, batch: TokenBatch, advantages: Tensor, clipped: Tensor) -> Tensor:
        """The whole step -> [N] bool."""
        count = max(1, int(self.share * batch.num_tokens + 1e-9))
        return largest(covariance(batch, advantages), count / max(batch.num_tokens, 1))


@dataclass(frozen=True)
class RandomCovariance:
    """A random share of the tokens, drawn among those of covariance in (low, high) and not clipped (Clip-Cov).

    2505.22617. Drawn with torch's own generator: the trainer seeds it for each step.
    """

    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    use: ClassVar[Use] = "drop"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_share("share", self.share)
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low is {self.cov_low} and cov_high {self.cov_high}; a range is wanted")

    def __call__(self, batch: TokenBatch, advantages: Tensor, clipped: Tensor) -> Tensor:
        """The whole step -> [N] bool."""
        cov = covariance(batch, advantages)
        eligible = torch.nonzero((cov > self.cov_low) & (cov < self.cov_high) & ~clipped).flatten()
        count = max(1, int(self.share * batch.num_tokens + 1e-9))
        drawn = eligible[torch.randperm(len(eligible))[:count].to(eligible.device)]
        selected = torch.zeros_like(clipped)
        selected[drawn] = True
        return selected


Selection = TopEntropy | TopCovariance | RandomCovariance
