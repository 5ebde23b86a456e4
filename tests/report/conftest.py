"""Pages in a real browser, and a run to look at."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tepo.config import load_recipe
from tepo.train import train

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

TINY = [
    "trainer.steps=8",
    "trainer.prompts_per_rollout=8",
    "trainer.responses_per_prompt=4",
    "trainer.updates_per_rollout=4",
    "trainer.learning_rate=1e-3",
    "trainer.warmup_steps=0",
    "trainer.schedule=constant",
    "data.test_problems=16",
    "evaluation.every=4",
    "checkpoint.every=4",
    "reward.workers=1",
]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model, two rollouts long. Not to be written into: `run_copy`."""
    folder = tmp_path_factory.mktemp("report") / "run"
    return train(load_recipe("arithmetic", [*TINY, f"output={folder}"]), console=Console(file=io.StringIO()))


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    found = os.environ.get("TEPO_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed (or set TEPO_CHROMIUM)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """open_page(path, **context options) -> a page that has loaded; anything it complains of fails the test."""
    contexts, complaints = [], []

    def opened(path: Path, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints
