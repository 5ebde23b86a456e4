"""`tepo report`: one run on one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tepo.report import page_curves, page_kl
from tepo.report.page import asset, plotly_script, write_page
from tepo.report.page_samples import CHARACTERS, samples
from tepo.report.run import Run

FILE = "report.html"


def write_report(run: Run, path: Path | None = None, *, measure_kl: bool = True) -> Path:
    """Write the report of a run, `report.html` in its folder if nothing else is said. -> its path.

    measure_kl: load the starting model and measure how far the policy has moved from it, where that is not known yet.
    Raises TepoError when the starting model cannot be loaded.
    """
    drift = page_kl.measure(run) if measure_kl else page_kl.measured(run)
    target = path or run.folder / FILE
    environment = {key: value for key, value in run.environment.items() if value is not None}
    write_page(
        target,
        "report.html",
        {"charts": page_curves.charts(run, drift), "samples": samples(run)},
        [asset("text.js"), asset("samples.js"), plotly_script(), asset("charts.js")],
        title=run.name,
        kind="report",
        lead=run.recipe.objective.build().title,
        tiles=_tiles(run),
        facts=_facts(run),
        notes=_notes(run, drift),
        about_responses=(
            "Some responses of each verdict, from rollouts spread over the run and from its first and last evaluation; "
            f"of texts over {CHARACTERS:,} characters the beginning and the end. All of them are in the run folder."
        ),
        recipe=yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        environment=json.dumps(environment, indent=2, ensure_ascii=False),
    )
    return target


def _tiles(run: Run) -> list[dict[str, str | None]]:
    """What a reader looks for first: accuracy before and after, what the run took."""
    tiles: list[dict[str, str | None]] = []
    for kind, label in (("sampled", "Held-out accuracy, sampled"), ("greedy", "Held-out accuracy, greedy")):
        entries = [entry for entry in run.evaluations if kind in entry]
        if entries:
            first, last = entries[0], entries[-1]
            before = None if first is last else f"{_percent(first[kind])} {_range(first[kind])} at step {first['step']}"
            tiles.append({"label": label, "value": _percent(last[kind]), "range": _range(last[kind]), "before": before})
    rewards = run.series("reward")[1]
    if rewards:
        part = max(len(rewards) // 10, 1)
        late, early = (sum(values) / part for values in (rewards[-part:], rewards[:part]))
        tiles.append(_tile("Reward, last tenth of the steps", f"{late:.3g}", f"{early:.3g} in the first tenth"))
    if run.evaluations:
        lengths = [f"{entry['sampled']['mean_tokens']:.4g}" for entry in run.evaluations]
        tiles.append(_tile("Tokens a held-out response", lengths[-1], f"{lengths[0]} before"))
    tiles.append(_tile("Steps", f"{run.steps:,}", f"of {run.recipe.trainer.steps:,}"))
    seconds = sum(row.get(key, 0.0) for row in run.metrics for key in page_curves.PARTS)
    tiles.append(_tile("Time in training", _duration(seconds), "evaluations not counted"))
    return tiles


def _tile(label: str, value: str, before: str) -> dict[str, str | None]:
    return {"label": label, "value": value, "range": None, "before": before}


def _percent(measured: Mapping[str, Any]) -> str:
    return f"{100 * measured['accuracy']:.1f} %"


def _range(measured: Mapping[str, Any]) -> str:
    low, high = measured["interval"]
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in a line each."""
    recipe, trainer, machine = run.recipe, run.recipe.trainer, run.environment
    model = f"{recipe.model.name}, {recipe.model.dtype}" + (
        f", LoRA rank {recipe.model.lora.rank}" if recipe.model.lora else ""
    )
    data = recipe.data.name
    if run.evaluations:
        data += f", {run.evaluations[-1]['sampled']['problems']:,} problems held out"
    facts = [
        ("Objective", recipe.objective.build().title),
        ("Model", model),
        ("Data", data),
        (
            "Rollouts",
            f"{trainer.prompts_per_rollout} prompts x {trainer.responses_per_prompt} responses of up to "
            f"{recipe.rollout.max_response_tokens:,} tokens at temperature {recipe.rollout.temperature:g}; "
            f"{trainer.updates_per_rollout} updates each",
        ),
        ("Learning rate", f"{trainer.learning_rate:g}, {trainer.schedule}, {trainer.warmup_steps} steps of warm-up"),
        ("Seed", str(recipe.seed)),
    ]
    if machine:
        gpus = f", {len(machine['gpus'])} x {machine['gpus'][0]}" if machine.get("gpus") else ", no GPU"
        packages = machine.get("packages", {})
        versions = ", ".join(
            f"{name} {packages[name]}" for name in ("tepo", "torch", "transformers") if packages.get(name)
        )
        facts += [
            ("Machine", f"{machine['platform']}, {machine['cpu_cores']} cores{gpus}"),
            (
                "Software",
                f"Python {machine['python']}, {versions}"
                + (f", commit {machine['commit'][:12]}" if machine.get("commit") else ""),
            ),
        ]
    return facts


def _notes(run: Run, drift: Sequence[page_kl.Drift]) -> list[str]:
    """What a reader should know of the run's state, and of what could not be measured."""
    notes = []
    if run.steps < run.recipe.trainer.steps:
        notes.append(
            f"The run stands at step {run.steps:,} of {run.recipe.trainer.steps:,}: it goes on, or was stopped "
            f"(tepo train --config {run.folder / 'config.yaml'} --resume goes on with it)."
        )
    if not run.evaluations:
        notes.append(
            "No held-out accuracy was measured: evaluation.before, evaluation.after and evaluation.every are off."
        )
    skipped = int(sum(row.get("skipped", 0.0) for row in run.metrics))
    if skipped:
        notes.append(f"{skipped} steps were skipped because their gradient was not finite.")
    if not drift and run.recipe.rollout.save_tokens is None:
        notes.append(
            "How far the policy moved from its start is not known, as the run kept no tokens: rollout.save_tokens=1 "
            "keeps them."
        )
    elif not drift and run.metrics:
        notes.append(f"How far the policy moved from its start is not measured yet: tepo report {run.folder} does.")
    return notes
