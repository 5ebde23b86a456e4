"""A run that is killed again and again, and resumed each time, is the run that never was."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import SHORT, assert_same_run, metrics_of

STEPS = 40
RUN = [
    *SHORT,
    f"trainer.steps={STEPS}",
    "objective=aent",
    "objective.adaptive_entropy.warmup=5",
    "trainer.prompts_per_rollout=4",
    "trainer.updates_per_rollout=4",
    "trainer.dynamic_sampling=true",
    "trainer.max_sampling_rounds=3",
    "evaluation.every=15",
    "data.test_problems=8",
    "data.max_problems=500",
    "checkpoint.keep=3",
]
KILLS = 20
MARK = "TEPO_TEST_OF_KILLS"


def live(overrides: list[str], resume: bool, mark: str) -> None:
    """What a process does that is to be killed."""
    os.environ[MARK] = mark
    from rich.console import Console

    from tepo.config import load_recipe
    from tepo.train import train

    with open(os.devnull, "w") as nowhere:
        train(load_recipe("arithmetic", overrides), resume=resume, console=Console(file=nowhere))


def wait_for(condition: Callable[[], bool], process: multiprocessing.process.BaseProcess) -> None:
    """Until it holds, or the process has ended."""
    while process.is_alive() and not condition():
        time.sleep(0.002)


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def begun(folder: Path) -> int:
    """Changes when a run begins or is taken up again."""
    path = folder / "environment.json"
    return path.stat().st_mtime_ns if path.exists() else 0


def test_a_run_killed_twenty_times_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    """SIGKILL, at random moments of a life and, in every third, in the middle of writing a checkpoint."""
    # Forked from a process that has imported everything: the start of Python and torch would take most of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tepo.train", "tepo.cli", "transformers.models.llama.modeling_llama"])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = context.Process(target=live, args=([*RUN, f"output={whole}", "checkpoint.every=3"], False, ""))
    first.start()
    draw, kills, halves = random.Random(8), 0, 0
    for life in range(KILLS + 1):
        overrides = [*RUN, f"output={killed}", f"checkpoint.every={1 + life % 3}"]
        before = begun(killed)
        process = context.Process(target=live, args=(overrides, (killed / "config.yaml").exists(), str(tmp_path)))
        process.start()
        if life == KILLS:
            process.join()
            assert process.exitcode == 0
            break
        wait_for(lambda before=before: begun(killed) != before, process)  # type: ignore[misc]
        wanted = lines(killed) + draw.randrange(5)
        wait_for(lambda wanted=wanted: lines(killed) >= wanted, process)  # type: ignore[misc]
        if life % 3 == 2:
            wait_for(lambda: any((killed / "checkpoints").glob(".step_*.tmp")), process)
        else:
            time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        kills += process.exitcode == -9
        halves += any((killed / "checkpoints").glob(".step_*.tmp"))
    first.join()
    assert first.exitcode == 0
    assert kills == KILLS
    assert halves >= 1
    assert_same_run(whole, killed, STEPS)
    metrics = metrics_of(whole)
    assert len({line["entropy_coefficient"] for line in metrics if "entropy_coefficient" in line}) > 10
    assert any(line["dynamic_sampling/kept"] < 1 for line in metrics)
    assert not any((killed / "checkpoints").glob(".step_*"))
    assert no_judges_are_left(str(tmp_path))


def no_judges_are_left(mark: str) -> bool:
    """The judging processes of those that were killed end by themselves."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(belongs(process, mark) for process in psutil.process_iter()):
            return True
        time.sleep(0.1)
    return False


def belongs(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and "tepo.rewards.worker" in process.cmdline()
    except psutil.Error:
        return False


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
