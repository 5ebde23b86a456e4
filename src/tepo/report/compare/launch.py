"""Runs one after another or several at a time, each a process of its own; what is finished stays as it is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console

from tepo.errors import TepoError
from tepo.report.compare.plan import Cell
from tepo.report.run import Run
from tepo.train.display import accuracy_text
from tepo.train.resume import differences
from tepo.train.run_folder import RunFolder, to_yaml

MAY_DIFFER = ("output", "checkpoint.", "trackers", "rollout.save_tokens")
"""Keys in which a finished run may differ from what is asked for, and still be taken for it."""
POLL = 0.2
"""Seconds between looks at the running processes."""


def run_cells(cells: Sequence[Cell], jobs: int, folder: Path, console: Console) -> list[Cell]:
    """Run what is not finished yet, `jobs` at a time. -> those that failed; what they printed is beside their folders.

    A run that was interrupted goes on from its newest checkpoint. Raises TepoError when a folder
    holds another run than the one that belongs there, or another comparison works in `folder`.
    """
    with _alone(folder) as lock:
        waiting = deque(cell for cell in cells if not is_finished(cell))
        kept = len(cells) - len(waiting)
        if kept:
            console.print(f"{kept} of {len(cells)} runs are finished already", highlight=False)
        return _work(waiting, jobs, len(cells), lock, console)


def is_finished(cell: Cell) -> bool:
    """Whether the run is there to its last step. Raises TepoError for another run in its folder."""
    folder = RunFolder(cell.folder)
    if not folder.holds_a_run:
        return False
    changes = differences(folder, cell.recipe, MAY_DIFFER)
    if changes:
        raise TepoError(
            "\n  ".join([f"the run in {cell.folder} is of another recipe; it differs in:", *changes.values()])
        )
    run, steps = Run.open(cell.folder), cell.recipe.trainer.steps
    return bool(run.evaluations) and run.evaluations[-1]["step"] == steps and steps in run.checkpoints()


def _work(waiting: deque[Cell], jobs: int, total: int, lock: IO[str], console: Console) -> list[Cell]:
    running: dict[subprocess.Popen[bytes], tuple[Cell, float]] = {}
    failed: list[Cell] = []
    began, count, done = time.monotonic(), len(waiting), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                running[_start(cell, jobs, lock)] = (cell, time.monotonic())
            time.sleep(POLL)
            for process in [process for process in running if process.poll() is not None]:
                cell, started = running.pop(process)
                done += 1
                left = (time.monotonic() - began) / done * (count - done)
                if process.returncode:
                    failed.append(cell)
                said = _said(cell) if process.returncode else f"{_accuracy(cell)}, {time.monotonic() - started:.0f} s"
                console.print(
                    f"{total - count + done}/{total}  {cell.name}: {said}; about {left / 60:.0f} min left",
                    style="red" if process.returncode else "", markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def _start(cell: Cell, jobs: int, lock: IO[str]) -> subprocess.Popen[bytes]:
    folder = cell.folder
    command = [sys.executable, "-m", "tepo", "train", "--config", str(folder.with_name(folder.name + ".yaml"))]
    if RunFolder(folder).holds_a_run:
        command.append("--resume")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_name(folder.name + ".yaml").write_text(to_yaml(cell.recipe), encoding="utf-8")
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    with _log(cell).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"OMP_NUM_THREADS": threads, **os.environ},
            pass_fds=[lock.fileno()],
        )  # fmt: skip


def _log(cell: Cell) -> Path:
    return cell.folder.with_name(cell.folder.name + ".log")


def _accuracy(cell: Cell) -> str:
    return accuracy_text(Run.open(cell.folder).evaluations[-1]["sampled"])


def _said(cell: Cell) -> str:
    """The last line that a failed run printed, and where the others are."""
    lines = _log(cell).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed: {lines[-1] if lines else 'without a word'} ({_log(cell)})"


@contextmanager
def _alone(folder: Path) -> Iterator[IO[str]]:
    """A lock that the runs hold too: after a killed comparison its last runs may still be writing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TepoError(f"--output {folder}: another comparison, or a run of one, is still working there") from None
        yield lock
