"""What a token contributes to the objective, given its ratio and its advantage."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.objectives.ratios import exponentiate


@dataclass(frozen=True)
class Clip:
    """PPO's pessimistic clip: min(r A, clip(r, 1 - low, 1 + high) A); with dual clip also >= dual * A where A < 0.

    low, high: how far the ratio may fall or rise before a token stops contributing a gradient.
    dual: a bound c > 1 on the ratio of tokens with a negative advantage (dual-clip PPO, 1912.09729), or None.
    """

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip_low is {self.low}; the ratio is clipped at 1 - clip_low, so 0 to 1 is allowed")
        if not self.high >= 0:
            raise ValueError(
                f"clip_high is {self.high}; the ratio is clipped at 1 + clip_high, so 0 or more is allowed"
            )
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip is {self.dual}; a bound above 1 is allowed, or none")

    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """log_ratio [N], advantages [N] -> what each token contributes [N] (maximised), and whether it is clipped [N].

        Written as a bound on the ratio for each sign of the advantage, which is the same as the minimum above and
        sends no gradient through the branch not taken.
        """
        ratio = exponentiate(log_ratio)
        rising = ratio.clamp(max=1 + self.high)
        falling = ratio.clamp(min=1 - self.low, max=self.dual)
        bounded = torch.where(advantages >= 0, rising, falling)
        clipped = (advantages != 0) & (bounded != ratio)
        return bounded * advantages, clipped.detach()
