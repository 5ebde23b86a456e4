"""Names for runs that were not made by a comparison: their objective, and whatever else they differ in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tepo.errors import TepoError
from tepo.report.run import Run

NOT_IN_A_NAME = (
    "seed", "output", "checkpoint", "trackers", "verl", "data.name", "objective.name", "reward.workers",
    "rollout.save_tokens", "trainer.tokens_per_microbatch",
)  # fmt: skip
"""Keys that change nothing of what is learned, or are told otherwise."""


def name_runs(runs: Sequence[Run]) -> list[tuple[str, str, Run]]:
    """(task, label, run) for each. A label is the objective's name and whatever else sets the run apart from the first
    one of its task, so that a difference in anything but the seed is seen. Raises TepoError when there are none."""
    if not runs:
        raise TepoError("--from: no run folders are given")
    settings = [_flat(run.recipe.model_dump(mode="json")) for run in runs]
    out = []
    for run, own in zip(runs, settings, strict=True):
        of_task = [other for other in settings if other["data.name"] == own["data.name"]]
        # Options mean something between runs of one objective only.
        alike = [other for other in of_task if other["objective.name"] == own["objective.name"]]
        apart = _apart(own, of_task[0], objective=False) + _apart(own, alike[0], objective=True)
        out.append((run.recipe.data.name, run.recipe.objective.name + "".join(apart), run))
    return out


def _apart(own: dict[str, Any], first: dict[str, Any], *, objective: bool) -> list[str]:
    """`+key=value` for the settings, of the objective or all others, that two runs do not share."""
    return [
        f"+{key.removeprefix('objective.')}={json.dumps(own[key]) if key in own else 'default'}"
        for key in sorted(own.keys() | first.keys())
        if key.startswith("objective.") == objective
        and not key.startswith(NOT_IN_A_NAME)
        and own.get(key) != first.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat
