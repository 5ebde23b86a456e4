"""The log-probs under which tokens were sampled against those that the trained policy gave them at that time.

Sampling and scoring are different programs (one token after the other from a cache, or another engine altogether; and
whole responses at once), so that rounding makes them two policies. The ratio of an update lies between scores of one
program and does not see it: it has to be measured, and where it matters weighed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.config.recipe import RolloutConfig
from tepo.objectives import Objective, TokenBatch
from tepo.train.sample import Sample


def sampled_logps(samples: Sequence[Sample], like: Tensor) -> Tensor:
    """[N]: of the scored tokens, under which they were sampled."""
    values = [logp for sample in samples for logp in sample.sampled_logps]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Correction:
    """Weights for advantages that undo, or bound, the difference between the policy that sampled and the old one.

    kind: `truncated`, min(old/sampled, cap) for each token (truncated importance sampling); `mask`, 0 for the tokens of
    a response whose likelihood under one is more than `cap` times that under the other, and 1 for others; `none`.
    """

    kind: str = "none"
    cap: float = 2.0

    @classmethod
    def of(cls, config: RolloutConfig) -> Correction:
        return cls(config.correction, config.correction_cap)

    def __call__(self, advantages: Tensor, old_logp: Tensor, sampled: Tensor, sequence: Tensor) -> Tensor:
        """Advantages [N] with their weights, which are constants; all arguments [N]."""
        if self.kind == "none":
            return advantages
        difference = old_logp.detach() - sampled
        limit = torch.tensor(self.cap, dtype=difference.dtype, device=difference.device).log()
        if self.kind == "truncated":
            return advantages * difference.clamp(max=limit).exp()
        whole = difference.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, difference)[sequence]
        return torch.where(whole.abs() <= limit, advantages, 0.0)


def measure(objective: Objective, batch: TokenBatch, sampled: Tensor) -> dict[str, float]:
    """mismatch, mismatch_max: of the absolute difference (nats) of tokens, mean and maximum.

    mismatch_beyond: share of tokens whose ratio, taken as the objective takes it (of tokens or of whole responses) but
    between the old policy and the sampled log-probs, lies outside the objective's clip range; if it has both.
    """
    difference = (batch.old_logp - sampled).abs()
    metrics = {"mismatch": float(difference.mean()), "mismatch_max": float(difference.max())}
    bounds = objective.clip_range
    if bounds is not None:
        between = dataclasses.replace(batch, logp=batch.old_logp, old_logp=sampled)
        ratio = objective.ratio(between).exp()
        beyond = (ratio < 1 - bounds[0]) | (ratio > 1 + bounds[1])
        metrics["mismatch_beyond"] = float(beyond.to(ratio.dtype).mean())
    return metrics
