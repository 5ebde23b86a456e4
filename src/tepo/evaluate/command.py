"""`tepo eval`: one model on one data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tepo.config import DEFAULT_RECIPE, Recipe, load_recipe
from tepo.errors import TepoError
from tepo.evaluate.accuracy import Accuracy
from tepo.evaluate.session import Session

SUMMARY, RESPONSES = "eval.json", "responses.jsonl"


def evaluate_model(
    model: str,
    data: str | None,
    samples: int,
    config: str | None,
    overrides: Sequence[str],
    output: Path | None,
    console: Console | None = None,
) -> dict[str, Accuracy]:
    """Evaluate, print a table, and write eval.json and responses.jsonl when `output` is given.

    config: recipe to take data, reward and sampling from; by default the run that a checkpoint belongs to, or the
    defaults. data: replaces the recipe's data. Raises TepoError for whatever cannot be used.
    """
    console = console or Console()
    for name in (SUMMARY, RESPONSES):
        if output is not None and (output / name).exists():
            raise TepoError(f"--output {output}: holds {name} already; choose another folder")
    recipe = _recipe(model, data, config, overrides)
    with Session.open(recipe, trainable=False) as session:
        results = {
            "sampled": session.evaluate(greedy=False, samples=samples),
            "greedy": session.evaluate(greedy=True),
        }
    console.print(_table(recipe, results))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        summary = {"model": model, "data": recipe.data.name} | {name: r.summary() for name, r in results.items()}
        (output / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        lines = [json.dumps({"kind": n} | row, ensure_ascii=False) for n, r in results.items() for row in r.responses]
        (output / RESPONSES).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        console.print(f"written to {output}", markup=False)
    return results


def _recipe(model: str, data: str | None, config: str | None, overrides: Sequence[str]) -> Recipe:
    folder = Path(model).expanduser().absolute().parent
    own = folder.parent / "config.yaml"
    # Any other config.yaml two folders up has nothing to do with the model.
    source = config or (str(own) if folder.name == "checkpoints" and own.is_file() else None)
    if source is None and data in (None, DEFAULT_RECIPE):
        source = DEFAULT_RECIPE
    chosen = [f"model.name={json.dumps(model)}"] + ([f"data={json.dumps(data)}"] if data else [])
    return load_recipe(source, [*chosen, *overrides])


def _table(recipe: Recipe, results: dict[str, Accuracy]) -> Table:
    sampled, greedy = results["sampled"], results["greedy"]
    title = f"{recipe.model.name} on {recipe.data.name}: {sampled.problems} problems, 95 % intervals"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column(f"sampled, T = {sampled.temperature:g}, {sampled.samples} each")
    table.add_column("greedy")

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    row("accuracy", *(f"{r.accuracy:.1%} [{r.interval[0]:.1%}, {r.interval[1]:.1%}]" for r in (sampled, greedy)))
    for k, value in sampled.pass_at_k.items():
        if k > 1:
            row(f"pass@{k}", f"{value:.1%}", "")
    for status in sampled.verdicts:
        if status != "correct" and (sampled.verdicts[status] or greedy.verdicts[status]):
            row(status.replace("_", " "), f"{sampled.verdicts[status]:.1%}", f"{greedy.verdicts[status]:.1%}")
    row("truncated", f"{sampled.truncated:.1%}", f"{greedy.truncated:.1%}")
    row("tokens a response", f"{sampled.mean_tokens:.1f}", f"{greedy.mean_tokens:.1f}")
    return table
