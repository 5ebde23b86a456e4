"""A short run on the embedded model, small enough for a test."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tepo.config import load_recipe
from tepo.train import train

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

Run = Callable[..., tuple[Path, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run("key=value", ..., output=name, options of train) -> run folder and what was printed."""

    def start(*overrides: str, output: str = "run", **options: Any) -> tuple[Path, str]:
        text = io.StringIO()
        recipe = load_recipe("arithmetic", [*SHORT, *overrides, f"output={tmp_path / output}"])
        folder = train(recipe, console=Console(file=text, width=120), **options)
        return folder, text.getvalue()

    return start
