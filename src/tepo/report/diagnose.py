"""`tepo diagnose`: what is wrong with a run, with the responses that show it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tepo.diagnosis import RULES, Evidence, Finding, diagnose
from tepo.errors import TepoError
from tepo.report.run import Run

EXAMPLES, SHOWN = 3, 160
"""Responses shown for a finding, and characters of each."""


def evidence_of(run: Run) -> Evidence:
    """What the rules read, from the folder of a run."""
    path = run.folder / "data.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    problems, dropped = data.get("train"), data.get("dropped", {})
    return Evidence.of(run.recipe, run.metrics, problems=problems, dropped=dropped, evaluations=run.evaluations)


def examples(run: Run, finding: Finding) -> list[dict[str, Any]]:
    """Responses that show a finding, from the newest rollout that is stored."""
    stored = run.rollouts()
    if finding.rule.which is None or not stored:
        return []
    found: Iterator[dict[str, Any]] = (row for row in run.responses(stored[-1]) if finding.rule.which(row))
    return [row for row, _ in zip(found, range(EXAMPLES), strict=False)]


def diagnose_run(folder: Path, console: Console | None = None) -> list[Finding]:
    """Print what is wrong with a run, the likeliest cause first, and return it.

    Raises TepoError for a folder without a run, or with one that has made no step.
    """
    console = console or Console()
    run = Run.open(folder)
    if not run.metrics:
        raise TepoError(f"{folder}: the run has made no step yet, there is nothing to diagnose")
    evidence = evidence_of(run)
    found = diagnose(evidence)
    rollouts = len(evidence.rollouts)
    console.print(_text(f"{folder}: {run.steps} of {run.recipe.trainer.steps} steps, {rollouts} rollouts"))
    if not found:
        rules = f"{len(RULES)} rules looked at it (docs/diagnose.md)"
        console.print(_text(f"nothing looks wrong; {rules}"))
        if not evidence.enough:
            console.print(_text("there is one rollout only: most rules want two"))
    for number, finding in enumerate(found, 1):
        console.print()
        console.print(_text(f"{number}. {finding.rule.says}", "bold red" if number == 1 else "bold"))
        console.print(_text(f"   seen: {finding.evidence}"))
        for advice in finding.rule.advice:
            console.print(_text(f"   try:  {advice}"))
        for row in examples(run, finding):
            said = f"{row['id']}: {row['status']}, gold {row['answer']}: {row['response']}"
            console.print(_text(f"   {shown(said)}", "dim"))
    return found


def shown(text: str) -> str:
    """A response on one line, without the control and direction characters that could draw over others."""
    plain = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) > 127 else " " for c in text)
    return plain if len(plain) <= SHOWN else plain[: SHOWN - 1] + "…"


def _text(text: str, style: str = "") -> Text:
    """Not markup, whatever it holds."""
    return Text(text, style=style)
