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

STOPPED = 75
"""Exit status of a run that a signal stopped, and that `--resume` goes on with (EX_TEMPFAIL of sysexits.h)."""


def _fail(message: str) -> NoReturn:
    if message:
        print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a TepoError alone and exit with 2; a fault of ours keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from tepo.errors import Stopped, TepoError

        try:
            command(*args, **kwargs)
        except TepoError as error:
            _fail(str(error) if error.told_here else "")
        except Stopped as stopped:
            if stopped.told_here:
                print(stopped, file=sys.stderr)
            raise typer.Exit(STOPPED) from None
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
        bool,
        typer.Option(
            "--resume",
            help="go on from the newest whole checkpoint of the output folder; --resume FOLDER names a run, or one of "
            "its checkpoints, and brings its recipe",
        ),
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="with --resume: also under a recipe that is not that of the run")
    ] = False,
) -> None:
    """Train a model. Without a recipe: worked addition with the embedded model, some minutes on a CPU.

    Ctrl-C (SIGINT) and SIGTERM finish the step, save and exit with 75; --resume goes on from there.

    Examples:

        tepo train objective=dapo seed=3 output=runs/dapo-3

        tepo train --resume runs/dapo-3

        tepo train --resume runs/dapo-3/checkpoints/step_80 --allow-changes trainer.learning_rate=1e-4
    """
    from tepo.config import DEFAULT_RECIPE, load_recipe

    settings = overrides or []
    if allow_changes and not resume:
        _fail("--allow-changes goes with --resume")
    folders = [word for word in settings if resume and ("=" not in word or Path(word).is_dir())]
    settings = [word for word in settings if word not in folders]
    if len(folders) > 1:
        _fail(f"--resume takes one folder, and here are {len(folders)}: {', '.join(folders)}")
    if folders:
        from tepo.train.resume import recipe_to_resume

        recipe, checkpoint = recipe_to_resume(Path(folders[0]), config, settings)
    else:
        recipe, checkpoint = load_recipe(config or DEFAULT_RECIPE, settings), None
    from tepo.errors import Stopped
    from tepo.train import train as run
    from tepo.train.ranks import leave

    try:
        folder = run(recipe, resume=resume, checkpoint=checkpoint, allow_changes=allow_changes)
    except Stopped:
        leave()
        raise
    if leave():
        _write_report(folder)


def _write_report(folder: Path) -> None:
    """At the end of a run, which is complete without it."""
    from tepo.errors import TepoError
    from tepo.report.page_report import write_report
    from tepo.report.run import Run

    try:
        print(f"report    {write_report(Run.open(folder))}")
    except TepoError as error:
        print(f"no report ({error}); `tepo report {folder}` makes one", file=sys.stderr)


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
def report(
    run: Annotated[Path, typer.Argument(help="a run folder; of a run that still goes on as well")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page; report.html in the run folder")
    ] = None,
    kl: Annotated[
        bool, typer.Option(help="measure how far the policy moved from its start; this loads the starting model")
    ] = True,
) -> None:
    """One run on one page: what was run, accuracy before and after, curves, responses. It opens offline."""
    from tepo.report.page_report import write_report
    from tepo.report.run import Run

    print(write_report(Run.open(run), output, measure_kl=kl))


@app.command()
@_reports_errors
def inspect(
    source: Annotated[str, typer.Argument(help="a run folder, or with --prompt a model", metavar="RUN|MODEL")],
    overrides: Overrides = None,
    rollout: Annotated[int | None, typer.Option(help="of the run; the last one before its newest checkpoint")] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="step of the one that looks; the first after the rollout")
    ] = None,
    objectives: Annotated[
        str, typer.Option(help="to compare, comma-separated; the run's own is always there")
    ] = "tepo,grpo,dapo,gspo",
    responses: Annotated[
        int | None, typer.Option("--responses", "-k", min=1, help="32 of a run, 8 of a prompt")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="likeliest tokens to show at each place")] = 5,
    prompt: Annotated[str | None, typer.Option(help="sample responses to this from a model")] = None,
    answer: Annotated[str | None, typer.Option(help="the right one to the prompt, so that there are rewards")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the page; inspect.html")] = None,
) -> None:
    """The token view: responses with each token coloured by gradient weight, log-ratio, entropy, KL mask, clipping.

    Examples:

        tepo inspect runs/arithmetic --rollout 10 --objectives grpo,gspo,cispo

        tepo inspect smollm2 --prompt "What is 17 + 25?" --answer 42 rollout.max_response_tokens=200
    """
    from tepo.report.inspect_page import inspect_prompt, inspect_run

    names = [name.strip() for name in objectives.split(",") if name.strip()]
    if prompt is not None:
        if rollout is not None or checkpoint is not None:
            _fail("--rollout and --checkpoint are of a run, and --prompt is for a model")
        page = inspect_prompt(
            source,
            prompt,
            answer=answer,
            names=names,
            count=responses or 8,
            top=top,
            overrides=overrides or [],
            output=output,
        )
    else:
        if answer is not None or overrides:
            _fail("--answer and KEY=VALUE are for a model with --prompt; a run brings its own")
        page = inspect_run(
            Path(source),
            rollout=rollout,
            checkpoint=checkpoint,
            names=names,
            count=responses or 32,
            top=top,
            output=output,
        )
    print(page)


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
    if name is not None:
        from tepo.config import recipe_text

        print(recipe_text(name), end="")
        return
    from tepo.listing import list_recipes

    list_recipes()


@app.command()
@_reports_errors
def objectives(
    markdown: Annotated[bool, typer.Option("--markdown", help="the complete table, as in docs/objectives.md")] = False,
    relatives: Annotated[
        bool, typer.Option("--relatives", help="which settings make one another, as in docs/relatives.md")
    ] = False,
) -> None:
    """The objectives and what each is made of, from the code."""
    if markdown or relatives:
        from tepo.objectives import pages

        print("\n".join([pages.objectives_page()] * markdown + [pages.relatives_page()] * relatives), end="")
        return
    from tepo.listing import list_objectives

    list_objectives()


def main() -> None:
    """The entry point of the `tepo` command."""
    app()
