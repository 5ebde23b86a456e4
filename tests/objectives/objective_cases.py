"""Ragged batches and the list of objectives and overrides that the property tests run over."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, Totals, get_objective, list_objectives

LENGTHS = (1, 7, 3, 5, 2, 6, 4, 7)
"""Tokens of each response in `ragged_batch`, unequal on purpose."""

SIGNS = torch.tensor([1, 1, -1, 0, -1, -1, 1, 1])
"""Of the advantages in `ragged_batch`."""

PER_TOKEN = (
    "logp", "old_logp", "entropy", "old_entropy", "ref_logp", "exact_kl", "entropy_direction", "top_entropy", "values",
    "old_values", "returns", "process_reward", "baseline", "shared",
)  # fmt: skip
DIFFERENTIABLE = ("logp", "entropy", "exact_kl", "top_entropy", "values")

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
    "narrow_clip": {"clip_low": 3e-4, "clip_high": 4e-4},
    "sequence_sum_leave_one_out": {"aggregate": "sequence_sum", "advantage": "leave_one_out"},
    "sequence_ratio_informative": {"ratio": "sequence", "advantage": "informative"},
    "power_mean_batch": {"ratio": "hoelder", "p": 2.0, "advantage": "batch"},
    "negative_power": {"p": -1.5},
    "tiny_power": {"p": 1e-9},
    "temperatures": {"tau": 3.0, "tau_negative": 0.5},
    "half_selected": {"share": 0.5},
    "any_covariance": {"share": 0.3, "cov_low": -0.5, "cov_high": 2.0},
    "strong_shaping": {"alpha": 2.0, "kappa": 1.2},
    "narrow_prefix": {"prefix_clip_low": 1e-4, "prefix_clip_high": 2e-4, "prefix_share": 0.8},
    "value_loss": {"value_loss": {"coefficient": 0.5, "clip": None}, "lam": 0.5, "gamma": 0.9, "reward_kl": 0.1},
    "strong_beta": {"beta": 2.0},
    "no_cuts": {"cuts": 0, "gap": 1},
    "adaptive_terms": {"adaptive_entropy": 0.3, "policy_kl": 0.5, "kl_mask": None},
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
PAIRS = [name for name in list_objectives() if get_objective(name).surrogate.pairs]
"""Objectives that compare two responses of a group: test_pairs.py holds them to the same properties."""
TOKENWISE = [name for name in list_objectives() if name not in PAIRS]


@dataclasses.dataclass(frozen=True)
class Padded:
    """The arguments of `TokenBatch.from_padded`; those of DIFFERENTIABLE are leaves that require a gradient.

    selected: [S, T] bool, the tokens that an objective chose over the whole step (`selected_by`), or None.
    groups: [S], or None: each response has its own.
    """

    mask: Tensor
    advantages: Tensor
    tokens: Mapping[str, Tensor]
    selected: Tensor | None = None
    groups: Tensor | None = None

    def batch(self, rows: list[int] | None = None) -> TokenBatch:
        """The TokenBatch of some rows, or of all."""
        index = torch.arange(len(self.mask)) if rows is None else torch.tensor(rows)
        tokens = {name: value[index] for name, value in self.tokens.items()}
        groups = None if self.groups is None else self.groups[index]
        batch = TokenBatch.from_padded(
            mask=self.mask[index], advantages=self.advantages[index], groups=groups, **tokens
        )
        if self.selected is None:
            return batch
        return dataclasses.replace(batch, selected=self.selected[index][self.mask[index]])

    def selected_by(self, objective: Objective) -> Padded:
        """The same values with the tokens that the objective chooses over all of them, for any cut afterwards."""
        if objective.selection is None:
            return self
        selected = torch.zeros_like(self.mask, dtype=torch.bool)
        selected[self.mask.bool()] = known(prepared(objective, self.batch()).selected)
        return dataclasses.replace(self, selected=selected)

    def in_loss(self, objective: Objective) -> Tensor:
        """[S, T] bool: the tokens that are in the objective's loss and its denominators (after `selected_by`)."""
        if objective.selection is None or objective.selection.use != "keep":
            return self.mask.bool()
        return known(self.selected)

    def in_surrogate(self, objective: Objective) -> Tensor:
        """[S, T] bool: those among them that have a surrogate (after `selected_by`)."""
        if objective.selection is None or objective.selection.use != "drop":
            return self.in_loss(objective)
        return self.mask.bool() & ~known(self.selected)

    def gradients(self) -> dict[str, Tensor]:
        """What backward left in the leaves; zeros where it left nothing."""
        leaves = {name: self.tokens[name] for name in DIFFERENTIABLE}
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}

    def fresh(self, **changed: Tensor) -> Padded:
        """The same values (or those given) in new leaves without gradients."""
        tokens = {name: as_leaf(name, changed.get(name, value)) for name, value in self.tokens.items()}
        mask, advantages = changed.get("mask", self.mask), changed.get("advantages", self.advantages)
        return Padded(mask, advantages, tokens, changed.get("selected", self.selected), self.groups)


def known(value: Tensor | None) -> Tensor:
    """The value, which is there."""
    assert value is not None
    return value


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """torch's generator in a known state, and put back afterwards: for objectives that draw tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def prepared(objective: Objective, batch: TokenBatch, seed: int = 0) -> TokenBatch:
    """The batch of a whole step with its advantages and its selected tokens, the same at each call."""
    if objective.selection is None:
        return objective.prepare(batch)
    with seeded(seed):
        return objective.prepare(batch)


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

    Rows 2 and 7 are prefixes that others share, to the objectives that know of such.

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
        "entropy": (old_entropy + 0.1 * normal()).abs(),
        "old_entropy": old_entropy,
        "ref_logp": logp + 0.3 * normal(),
        "exact_kl": normal().abs(),
        "entropy_direction": normal(),
        "top_entropy": (0.7 * old_entropy + 0.05 * normal()).abs(),
    }
    old_values = normal()
    prefixes = torch.isin(torch.arange(len(lengths)), torch.tensor([2, 7]))[:, None]
    tokens |= {
        "values": old_values + 0.3 * normal(),
        "old_values": old_values,
        "returns": normal(),
        "process_reward": normal().sigmoid(),
        "baseline": normal()[:, :1].expand_as(mask),
        "shared": prefixes.expand_as(mask),
    }
    leaves = {
        name: as_leaf(name, value if value.dtype == torch.bool else value.to(dtype)) for name, value in tokens.items()
    }
    return Padded(mask, advantages.to(dtype), leaves)


def loss_and_gradients(
    objective: Objective, padded: Padded, totals: Totals | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the whole padded batch, and the gradient in each leaf.

    A selection is made over all of it, where it has none (`Padded.selected_by`).
    """
    padded = padded.fresh()
    out = objective(prepared(objective, padded.batch()), totals)
    out.loss.backward()
    return out.loss.detach(), padded.gradients()


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and gradients equal to 1e-12."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)
