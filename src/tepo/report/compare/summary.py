"""From the outcomes of runs to what is said of each objective on each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tepo.errors import TepoError
from tepo.report.compare.outcome import Outcome
from tepo.report.compare.statistics import (
    SIGNIFICANT,
    Difference,
    Mean,
    Reached,
    holm,
    mean_over_seeds,
    paired_difference,
    restricted_mean,
)

WAY = 0.9
"""The threshold, where none is asked for: this share of the way from the accuracy at the start to that of the baseline
at its end. At its end itself half of the baseline's own seeds would not arrive."""


@dataclass(frozen=True)
class Row:
    """One objective on one task. worst: lowest final accuracy of a seed; missing: runs that did not finish."""

    objective: str
    accuracy: Mean
    greedy: Mean | None
    difference: Difference | None
    steps: Reached
    seconds: Reached
    worst: tuple[int, float]
    collapsed: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """In words; a difference counts when its corrected p is below 0.05."""
        if self.difference is None:
            return "baseline"
        if self.difference.adjusted is None:
            return "one seed: cannot be told"
        if self.difference.adjusted >= SIGNIFICANT:
            return "no difference shown"
        return "better" if self.difference.mean.mean > 0 else "worse"


@dataclass(frozen=True)
class TaskSummary:
    """One task: rows in the order of the objectives; threshold: the accuracy that `steps` and `seconds` lead to."""

    task: str
    steps: int
    threshold: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown. comparisons: how many differences p was corrected for."""

    baseline: str
    tasks: tuple[TaskSummary, ...]
    comparisons: int
    machines: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def summarize(
    outcomes: Sequence[Outcome], baseline: str, threshold: float | None, failed: Sequence[tuple[str, str, int]] = ()
) -> Comparison:
    """outcomes: in the order in which objectives are shown. failed: (task, objective, seed) of runs without an outcome.

    Raises TepoError when the baseline is not among them on some task, or an objective has two runs with one seed.
    """
    tasks = list(dict.fromkeys(outcome.task for outcome in outcomes))
    found = tuple(_task(task, [o for o in outcomes if o.task == task], baseline, threshold, failed) for task in tasks)
    found = _corrected(found)
    tested = sum(row.difference is not None and row.difference.p is not None for task in found for row in task.rows)
    return Comparison(baseline, found, tested, tuple(dict.fromkeys(outcome.machine for outcome in outcomes)))


def _task(
    task: str,
    outcomes: Sequence[Outcome],
    baseline: str,
    threshold: float | None,
    failed: Sequence[tuple[str, str, int]],
) -> TaskSummary:
    by_name: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        seeds = by_name.setdefault(outcome.objective, {})
        if outcome.seed in seeds:
            raise TepoError(f"{task}, {outcome.objective}: two runs with seed {outcome.seed}; leave one out")
        seeds[outcome.seed] = outcome
    if baseline not in by_name:
        raise TepoError(f"--baseline {baseline}: no finished run of it on {task}; there are {', '.join(by_name)}")
    if threshold is None:
        start = mean_over_seeds([outcome.start for outcome in by_name[baseline].values()]).mean
        end = mean_over_seeds([outcome.final for outcome in by_name[baseline].values()]).mean
        threshold = start + WAY * (end - start)
    rows = []
    for objective, runs in by_name.items():
        missing = tuple(seed for of, name, seed in failed if (of, name) == (task, objective))
        against = None if objective == baseline else by_name[baseline]
        rows.append(_row(objective, runs, against, threshold, missing))
    return TaskSummary(task, max(outcome.steps for outcome in outcomes), threshold, tuple(rows))


def _row(
    objective: str,
    runs: dict[int, Outcome],
    baseline: dict[int, Outcome] | None,
    threshold: float,
    missing: tuple[int, ...],
) -> Row:
    difference = None
    if baseline is not None:
        seeds = [seed for seed in runs if seed in baseline]
        if not seeds:
            raise TepoError(f"{objective}: has no seed in common with the baseline: {sorted(runs)}, {sorted(baseline)}")
        difference = paired_difference([baseline[s].final for s in seeds], [runs[s].final for s in seeds])
    outcomes = list(runs.values())
    greedy = [outcome.greedy for outcome in outcomes if outcome.greedy is not None]
    steps = [outcome.reached(threshold) for outcome in outcomes]
    times = [None if s is None else outcome.seconds_at(s) for s, outcome in zip(steps, outcomes, strict=True)]
    worst = min(outcomes, key=lambda outcome: outcome.final)
    return Row(
        objective,
        mean_over_seeds([outcome.final for outcome in outcomes]),
        mean_over_seeds(greedy) if len(greedy) == len(outcomes) else None,
        difference,
        restricted_mean(steps, [outcome.steps for outcome in outcomes]),
        restricted_mean(times, [outcome.seconds_at(outcome.steps) for outcome in outcomes]),
        (worst.seed, worst.final),
        tuple(outcome.seed for outcome in outcomes if outcome.collapsed),
        missing,
    )


def _corrected(tasks: tuple[TaskSummary, ...]) -> tuple[TaskSummary, ...]:
    """Holm's correction over all differences of all tasks."""
    p_values = [
        row.difference.p for task in tasks for row in task.rows if row.difference and row.difference.p is not None
    ]
    adjusted = iter(holm(p_values))

    def corrected(row: Row) -> Row:
        if row.difference is None or row.difference.p is None:
            return row
        return dataclasses.replace(row, difference=dataclasses.replace(row.difference, adjusted=next(adjusted)))

    return tuple(dataclasses.replace(task, rows=tuple(map(corrected, task.rows))) for task in tasks)
