"""How tokens are weighted in the loss: weights that sum over the whole optimizer step, whatever its micro-batches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, Totals


class Aggregate:
    """A part of an objective; subclasses are frozen dataclasses. needs: optional fields of TokenBatch that it reads."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights, given the totals of the whole optimizer step."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """1/N: every token of the step counts the same, so long responses weigh more (DAPO, TEPO)."""

    name: ClassVar[str] = "token_mean"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        return torch.full_like(batch.old_logp, 1 / max(totals.tokens, 1))


@dataclass(frozen=True)
class SequenceMean(Aggregate):
    """1/(S |o_i|): every response counts the same, each as the mean of its tokens (GRPO, GSPO)."""

    name: ClassVar[str] = "sequence_mean"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        length = batch.lengths[batch.sequence].to(batch.old_logp.dtype)
        return 1 / (length * max(totals.sequences, 1))


@dataclass(frozen=True)
class ConstantLength(Aggregate):
    """1/(S L): tokens count the same and the divisor is a constant, never the width of a padded batch (Dr.GRPO).

    length_normalizer: L, in tokens; the largest length a response can have is the usual choice.
    """

    name: ClassVar[str] = "constant_length"
    length_normalizer: float = 3000.0

    def __post_init__(self) -> None:
        if not 0 < self.length_normalizer < float("inf"):
            raise ValueError(f"length_normalizer is {self.length_normalizer}; a positive number of tokens is allowed")

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        return torch.full_like(batch.old_logp, 1 / (max(totals.sequences, 1) * self.length_normalizer))


@dataclass(frozen=True)
class SequenceSum(Aggregate):
    """1/S: every response counts as the sum of its tokens (RLOO; LUSPO: a sequence's loss times its length)."""

    name: ClassVar[str] = "sequence_sum"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        """-> [N] weights."""
        return torch.full_like(batch.old_logp, 1 / max(totals.sequences, 1))


AGGREGATES: dict[str, type[Aggregate]] = {
    kind.name: kind for kind in (TokenMean, SequenceMean, SequenceSum, ConstantLength)
}
