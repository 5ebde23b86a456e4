"""What the rules read: the recipe, the rows of metrics by rollout, the evaluations, the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tepo.config import Recipe
from tepo.objectives import Objective

RECENT = 5
"""The newest rollouts, which say how a run is now: single ones are noisy."""
ENOUGH = 2
"""Rollouts from which on their shares are believed."""


@dataclass
class Evidence:
    """problems: training problems in use, None if not known. dropped: how many were left out, by reason.
    evaluations: as in eval.json. rollouts: the rows of metrics, rollout after rollout."""

    recipe: Recipe
    problems: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[list[Mapping[str, float]]] = field(default_factory=list)

    @cached_property
    def objective(self) -> Objective:
        return self.recipe.objective.build()

    @classmethod
    def of(cls, recipe: Recipe, rows: Iterable[Mapping[str, float]], **known: Any) -> Evidence:
        evidence = cls(recipe, **known)
        for row in rows:
            evidence.add(row)
        return evidence

    def add(self, row: Mapping[str, float]) -> None:
        """The metrics of one more step."""
        if not self.rollouts or self.rollouts[-1][0]["rollout"] != row["rollout"]:
            self.rollouts.append([])
        self.rollouts[-1].append(row)

    @property
    def step(self) -> int:
        return int(self.rollouts[-1][-1]["step"]) if self.rollouts else 0

    @property
    def enough(self) -> bool:
        return len(self.rollouts) >= ENOUGH

    def rows(self, rollouts: list[list[Mapping[str, float]]] | None = None) -> Iterator[Mapping[str, float]]:
        for rollout in self.rollouts if rollouts is None else rollouts:
            yield from rollout

    def early(self, key: str) -> float | None:
        """A metric as it was first measured: before anything was learned, of a whole rollout or its first update."""
        return next((row[key] for row in self.rows() if math.isfinite(row.get(key, math.nan))), None)

    def recent(self, key: str) -> float | None:
        """Mean of a metric over the newest rollouts."""
        return _mean(self.rows(self.rollouts[-RECENT:]), key)

    def moved(self, key: str) -> float | None:
        """The same over steps that find the policy changed since it sampled: none is the first of its rollout."""
        return _mean((row for row in self.rows(self.rollouts[-RECENT:]) if self._is_later(row)), key)

    def since(self) -> int:
        """The step with which the newest rollouts begin."""
        return int(self.rollouts[-RECENT:][0][0]["step"]) if self.rollouts else 0

    def _is_later(self, row: Mapping[str, float]) -> bool:
        return (int(row["step"]) - 1) % self.recipe.trainer.updates_per_rollout != 0


def _mean(rows: Iterable[Mapping[str, float]], key: str) -> float | None:
    """Of the finite values; None without any."""
    values = [row[key] for row in rows if key in row and math.isfinite(row[key])]
    return sum(values) / len(values) if values else None
