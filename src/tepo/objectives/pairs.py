"""Preference objectives on pairs from the rollouts of a group: its best response against its worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tepo.objectives.advantages import Advantage, check_rewards, floating
from tepo.objectives.aggregates import Aggregate
from tepo.objectives.batch import TokenBatch, Totals
from tepo.objectives.surrogates import Surrogate, SurrogateOutput

SMALLEST_LOSS = 1e-6
"""Nats; a response whose mean log-prob is nearer to 0 counts as having this one, since log (1 - p) would be -inf."""


@dataclass(frozen=True)
class BestAgainstWorst(Advantage):
    """+1 for the response of a group with the highest reward, -1 for the one with the lowest, 0 for the others.

    Among equals the first is taken: responses are sampled independently of one another, so that it is a random one.
    Responses without a token are passed over. A group whose rewards are all equal gives no pair, and 0 throughout.
    """

    name: ClassVar[str] = "best_against_worst"
    exchangeable: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S], lengths [S] in tokens (above 0 when not given) -> [S]."""
        check_rewards(rewards, groups)
        advantages = torch.zeros(len(rewards), dtype=floating(rewards), device=rewards.device)
        for label in torch.unique(groups):
            rows = torch.nonzero((groups == label) & (True if lengths is None else lengths > 0)).flatten()
            if len(rows) and rewards[rows].max() > rewards[rows].min():
                advantages[rows[rewards[rows].argmax()]] = 1
                advantages[rows[rewards[rows].argmin()]] = -1
        return advantages


@dataclass(frozen=True)
class PairSurrogate(Surrogate):
    """A utility of pairs: the response with a positive advantage, and the one with a negative advantage, of a group.

    A pair needs both its responses: they are never in different micro-batches. What a pair contributes stands at the
    tokens of the chosen response, in equal parts. Subclasses say what a response scores and what a pair is worth.
    """

    pairs: ClassVar[bool] = True

    def score(self, batch: TokenBatch) -> Tensor:
        """-> [S], of each response."""
        raise NotImplementedError

    def utility(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Scores [P] of the responses of P pairs -> [P], maximised."""
        raise NotImplementedError

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """log_ratio [N] is not used; advantages [N]. Raises ValueError for half a pair."""
        chosen, rejected = _sides(batch, advantages)
        scores = self.score(batch)
        value = torch.zeros_like(scores).index_add(0, chosen, self.utility(scores[chosen], scores[rejected]))
        share = value / batch.lengths.clamp(min=1)
        return share[batch.sequence], torch.zeros_like(advantages, dtype=torch.bool)


@dataclass(frozen=True)
class DPO(PairSurrogate):
    """log sigmoid(beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]) (2305.18290).

    Log-probs are summed over the tokens of a response.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ref_logp"})
    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_strength("beta", self.beta)

    def score(self, batch: TokenBatch) -> Tensor:
        assert batch.ref_logp is not None
        return batch.sequence_mean(batch.logp - batch.ref_logp) * batch.lengths

    def utility(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return logsigmoid(self.beta * (chosen - rejected))


@dataclass(frozen=True)
class ORPO(PairSurrogate):
    """log p(chosen) + beta log sigmoid(log odds(chosen) - log odds(rejected)), mean log-probs over tokens (2403.07691).

    odds = p / (1 - p) with p the geometric mean of a response's token probabilities. beta: the paper's lambda.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_strength("beta", self.beta)

    def score(self, batch: TokenBatch) -> Tensor:
        return batch.sequence_mean(batch.logp)

    def utility(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return chosen + self.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


@dataclass(frozen=True)
class GroupMean(Aggregate):
    """1/groups: every prompt of the step counts the same, those that give no pair among them."""

    name: ClassVar[str] = "group_mean"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        return torch.full_like(batch.old_logp, 1 / max(totals.groups, 1))


def log_odds(logp: Tensor) -> Tensor:
    """log (p / (1 - p)) from log p <= 0."""
    logp = logp.clamp(max=-SMALLEST_LOSS)
    return logp - torch.log(-torch.expm1(logp))


def _sides(batch: TokenBatch, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [P] of the chosen and of the rejected responses, pair by pair."""
    sides = []
    for sign in (1, -1):
        marked = torch.zeros_like(batch.group, dtype=torch.bool)
        marked[batch.sequence[advantages.sign() == sign]] = True
        rows = torch.nonzero(marked).flatten()
        sides.append(rows[torch.argsort(batch.group[rows])])
    chosen, rejected = (batch.group[rows] for rows in sides)
    if len(chosen) != len(rejected) or not bool((chosen == rejected).all()) or len(torch.unique(chosen)) < len(chosen):
        raise ValueError(
            f"pairs need one chosen and one rejected response of a group, in one micro-batch; chosen are some of "
            f"groups {chosen.tolist()}, rejected some of {rejected.tolist()}"
        )
    return sides[0], sides[1]


def _check_strength(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; a positive number is allowed")
