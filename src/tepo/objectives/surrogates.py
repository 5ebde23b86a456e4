"""What a token contributes to the objective, given its ratio and its advantage."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch
from tepo.objectives.ratios import check_power, exponentiate, log_power_mean

SurrogateOutput = tuple[Tensor, Tensor]
"""What each token contributes [N] (maximised), and whether its ratio is clipped [N] (bool, detached)."""


class Surrogate:
    """A part of an objective; subclasses are frozen dataclasses.

    needs: optional fields of TokenBatch that it reads. touches_zero_advantage: whether a token with zero advantage can
    have a gradient. pairs: whether it compares responses of a group, which must then be in one micro-batch.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    touches_zero_advantage: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] and advantages [N] of a batch."""
        raise NotImplementedError


def check_clip(low: float, high: float) -> None:
    """Raise ValueError unless a ratio can be clipped to 1 - low ... 1 + high."""
    if not 0 <= low <= 1:
        raise ValueError(f"clip_low is {low}; the ratio is clipped at 1 - clip_low, so 0 to 1 is allowed")
    if not high >= 0:
        raise ValueError(f"clip_high is {high}; the ratio is clipped at 1 + clip_high, so 0 or more is allowed")


def pessimistic(values: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """Bound values [N] from above by `high` where A >= 0, from below by `low` (and above by `dual`) where A < 0.

    For a ratio and its clipped copy this is PPO's minimum of r A and clip(r) A, written so that no gradient goes
    through the branch not taken.
    """
    return torch.where(advantages >= 0, values.clamp(max=high), values.clamp(min=low, max=dual))


@dataclass(frozen=True)
class Clip(Surrogate):
    """PPO's pessimistic clip: min(r A, clip(r, 1 - low, 1 + high) A); with dual clip also >= dual * A where A < 0.

    low, high: how far the ratio may fall or rise before a token stops contributing a gradient.
    dual: a bound c > 1 on the ratio of tokens with a negative advantage (dual-clip PPO, 1912.09729), or None.
    """

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        check_clip(self.low, self.high)
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip is {self.dual}; a bound above 1 is allowed, or none")

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N], advantages [N]."""
        ratio = exponentiate(log_ratio)
        bounded = pessimistic(ratio, advantages, 1 - self.low, 1 + self.high, self.dual)
        clipped = (advantages != 0) & (bounded != ratio)
        return bounded * advantages, clipped.detach()


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A, with no bound on the ratio."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N], advantages [N]."""
        return exponentiate(log_ratio) * advantages, torch.zeros_like(advantages, dtype=torch.bool)


@dataclass(frozen=True)
class ScoreFunction(Surrogate):
    """A log pi: the policy gradient itself (REINFORCE, GPG 2504.02546)."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] is not used, advantages [N]."""
        return advantages * batch.logp, torch.zeros_like(advantages, dtype=torch.bool)


@dataclass(frozen=True)
class ClippedWeight(Surrogate):
    """sg[clip(r, 1 - low, 1 + high)] A log pi: a clipped token keeps a gradient of bounded weight (CISPO, 2506.13585).

    low: 1 is no lower bound. high: an offset from 1, as verl has it; TRL's epsilon_high for it is 1 + high.
    """

    low: float = 1.0
    high: float = 0.28

    def __post_init__(self) -> None:
        check_clip(self.low, self.high)

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N], advantages [N]."""
        ratio = exponentiate(log_ratio).detach()
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        return weight * advantages * batch.logp, (advantages != 0) & (weight != ratio)


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """(4/tau) sigmoid(tau (r - 1)) A: the gradient fades with the distance of the ratio from 1 (SAPO, 2511.20347).

    tau, tau_negative: the sharpness for tokens with A > 0 and for the others. Nothing is clipped.
    """

    tau: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        for name in ("tau", "tau_negative"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; a positive number is allowed")

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N], advantages [N]."""
        # Two numbers in torch.where would make a float32 of 1.05 before any conversion.
        tau = torch.full_like(log_ratio, self.tau_negative).masked_fill(advantages > 0, self.tau)
        gate = torch.sigmoid(tau * (exponentiate(log_ratio) - 1)) * 4 / tau
        return gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


@dataclass(frozen=True)
class LogSpaceClip(Surrogate):
    """exp(mean_t l_it) A_i, with each token's log-ratio bounded to -low ... high first (GMPO, 2507.20673).

    l_it = sgn(A) min(sgn(A) log r, sgn(A) clamp(log r, -low, high)). The bounds are in log space, per token.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"clip_{name} is {getattr(self, name)}; a log-ratio of 0 or more is allowed")

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] of the tokens, advantages [N]."""
        bounded = pessimistic(log_ratio, advantages, -self.low, self.high)
        clipped = (advantages != 0) & (bounded != log_ratio)
        bounded = torch.where(advantages == 0, 0.0, bounded)
        return exponentiate(batch.sequence_mean(bounded)[batch.sequence]) * advantages, clipped.detach()


@dataclass(frozen=True)
class HoelderClip(Surrogate):
    """rho_p A with each token ratio bounded before the power mean is taken, and none after (HoelderPO, token variant).

    p: the exponent of the mean (`HoelderRatio`). With p = 1 it is GRPO's mean of clipped ratios.
    """

    p: float = 0.0
    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        check_power(self.p)
        check_clip(self.low, self.high)

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] of the tokens, advantages [N]."""
        floor = math.log1p(-self.low) if self.low < 1 else -math.inf
        bounded = pessimistic(log_ratio, advantages, floor, math.log1p(self.high))
        clipped = (advantages != 0) & (bounded != log_ratio)
        return exponentiate(log_power_mean(batch, bounded, self.p))[batch.sequence] * advantages, clipped.detach()


@dataclass(frozen=True)
class NegativeEntropy(Surrogate):
    """- H: nothing but making the policy surer of what it samples; no reward is used (EM-FT, 2505.15134)."""

    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "entropy_gradient"})
    touches_zero_advantage: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] and advantages [N] are not used."""
        assert batch.entropy is not None
        return -batch.entropy, torch.zeros_like(advantages, dtype=torch.bool)
