"""The commands. Everything heavy is imported when its command runs, so that `tepo --help` answers at once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="tepo",
    help="Train language models to reason, by reinforcement learning from verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="settings that replace those of the recipe, such as trainer.steps=100", metavar="[KEY=VALUE]..."
    ),
]
Config = Annotated[str | None, typer.Option("--config", "-c", help="a YAML file or the name of a packaged recipe")]


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a TepoError alone and exit with 2; a fault of ours keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from tepo.errors import TepoError

        try:
            command(*args, **kwargs)
        except TepoError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


@app.command()
@_reports_errors
def train(
    overrides: Overrides = None,
    config: Config = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint of the run folder")
    ] = False,
) -> None:
    """Train a model. Without a recipe: worked addition with the embedded model, some minutes on a CPU."""
    from tepo.config import DEFAULT_RECIPE, load_recipe

    recipe = load_recipe(config or DEFAULT_RECIPE, overrides or [])
    from tepo.train import train as run

    run(recipe, resume=resume)


@app.command(name="eval")
@_reports_errors
def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="`embedded`, `smollm2`, a folder (a checkpoint, say) or a hub id")
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            help="data sets, comma-separated: a task, preset or hub id, NAME=FILE for a local copy, or a file",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", "-k", min=1, help="responses to each problem, for avg@k, pass@k and maj@k"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", min=0.0, help="of the responses; 0 is greedy")
    ] = None,
    config: Config = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="folder for the results; by default one below runs/eval for these settings"
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="two such folders, compared problem by problem; needs no MODEL"),
    ] = None,
) -> None:
    """Accuracy, pass@k and maj@k of a model on held-out problems, with 95 % intervals over problems.

    Benchmarks are measured as papers do: AIME and AMC with 32 samples at temperature 0.6, the others greedily, on all
    their problems. Everything else is sampled as the recipe says, and greedily; a checkpoint brings that of its run.

    The folder gets eval.json, responses.jsonl and pass_at_k.html. The same command again goes on where it was
    interrupted, and samples nothing twice.

    Examples:

        tepo eval Qwen/Qwen2.5-0.5B-Instruct --data math500,aime24,amc23 rollout.max_response_tokens=4096

        tepo eval smollm2 --data gsm8k=gsm8k_test.jsonl data.test_problems=40 -k 4

        tepo eval --compare runs/eval/before runs/eval/after
    """
    if compare is not None:
        if model is not None or data:
            _fail("--compare takes two folders of finished evaluations, and no MODEL or --data")
        from tepo.evaluate.compare import compare_evaluations

        compare_evaluations(*compare)
        return
    if model is None:
        _fail("a MODEL is missing: tepo eval MODEL --data NAME, or tepo eval --compare A B")
    from tepo.evaluate.command import evaluate_model

    evaluate_model(model, data or [], samples, temperature, config, overrides or [], output)


@app.command()
@_reports_errors
def compare(
    recipe: Annotated[
        str | None, typer.Argument(help="a YAML file or the name of a packaged recipe; `arithmetic` by default")
    ] = None,
    overrides: Overrides = None,
    objectives: Annotated[
        str, typer.Option("--objectives", help="comma-separated, each with settings of its own: tepo,tepo+kl_mask=null")
    ] = "tepo,grpo",
    seeds: Annotated[
        int, typer.Option("--seeds", "-n", min=1, help="seeds of each, from the recipe's `seed` upwards")
    ] = 5,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="data sets, as objectives are given: arithmetic+options.digits=2,gsm8k"),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="the objective that others are compared with; the first by default")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            min=0.0,
            max=1.0,
            help="accuracy to count the steps to; by default 90 % of the baseline's way from start to end",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="runs at a time; they share the cores")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder of the runs and the result; runs/compare by default")
    ] = None,
    existing: Annotated[
        list[Path] | None, typer.Option("--from", metavar="RUN...", help="compare runs that are there, and run nothing")
    ] = None,
) -> None:
    """Objectives x seeds x tasks from one recipe: who is better, by how much, how surely, how fast.

    Every objective gets the same initial model, order of problems, held-out problems and draws for each seed. The same
    command again keeps the runs that are finished and goes on with the others. Writes comparison.md, .tex, .json and
    the learning curves, comparison.html.

    Examples:

        tepo compare --objectives grpo,tepo,tepo+kl_mask.beta=0.1,dapo --seeds 5 --jobs 2 evaluation.every=20

        tepo compare my.yaml --objectives grpo,tepo --tasks gsm8k,math --baseline grpo

        tepo compare --from runs/first runs/second runs/third
    """
    from tepo.config import DEFAULT_RECIPE

    words = [*([recipe] if recipe is not None else []), *(overrides or [])]
    folder = output or Path("runs/compare")
    if existing:
        from tepo.report.compare.command import compare_existing

        compare_existing([*existing, *map(Path, words)], baseline=baseline, threshold=threshold, output=folder)
        return
    from tepo.report.compare.command import compare as run

    source = words.pop(0) if words and "=" not in words[0] else DEFAULT_RECIPE
    run(source, words, objectives, seeds, tasks=tasks, baseline=baseline, threshold=threshold, jobs=jobs, output=folder)


@app.command()
@_reports_errors
def diagnose(run: Annotated[Path, typer.Argument(help="the folder of a run, finished or not")]) -> None:
    """What is wrong with a run, in words: the likeliest cause first, with its evidence and what to try.

    The same rules warn while a run goes on. docs/diagnose.md lists them.
    """
    from tepo.report.diagnose import diagnose_run

    diagnose_run(run)


@app.command()
@_reports_errors
def verl(
    recipe: Annotated[str, typer.Argument(help="a YAML file or the name of a packaged recipe")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command, run and write nothing")] = False,
) -> None:
    """Run a recipe on a Ray cluster: its command for verl, printed, checked and started."""
    from tepo.config import load_recipe
    from tepo.integrations.verl.command import run_verl

    if status := run_verl(load_recipe(recipe, overrides or []), dry_run):
        raise typer.Exit(status)


@app.command()
@_reports_errors
def recipes(name: Annotated[str | None, typer.Argument(help="print this recipe")] = None) -> None:
    """The packaged recipes and tasks; with a name, that recipe's YAML."""
    from rich.console import Console
    from rich.table import Table

    from tepo.config import recipe_names, recipe_text
    from tepo.data import task_names

    if name is not None:
        print(recipe_text(name), end="")
        return
    table = Table(title="recipes: tepo train --config NAME", title_justify="left")
    table.add_column("name")
    table.add_column("what it does")
    for recipe in recipe_names():
        about = [line.removeprefix("# ") for line in recipe_text(recipe).splitlines() if line.startswith("# ")]
        table.add_row(recipe, about[0] if about else "")
    console = Console()
    console.print(table)
    console.print(f"tasks for data.name: {', '.join(task_names())}, gym:TASK, a file, or a hub id", markup=False)


@app.command()
@_reports_errors
def objectives(
    markdown: Annotated[bool, typer.Option("--markdown", help="the complete table, as in docs/objectives.md")] = False,
    relatives: Annotated[
        bool, typer.Option("--relatives", help="which settings make one another, as in docs/relatives.md")
    ] = False,
) -> None:
    """The objectives and what each is made of, from the code."""
    from tepo.objectives import describe, pages

    if markdown or relatives:
        print("\n".join([pages.objectives_page()] * markdown + [pages.relatives_page()] * relatives), end="")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    separated = console.width < 140  # where most rows take more than one line
    table = Table(title="objectives: objective=NAME", title_justify="left", show_lines=separated)
    for column in describe.COMPACT:
        table.add_column(column, no_wrap=column == "name")
    for row in describe.compact_all():
        table.add_row(*(row[column] for column in describe.COMPACT))
    console.print(table)
    console.print("all settings: tepo objectives --markdown; equalities: tepo objectives --relatives", markup=False)


def main() -> None:
    """The entry point of the `tepo` command."""
    app()
