"""Changing the advantage of single tokens by what the current policy says of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch


@dataclass(frozen=True)
class EntropyShaping:
    """A'_t = A + min(alpha sg(H_t), |A| / kappa): tokens where the policy is unsure count more (2506.14758).

    alpha: .4 with GRPO, .1 with PPO in the paper. kappa: above 1, the sign of the advantage never changes.
    H is the entropy under the current policy. Where A = 0 nothing is added.
    """

    alpha: float = 0.4
    kappa: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; a number of 0 or more is allowed")
        if not self.kappa > 1:
            raise ValueError(
                f"kappa is {self.kappa}; above 1 is allowed, so that the bonus never outweighs the advantage"
            )

    def __call__(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """advantages [N] -> advantages [N]."""
        assert batch.entropy is not None
        entropy = batch.entropy.detach().clamp(min=0)  # rounding may leave a little less
        return advantages + torch.minimum(self.alpha * entropy, advantages.abs() / self.kappa)
