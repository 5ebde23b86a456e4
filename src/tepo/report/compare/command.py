"""`tepo compare`, from its arguments to its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tepo.errors import TepoError
from tepo.report.compare.existing import name_runs
from tepo.report.compare.figure import write_figure
from tepo.report.compare.launch import run_cells
from tepo.report.compare.outcome import Outcome, read_outcome
from tepo.report.compare.plan import make_plan
from tepo.report.compare.spec import parse_specs
from tepo.report.compare.summary import Comparison, summarize
from tepo.report.compare.tables import grids, notes
from tepo.report.run import Run


def compare(
    source: str,
    overrides: Sequence[str],
    objectives: str,
    seeds: int,
    *,
    tasks: str | None = None,
    baseline: str | None = None,
    threshold: float | None = None,
    jobs: int = 1,
    output: Path,
    console: Console | None = None,
) -> Comparison:
    """Run objectives x seeds x tasks, as far as they are not there yet, and show how they compare.

    Raises TepoError for what cannot run, before anything does; and at the end, with the tables written, when a run
    failed.
    """
    console = console or Console()
    named = parse_specs(objectives, "objective")
    if baseline is not None and baseline not in [spec.text for spec in named]:
        raise TepoError(f"--baseline {baseline}: is none of --objectives {', '.join(spec.text for spec in named)}")
    of_tasks = [] if tasks is None else parse_specs(tasks, "data")
    cells = make_plan(source, overrides, named, of_tasks, seeds, output)
    console.print(f"{len(cells)} runs, {jobs} at a time, in {output}", markup=False, highlight=False)
    failed = run_cells(cells, jobs, output, console)
    order = {spec.text: place for place, spec in enumerate(named)}
    finished = sorted((cell for cell in cells if cell not in failed), key=lambda cell: order[cell.objective])
    outcomes = [read_outcome(Run.open(cell.folder), cell.task, cell.objective) for cell in finished]
    lost = [(cell.task, cell.objective, cell.seed) for cell in failed]
    if not outcomes:
        raise TepoError(f"none of {len(cells)} runs finished; what they printed is in {output}/*/*/seed_*.log")
    found = _show(outcomes, baseline or named[0].text, threshold, lost, output, source, console)
    if failed:
        raise TepoError(f"{len(failed)} of {len(cells)} runs failed: {'; '.join(cell.name for cell in failed)}")
    return found


def compare_existing(
    folders: Sequence[Path],
    *,
    baseline: str | None = None,
    threshold: float | None = None,
    output: Path,
    console: Console | None = None,
) -> Comparison:
    """The same of runs that are there, named by their objectives and whatever else they differ in."""
    named = name_runs([Run.open(folder) for folder in folders])
    outcomes = [read_outcome(run, task, label) for task, label, run in named]
    return _show(outcomes, baseline or outcomes[0].objective, threshold, [], output, "runs", console or Console())


def _show(
    outcomes: Sequence[Outcome],
    baseline: str,
    threshold: float | None,
    failed: Sequence[tuple[str, str, int]],
    output: Path,
    title: str,
    console: Console,
) -> Comparison:
    """Print the tables, and write comparison.md, .tex, .json, .html and .svg."""
    found = summarize(outcomes, baseline, threshold, failed)
    tables = grids(found)
    for grid in tables:
        console.print(grid.rich())
    for note in notes(found):
        console.print(note, markup=False, highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "comparison"
    listed = "".join(f"- {note}\n" for note in notes(found))
    texts = {
        ".md": "\n".join(grid.markdown() for grid in tables) + f"\n{listed}",
        ".tex": "\n".join(grid.latex() for grid in tables),
        ".json": json.dumps(found.plain(), indent=2) + "\n",
    }
    for ending, text in texts.items():
        path.with_suffix(ending).write_text(text, encoding="utf-8")
    pictures = write_figure(path, outcomes, title)
    written = ", ".join(str(file) for file in (*(path.with_suffix(ending) for ending in texts), *pictures))
    console.print(f"written: {written}", markup=False, highlight=False, soft_wrap=True)
    if len(pictures) == 1:
        console.print("no picture of the curves: kaleido is not installed (pip install 'tepo[pictures]')", markup=False)
    return found
