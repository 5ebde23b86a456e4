"""What a comparison takes from the folder of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tepo.errors import TepoError
from tepo.report.run import Run

PARTS = ("seconds/weights", "seconds/rollout", "seconds/old_scores", "seconds/update")
"""What the time of a step is made of; the other times are parts of these."""

COLLAPSE = 0.1
"""A run that ends this much below its own best accuracy has lost what it had. Ten points are far more than what the
luckiest of some evaluations is above the truth; the intervals of best and last must be apart besides."""

BINS = 40
"""Points of a training curve, each the mean of its part of the run: single rollouts are too noisy to see anything."""

Curve = tuple[tuple[int, ...], tuple[float, ...]]
"""Steps and values."""


@dataclass(frozen=True)
class Outcome:
    """A run, reduced. curve: held-out accuracies; reward, entropy: of training; seconds: of each step."""

    task: str
    objective: str
    seed: int
    steps: int
    curve: Curve
    reward: Curve
    entropy: Curve
    seconds: tuple[float, ...]
    collapsed: bool
    greedy: float | None
    machine: str

    @property
    def start(self) -> float:
        return self.curve[1][0]

    @property
    def final(self) -> float:
        return self.curve[1][-1]

    def reached(self, threshold: float) -> int | None:
        """The first evaluated step with at least this accuracy."""
        return next((step for step, accuracy in zip(*self.curve, strict=True) if accuracy >= threshold), None)

    def seconds_at(self, step: int) -> float:
        """Seconds of training up to a step, evaluations not counted."""
        return sum(self.seconds[:step])


def read_outcome(run: Run, task: str, objective: str) -> Outcome:
    """Raises TepoError for a run without an evaluation at its last step."""
    evaluations = run.evaluations
    if not evaluations or evaluations[-1]["step"] != run.steps or not run.metrics:
        last = f"the last one is at step {evaluations[-1]['step']}" if evaluations else "there is none"
        raise TepoError(f"{run.folder}: has no evaluation at its last step, {run.steps}; {last}. Finish the run first")
    sampled = [entry["sampled"] for entry in evaluations]
    best = max(sampled, key=lambda entry: entry["accuracy"])
    last = sampled[-1]
    greedy = evaluations[-1].get("greedy")
    threads = run.environment.get("torch_threads", "?")
    gpus = run.environment.get("gpus") or [f"{run.environment.get('cpu_cores', '?')} CPU cores"]
    return Outcome(
        task, objective, run.recipe.seed, run.steps,
        (tuple(entry["step"] for entry in evaluations), tuple(entry["accuracy"] for entry in sampled)),
        _binned(run, "reward"), _binned(run, "entropy"),
        tuple(sum(row.get(part, 0.0) for part in PARTS) for row in run.metrics),
        best["accuracy"] - last["accuracy"] > COLLAPSE and best["interval"][0] > last["interval"][1],
        None if greedy is None else greedy["accuracy"],
        f"{', '.join(gpus)}; threads of a run: {threads}",
    )  # fmt: skip


def _binned(run: Run, key: str) -> Curve:
    """Means of a training metric over equal parts of the run, at the last step of each, where it was measured."""
    width = max(1, math.ceil(run.steps / BINS))
    parts: dict[int, list[float]] = {}
    for step, value in zip(*run.series(key), strict=True):
        parts.setdefault(-(-step // width) * width, []).append(value)
    return tuple(parts), tuple(float(np.mean(values)) for values in parts.values())
