"""`tepo eval`: one model on one or several data sets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tepo.config import Recipe
from tepo.errors import TepoError
from tepo.evaluate.accuracy import Accuracy, answer, measure
from tepo.evaluate.plan import Pass, data_names, passes, recipe_for
from tepo.evaluate.plot import write_plot
from tepo.evaluate.saved import SUMMARY, SavedResponses
from tepo.evaluate.session import Session
from tepo.evaluate.table import data_tables, overview
from tepo.files import write_json
from tepo.seeds import derive_seed

DEFAULT_FOLDER = Path("runs/eval")
PLOT = "pass_at_k.html"
OF_ONE_DATA_SET = tuple(
    f"data.{key}" for key in ("name", "file", "test_file", "split", "test_split", "subset", "columns", "options")
)

Results = dict[str, dict[str, Accuracy]]
"""By data set, then `sampled` or `greedy`."""


def evaluate_model(
    model: str,
    data: Sequence[str] = (),
    samples: int | None = None,
    temperature: float | None = None,
    config: str | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    console: Console | None = None,
) -> Results:
    """Evaluate, print tables, and write eval.json, responses.jsonl and a plot of pass@k.

    data: names of data sets, `NAME=FILE` for a local copy; empty is the data of the recipe, which by default is that of
        the run that a checkpoint belongs to. samples, temperature: in place of what is usual for a data set.
    output: a folder; by default one below runs/eval, named after the model and the settings. What it holds of this
        evaluation already is not sampled again.
    Raises TepoError for whatever cannot be used.
    """
    console = console or Console()
    names = data_names(data)
    of_one = [item.partition("=")[0] for item in overrides if item.startswith(OF_ONE_DATA_SET)]
    if len(names) > 1 and of_one:
        raise TepoError(f"{', '.join(of_one)}: of one data set, and there are {len(names)}; a file is --data NAME=FILE")
    asked: list[str | None] = [*names] or [None]
    recipes = {
        _label(name, recipe): recipe
        for name, recipe in ((name, recipe_for(model, name, config, overrides)) for name in asked)
    }
    settings = {
        "model": model,
        "weights": _fingerprint(model),
        "samples": samples,
        "temperature": temperature,
        "data": {label: _relevant(recipe) for label, recipe in recipes.items()},
    }
    folder = output or DEFAULT_FOLDER / _folder_name(model, settings)
    results: Results = {}
    # Settings of another evaluation are refused before a model is loaded.
    with SavedResponses(folder, settings) as saved, ExitStack() as opened:
        if saved.found:
            console.print(f"going on with {saved.found} responses in {folder}", markup=False)
        first: Session | None = None
        for label, recipe in recipes.items():
            # One model and one engine for all: the first session stays open to the end, its judges need not.
            session = Session.open(recipe, trainable=False) if first is None else first.on(recipe)
            opened.enter_context(session)
            first = first or session
            _tell(session, console)
            protocol = session.task.protocol if names else None
            results[label] = {
                part.kind: _measure(session, label, part, saved, console)
                for part in passes(recipe, protocol, samples, temperature)
            }
            session.judge.close()
            for table in data_tables(model, label, results[label]):
                console.print(table)
    if len(results) > 1:
        console.print(overview(model, results))
    write_json(folder / SUMMARY, summary(model, results))
    if write_plot(folder / PLOT, model, results):
        console.print(f"pass@k: {folder / PLOT}", markup=False)
    console.print(f"written to {folder}", markup=False)
    return results


def _tell(session: Session, console: Console) -> None:
    """What a person should know of the data before its figures."""
    for note in session.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    for reason, count in session.dropped.items():
        console.print(f"left out: {count} problems ({reason})", style="yellow", markup=False)


def _measure(session: Session, label: str, part: Pass, saved: SavedResponses, console: Console) -> Accuracy:
    """Sample what is not saved yet, in chunks whose content and seed do not depend on what is."""
    problems = list(session.test)
    if not problems:
        raise TepoError(f"{label}: there are no problems to evaluate on")
    chunk = max(1, session.recipe.evaluation.save_every // part.samples)
    records, done = saved.take(label, part.kind, problems, part.samples, chunk)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(f"{label}, {part.kind}", total=len(problems), completed=done)
        for start in range(done, len(problems), chunk):
            asked = problems[start : start + chunk]
            fresh = answer(
                session.engine,
                session.judge,
                session.decode,
                asked,
                [session.render(problem) for problem in asked],
                part.samples,
                part.sampling,
                derive_seed(session.recipe.seed, "evaluation", label, part.kind, start),
            )
            fresh = [{"data": label, "kind": part.kind, **row} for row in fresh]
            saved.append(fresh)
            records += fresh
            progress.advance(bar, len(asked))
    return measure(records, part.samples, part.sampling.temperature, session.judge.same_answers)


def summary(model: str, results: Results) -> dict[str, Any]:
    """What eval.json holds: by data set, then `sampled` or `greedy`. One data set's stand at the top as well."""
    by_data = {name: {kind: result.summary() for kind, result in kinds.items()} for name, kinds in results.items()}
    only: dict[str, Any] = next(iter(by_data.values())) if len(by_data) == 1 else {}
    return {"model": model, "data": list(results), **only, "results": by_data}


def _label(name: str | None, recipe: Recipe) -> str:
    return recipe.data.name if name is None else name.partition("=")[0]


def _relevant(recipe: Recipe) -> dict[str, Any]:
    """The sections of a recipe that a result depends on."""
    whole = recipe.model_dump(mode="json")
    return {key: whole[key] for key in ("seed", "model", "data", "reward", "rollout", "evaluation")}


def _fingerprint(model: str) -> list[list[Any]]:
    """Names, sizes and times of the files of a model folder: a folder may be written over by other weights."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.iterdir())]


def _folder_name(model: str, settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", "-".join(Path(model).parts[-2:])).strip("-.")
    return f"{name}-{digest}"
