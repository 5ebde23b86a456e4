"""What a person sees of a run: one progress bar, notes, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

FIELDS = (
    ("reward", "reward", "{:.2f}"),
    ("accuracy", "acc", "{:.1%}"),
    ("entropy", "H", "{:.3f}"),
    ("approx_kl", "KL", "{:.1e}"),
    ("clip_fraction", "clip", "{:.1%}"),
    ("kl_mask_fraction", "mask", "{:.1%}"),
    ("mismatch", "mismatch", "{:.0e}"),
    ("tokens_per_second", "tok/s", "{:.0f}"),
)
"""Metric, label and format of what stands beside the bar."""

LOG_LINES = 20
"""Lines of progress that a run prints where there is no terminal."""


def summary_line(record: Mapping[str, float]) -> str:
    """The numbers beside the bar, those that the record has."""
    return "  ".join(f"{label} {form.format(record[key])}" for key, label, form in FIELDS if key in record)


class Display:
    """A context manager around the steps of a run. Without a terminal, a line now and then stands for the bar."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        self.console = console
        self.steps = steps
        self.done = done
        self.started = time.monotonic()
        self.first = done
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, completed=done, numbers="")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note(self, message: str, style: str = "") -> None:
        """A message above the bar; its text is not markup."""
        self.console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)

    def step(self, record: Mapping[str, float]) -> None:
        """A step is done."""
        self.done = int(record["step"])
        numbers = summary_line(record)
        self.progress.update(self.task, completed=self.done, numbers=numbers)
        every = max(self.steps // LOG_LINES, 1)
        if not self.console.is_terminal and (self.done % every == 0 or self.done == self.steps):
            rate = (time.monotonic() - self.started) / max(self.done - self.first, 1)
            left = rate * (self.steps - self.done)
            self.note(f"step {self.done}/{self.steps}  {numbers}  left {left:.0f} s")


def accuracy_text(summary: Mapping[str, Any] | None) -> str:
    """`93.5 % [89.2, 96.2]`, or a dash."""
    if summary is None:
        return "-"
    low, high = summary["interval"]
    return f"{100 * summary['accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def final_table(evaluations: list[dict[str, Any]]) -> Table:
    """The first evaluation beside the last."""
    before, after = evaluations[0], evaluations[-1]
    table = Table("", f"step {before['step']}", f"step {after['step']}", title="held-out accuracy, 95 % interval")
    for key in ("sampled", "greedy"):
        if key in before or key in after:
            temperature = (after if key in after else before)[key]["temperature"]
            label = f"sampled, T = {temperature:g}" if temperature else "greedy"
            table.add_row(label, accuracy_text(before.get(key)), accuracy_text(after.get(key)))
    for key, label, form in (("truncated", "truncated", "{:.1%}"), ("mean_tokens", "tokens a response", "{:.1f}")):
        table.add_row(label, form.format(before["sampled"][key]), form.format(after["sampled"][key]))
    return table
