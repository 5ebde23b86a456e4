"""Importance ratios between the current policy and the one that sampled, as log-ratios of one value a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch

LOG_RATIO_LIMIT = 40.0
"""Largest log-ratio that is exponentiated: e^40 is far beyond any trust region and still finite in every dtype used."""


@dataclass(frozen=True)
class TokenRatio:
    """r_it = exp(logp_it - old_logp_it), as in PPO, GRPO and DAPO."""

    name = "token"

    def __call__(self, batch: TokenBatch) -> Tensor:
        """-> [N] log-ratios."""
        return batch.logp - batch.old_logp


@dataclass(frozen=True)
class SequenceRatio:
    """s_i = exp(mean_t(logp_it - old_logp_it)): the likelihood of the response, length-normalised (GSPO, TEPO).

    The geometric mean of the token ratios; every token of a response has the same value, and all of them its gradient.
    """

    name = "sequence"

    def __call__(self, batch: TokenBatch) -> Tensor:
        """-> [N] log-ratios."""
        return batch.sequence_mean(batch.logp - batch.old_logp)[batch.sequence]


@dataclass(frozen=True)
class SequenceTokenRatio:
    """s_it = sg[s_i] pi_it / sg[pi_it]: the value of s_i with the gradient of the token alone (GSPO-token, eq. 14).

    The same gradient as SequenceRatio where the advantage is constant over a response; where it varies, each token
    keeps its own advantage instead of the response's mean.
    """

    name = "sequence_token"

    def __call__(self, batch: TokenBatch) -> Tensor:
        """-> [N] log-ratios."""
        return SequenceRatio()(batch).detach() + (batch.logp - batch.logp.detach())


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio
RATIOS: dict[str, type[Ratio]] = {kind.name: kind for kind in (TokenRatio, SequenceRatio, SequenceTokenRatio)}


def exponentiate(log_ratio: Tensor) -> Tensor:
    """The ratio itself; log-ratios beyond LOG_RATIO_LIMIT are held there, with no gradient."""
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_LIMIT))
