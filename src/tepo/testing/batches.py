"""Random optimizer steps, and the loss and gradients of an objective on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, Totals
from tepo.objectives.batch import DIFFERENTIABLE, TOKEN_FIELDS

LENGTHS = (1, 7, 3, 5, 2, 6, 4, 7)
"""Tokens of the responses that most checks are made on, unequal on purpose; two groups of four."""
GIVEN = tuple(name for name in TOKEN_FIELDS if name not in ("advantages", "returns", "selected"))
Result = tuple[Tensor, dict[str, Tensor]]
"""A loss and its gradient [N] in each differentiable field."""


@dataclass(frozen=True)
class Step:
    """The padded input of one optimizer step of S responses: mask and tokens [S, T], rewards and groups [S]."""

    mask: Tensor
    rewards: Tensor
    groups: Tensor
    tokens: dict[str, Tensor]

    def batch(self, **changed: Tensor) -> TokenBatch:
        """As a TokenBatch, with other padded tensors in the place of those named."""
        return TokenBatch.from_padded(
            mask=changed.pop("mask", self.mask), rewards=self.rewards, groups=self.groups, **(self.tokens | changed)
        )


def random_step(seed: int, lengths: Sequence[int] = LENGTHS, size: int = 4, dtype: torch.dtype = torch.float64) -> Step:
    """Random responses in groups of `size`, rewards right and wrong and between, the highest and lowest of a group one.

    The last row of a group of three or more is a prefix that the others share, to the objectives that know of one.

    Two of four responses have moved by about 1e-4, inside the narrowest clip; the others by about 0.3, the way that
    their reward points, so that most of their tokens are clipped. Entropies are not negative, as they never are.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows = torch.arange(len(lengths))
    rewards = torch.where((rows + rows // size) % 2 == 0, 1.0, 0.0).double()
    rewards[1::4] = -0.5
    rewards[2::8] = 0.75
    towards = torch.where(rewards > 0.5, 1.0, -1.0).double()[:, None]
    moved = torch.where(rows % 4 < 2, 1e-4, 0.3)[:, None]
    old_logp = -normal().abs() - 0.1
    old_entropy = normal().abs() + 0.05
    logp = old_logp + moved * (0.6 * towards + normal())
    tokens = {
        "logp": logp,
        "old_logp": old_logp,
        "entropy": (old_entropy + 0.1 * normal()).abs(),
        "old_entropy": old_entropy,
        "ref_logp": logp + 0.3 * normal(),
        "exact_kl": normal().abs(),
        "entropy_direction": normal(),
        "top_entropy": (0.7 * old_entropy + 0.05 * normal()).abs(),
        "values": normal(),
        "old_values": normal(),
        "process_reward": normal().sigmoid(),
        "baseline": normal()[:, :1].expand(shape),
        "shared": (rows % size == size - 1)[:, None].expand(shape) & (size > 2),
    }
    return Step(
        torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        rewards.to(dtype),
        rows // size,
        {name: tokens[name] if name == "shared" else tokens[name].to(dtype) for name in GIVEN},
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's generator as it stands, put back afterwards: for objectives that draw tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def prepare(objective: Objective, batch: TokenBatch, seed: int) -> TokenBatch:
    """`Objective.prepare`, with whatever it draws made from the seed."""
    with seeded(seed):
        return objective.prepare(batch)


def random_batch(objective: Objective, seed: int, **settings: Any) -> TokenBatch:
    """A prepared batch; the settings are those of `random_step`."""
    return prepare(objective, random_step(seed, **settings).batch(), seed)


def fresh_leaves(batch: TokenBatch) -> dict[str, Tensor]:
    """Copies of the fields that may carry a gradient, cut from their graph."""
    values = {name: getattr(batch, name) for name in DIFFERENTIABLE}
    return {name: value.detach().clone().requires_grad_() for name, value in values.items() if value is not None}


def gradients_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient in each leaf, zeros where the loss does not reach it."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def run(
    objective: Objective, batch: TokenBatch, parts: list[list[int]] | None = None, totals: Totals | None = None
) -> Result:
    """Loss and gradients of a prepared batch, whole or summed over parts of its responses."""
    leaves = fresh_leaves(batch)
    batch = dataclasses.replace(batch, **leaves)
    totals = objective.totals(batch) if totals is None else totals
    cut = [batch] if parts is None else [batch.select(torch.tensor(part)) for part in parts]
    loss = torch.stack([objective(part, totals).loss for part in cut]).sum()
    return loss.detach(), gradients_of(loss, leaves)


def assert_close(value: Tensor, wanted: Tensor, what: str, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """torch's assert_close, saying first what was compared."""
    torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_same(got: Result, expected: Result, what: str) -> None:
    """Equal to some roundings of float64."""
    assert_close(got[0], expected[0], what)
    for name, wanted in expected[1].items():
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        assert_close(got[1][name], wanted, f"{what}, gradient in {name}", atol=1e-12 * scale + 1e-15)


def assert_finite(metrics: dict[str, float], where: str) -> None:
    """No metric is NaN or infinite."""
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    assert not bad, f"metrics are not finite {where}: {bad}"
