"""A short run on the embedded model, small enough for a test."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runs import SHORT

from tepo.config import load_recipe
from tepo.train import train

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
