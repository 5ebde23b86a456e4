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


@dataclass(frozen=True)
class HoelderRatio:
    """rho_p = ((1/|o|) sum_t r_t^p)^(1/p): the power mean of a response's token ratios (HoelderPO, 2605.12058).

    p: 1 is the arithmetic mean, 0 the geometric one (GSPO, TEPO), -1 the harmonic one.
    """

    name = "hoelder"
    p: float = 0.0

    def __post_init__(self) -> None:
        check_power(self.p)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """-> [N] log-ratios."""
        return log_power_mean(batch, batch.logp - batch.old_logp, self.p)[batch.sequence]


@dataclass(frozen=True)
class NoRatio:
    """No ratio: the objective is a score function of log pi, as if every update were on-policy (REINFORCE)."""

    name = "none"

    def __call__(self, batch: TokenBatch) -> Tensor:
        """-> [N] log-ratios, all 0."""
        return torch.zeros_like(batch.old_logp)


Ratio = TokenRatio | SequenceRatio | SequenceTokenRatio | HoelderRatio | NoRatio
RATIOS: dict[str, type[Ratio]] = {
    kind.name: kind for kind in (TokenRatio, SequenceRatio, SequenceTokenRatio, HoelderRatio)
}
"""Those that can stand in for one another; NoRatio belongs to a surrogate that reads none."""

SMALLEST_POWER = 1e-30
"""Below it a power mean is its limit at 0 to the last bit, and 1/p would overflow float32."""


def check_power(p: float) -> None:
    """Raise ValueError unless the exponent of a power mean is finite."""
    if not abs(p) < float("inf"):
        raise ValueError(f"p is {p}; a finite exponent is allowed")


def log_power_mean(batch: TokenBatch, log_values: Tensor, p: float) -> Tensor:
    """log ((1/|o|) sum_t v_t^p)^(1/p) of positive values given by their logarithms: [N] -> [S]; p = 0 is the limit.

    Taken about the geometric mean, where what is left is small: mean + (1/p) log mean exp(p (log v - mean)). Where
    the exponents are small too, through expm1 and log1p, so that a tiny p loses nothing; elsewhere through logsumexp.
    A response without a token gives 0.
    """
    mean = batch.sequence_mean(log_values)
    if abs(p) < SMALLEST_POWER:
        return mean
    exponents = p * (log_values - mean[batch.sequence])
    limit = torch.zeros(batch.num_sequences, dtype=exponents.dtype, device=exponents.device)
    largest = limit.scatter_reduce(0, batch.sequence, exponents.detach(), "amax")
    spread = limit.scatter_reduce(0, batch.sequence, exponents.detach().abs(), "amax")
    close = batch.sequence_mean(torch.expm1(exponents.clamp(-1, 1)))
    wide = batch.sequence_mean(torch.exp(exponents - largest[batch.sequence]))
    wide = torch.where(batch.lengths > 0, wide, 1.0)
    return mean + torch.where(spread < 1, torch.log1p(close.clamp(min=-0.9)), torch.log(wide) + largest) / p


def exponentiate(log_ratio: Tensor) -> Tensor:
    """The ratio itself; log-ratios beyond LOG_RATIO_LIMIT are held there, with no gradient."""
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_LIMIT))
