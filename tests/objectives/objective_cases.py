"""Ragged batches and the list of objectives and overrides that the property tests run over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, Totals, get_objective, list_objectives

LENGTHS = (1, 7, 3, 5, 2, 6, 4, 7)
"""Tokens of each response in `ragged_batch`, unequal on purpose."""

SIGNS = torch.tensor([1, 1, -1, 0, -1, -1, 1, 1])
"""Of the advantages in `ragged_batch`."""

PER_TOKEN = ("logp", "old_logp", "entropy", "old_entropy", "ref_logp", "exact_kl", "entropy_direction")
DIFFERENTIABLE = ("logp", "entropy", "exact_kl")

OVERRIDES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "wide_dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.1},
    "token_ratio_sequence_mean": {"ratio": "token", "aggregate": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "sequence_token_token_mean": {"ratio": "sequence_token", "aggregate": "token_mean"},
    "constant_length": {"aggregate": "constant_length", "length_normalizer": 7},
    "kl_mask_masked": {"kl_mask": {"beta": 0.3, "normalizer": "masked", "estimator": "k3"}},
    "kl_mask_exact_first_order": {
        "kl_mask": {"beta": 0.5, "entropy_test": "first_order", "target": "reference", "estimator": "exact"},
        "ref_kl": None,
    },
    "ref_kl_and_bonus": {"kl_mask": None, "ref_kl": {"beta": 0.1, "estimator": "k2"}, "entropy_bonus": 0.02},
    "no_terms": {"kl_mask": None, "ref_kl": None, "entropy_bonus": None},
}
"""Combinations of overrides; an objective is tested with each that it takes."""


def variants() -> dict[str, Objective]:
    """Every objective of the table with every combination of overrides that it takes, by a name for the test."""
    found: dict[str, Objective] = {}
    for name in list_objectives():
        for label, overrides in OVERRIDES.items():
            try:
                found[f"{name}-{label}"] = get_objective(name, **overrides)
            except ValueError:
                continue
    return found


VARIANTS = variants()


@dataclasses.dataclass(frozen=True)
class Padded:
    """The arguments of `TokenBatch.from_padded`; those of DIFFERENTIABLE are leaves that require a gradient."""

    mask: Tensor
    advantages: Tensor
    tokens: Mapping[str, Tensor]

    def batch(self, rows: list[int] | None = None) -> TokenBatch:
        """The TokenBatch of some rows, or of all."""
        index = torch.arange(len(self.mask)) if rows is None else torch.tensor(rows)
        tokens = {name: value[index] for name, value in self.tokens.items()}
        return TokenBatch.from_padded(mask=self.mask[index], advantages=self.advantages[index], **tokens)

    def gradients(self) -> dict[str, Tensor]:
        """What backward left in the leaves; zeros where it left nothing."""
        leaves = {name: self.tokens[name] for name in DIFFERENTIABLE}
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}

    def fresh(self, **changed: Tensor) -> Padded:
        """The same values (or those given) in new leaves without gradients."""
        tokens = {name: as_leaf(name, changed.get(name, value)) for name, value in self.tokens.items()}
        return Padded(changed.get("mask", self.mask), changed.get("advantages", self.advantages), tokens)


def as_leaf(name: str, value: Tensor) -> Tensor:
    """A copy cut from its graph, that requires a gradient where the objective may send one."""
    return value.detach().clone().requires_grad_(name in DIFFERENTIABLE)


def ragged_batch(
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    width: int | None = None,
    dtype: torch.dtype = torch.float64,
    vary_advantages: bool = False,
) -> Padded:
    """A padded batch with advantages of both signs and one that is 0 ([S], or [S, T] when they vary).

    Every second response has moved by about 1e-4, inside the narrowest clip; the others by about 0.3, the way that
    their advantage points, so that most of them are clipped.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(len(lengths), width or max(lengths), generator=generator, dtype=torch.float64)

    mask = torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]
    step = torch.where(torch.arange(len(lengths)) % 2 == 0, 1e-4, 0.3)[:, None]
    old_logp = -normal().abs() - 0.1
    old_entropy = normal().abs()
    advantages = normal() if vary_advantages else normal()[:, 0].abs() * SIGNS[: len(lengths)]
    towards = SIGNS[: len(lengths), None]
    logp = old_logp + step * (0.6 * towards + normal())
    tokens = {
        "logp": logp,
        "old_logp": old_logp,
        "entropy": old_entropy + 0.1 * normal(),
        "old_entropy": old_entropy,
        "ref_logp": logp + 0.3 * normal(),
        "exact_kl": normal().abs(),
        "entropy_direction": normal(),
    }
    leaves = {name: as_leaf(name, value.to(dtype)) for name, value in tokens.items()}
    return Padded(mask, advantages.to(dtype), leaves)


def loss_and_gradients(
    objective: Objective, padded: Padded, totals: Totals | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the whole padded batch, and the gradient in each leaf."""
    padded = padded.fresh()
    out = objective(padded.batch(), totals)
    out.loss.backward()
    return out.loss.detach(), padded.gradients()


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and gradients equal to 1e-12."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)
