"""A short run, and whether two run folders hold the same run, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tepo.train.run_folder import CLOCK

SHORT = [
    "trainer.steps=8",
    "trainer.prompts_per_rollout=8",
    "trainer.responses_per_prompt=4",
    "trainer.updates_per_rollout=4",
    "trainer.learning_rate=1e-4",
    "trainer.warmup_steps=0",
    "data.test_problems=16",
    "evaluation.every=null",
    "checkpoint.every=null",
    "reward.workers=1",
]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(CLOCK)} for line in lines]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_run(a: Path, b: Path, step: int) -> None:
    """Metrics, rollouts, evaluations, and all of the checkpoint of a step: weights, optimizer, every other state."""
    assert metrics_of(a) == metrics_of(b)
    for name in ("rollouts", "evaluations", f"checkpoints/step_{step}"):
        first, second = files_of(a / name), files_of(b / name)
        assert first.keys() == second.keys(), name
        assert [file for file in first if first[file] != second[file]] == [], name
    assert (a / "eval.json").exists() == (b / "eval.json").exists()
    if (a / "eval.json").exists():
        assert (a / "eval.json").read_bytes() == (b / "eval.json").read_bytes()
