"""PPO with a critic: generalized advantage estimation, and the loss that trains the critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.advantages import Advantage, check_rewards, positions
from tepo.objectives.batch import TokenBatch, Totals, widest
from tepo.objectives.terms import Term, TermOutput, check_coefficient

VARIANCE_EPSILON = 1e-8
"""Added to the variance of the advantages before its root divides them."""


def discounted_advantages(batch: TokenBatch, rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token.

    rewards, values: [N] of the tokens of a batch -> [N] (generalized advantage estimation, 1506.02438, equation 16).
    """
    place, longest = positions(batch), int(batch.lengths.max()) if batch.num_tokens else 0
    shape = batch.num_sequences, longest + 1
    padded_rewards, padded_values = torch.zeros(2, *shape, dtype=values.dtype, device=values.device)
    padded_rewards[batch.sequence, place] = rewards
    padded_values[batch.sequence, place] = values
    advantages = torch.zeros_like(padded_values)
    for t in reversed(range(longest)):
        delta = padded_rewards[:, t] + gamma * padded_values[:, t + 1] - padded_values[:, t]
        advantages[:, t] = delta + gamma * lam * advantages[:, t + 1]
    return advantages[batch.sequence, place]


@dataclass(frozen=True)
class GAEAdvantage(Advantage):
    """Generalized advantage estimation from a critic's values, whitened over the tokens of the rollout (PPO).

    The reward stands at the last token of a response. gamma: discount. lam: 1 trusts the rewards alone, 0 the critic.
    kl: what a token pays for each nat of log pi_old - log pi_ref (a KL penalty inside the reward, as in Tulu 3). The
    variance is that of a sample (ddof 1).
    """

    name: ClassVar[str] = "gae"
    across_groups: ClassVar[bool] = True
    exchangeable: ClassVar[bool] = False
    gamma: float = 1.0
    lam: float = 0.95
    kl: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; 0 to 1 is allowed")
        check_coefficient("reward_kl", self.kl)

    @property
    def relative_to_group(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"old_values", "ref_logp"} if self.kl else {"old_values"})

    def estimate(self, batch: TokenBatch) -> Tensor:
        """[N] advantages before they are whitened."""
        if batch.rewards is None or batch.old_values is None:
            raise ValueError("the advantage 'gae' reads rewards and old_values, which the batch does not have")
        check_rewards(batch.rewards, batch.group)
        precise = widest(batch.old_values.device)
        last = positions(batch) == batch.lengths[batch.sequence] - 1
        rewards = torch.where(last, batch.rewards[batch.sequence].to(precise), 0.0)
        if self.kl:
            if batch.ref_logp is None:
                raise ValueError("the advantage 'gae' with reward_kl reads ref_logp, which the batch does not have")
            rewards = rewards - self.kl * (batch.old_logp - batch.ref_logp).to(precise)
        return discounted_advantages(batch, rewards, batch.old_values.to(precise), self.gamma, self.lam)

    def per_token(self, batch: TokenBatch) -> Tensor:
        advantages = self.estimate(batch)
        if batch.num_tokens < 2 or bool((advantages == advantages[0]).all()):  # and not a rounding residue, magnified
            return torch.zeros_like(advantages)
        return (advantages - advantages.mean()) * torch.rsqrt(advantages.var() + VARIANCE_EPSILON)

    def returns(self, batch: TokenBatch) -> Tensor:
        """[N] A_t + V_t: what is left to earn, as far as the critic and the rewards tell."""
        assert batch.old_values is not None
        return (self.estimate(batch) + batch.old_values).to(batch.old_logp.dtype)


@dataclass(frozen=True)
class ValueLoss(Term):
    """+ (coefficient/N) sum_t 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2): trains the critic.

    R are the returns of the advantage. clip: None leaves the second square out. The critic has parameters and an
    optimizer of its own, so that the coefficient counts beside its gradient's clipping alone (as in TRL and verl).
    """

    name: ClassVar[str] = "value_loss"
    strength: ClassVar[str] = "coefficient"
    coefficient: float = 1.0
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        check_coefficient("value_loss.coefficient", self.coefficient)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"value_loss.clip is {self.clip}; a number above 0 is allowed, or none")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values", "old_values", "returns"} if self.clip is not None else {"values", "returns"})

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        assert batch.values is not None
        assert batch.returns is not None
        square = (batch.values - batch.returns).square()
        if self.clip is not None:
            assert batch.old_values is not None
            moved = torch.clamp(batch.values, batch.old_values - self.clip, batch.old_values + self.clip)
            square = torch.maximum(square, (moved - batch.returns).square())
        cost = self.coefficient * 0.5 * square.sum() / max(totals.tokens, 1)
        return TermOutput(cost, {"value_error": (batch.values - batch.returns).detach().abs()})
