"""Which checkpoint a run goes on from, and under which recipe it may."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tepo.config import Recipe, load_recipe
from tepo.errors import TepoError
from tepo.files import told_to_the_user
from tepo.train.checkpoint import checkpoints, damage, set_aside, step_of
from tepo.train.run_folder import RunFolder

HARMLESS = (
    "output", "trackers", "verl.", "checkpoint.", "evaluation.", "model.device", "model.gradient_checkpointing",
    "trainer.tokens_per_microbatch", "trainer.skip_limit", "trainer.stop_without_signal",
    "reward.workers", "rollout.batch_size", "rollout.cache_tokens", "rollout.vllm_memory", "rollout.vllm_server",
    "rollout.save_tokens",
)  # fmt: skip
"""Keys (or how they begin) that may change in a resumed run: they alter what is shown and kept, or rounding alone."""

FIXED = ("model.name", "model.revision", "model.lora", "trainer.updates_per_rollout")
"""Keys that cannot change within a run: its weights are of that model, and its steps are counted in those rollouts."""


@dataclass
class Start:
    """Where a run goes on: a checkpoint, or None for its very beginning.

    changes: what differs in its recipe, a line for each key. notes: for a person to read.
    """

    checkpoint: Path | None
    changes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else step_of(self.checkpoint)


def run_and_checkpoint(place: Path) -> tuple[Path, Path | None]:
    """What `--resume PLACE` names: a run folder, or a checkpoint of one. Raises TepoError for anything else."""
    folder = place.resolve()
    if (folder / "config.yaml").is_file():
        return place, None
    if folder.parent.name == "checkpoints" and (folder.parent.parent / "config.yaml").is_file():
        return Path(*place.parts[:-2]) if len(place.parts) > 2 else folder.parent.parent, folder
    what = "holds no run and is no checkpoint of one" if folder.is_dir() else "does not exist"
    raise TepoError(f"--resume {place}: that folder {what}; a run folder, or its checkpoints/step_N, is wanted")


def recipe_to_resume(place: Path, config: str | None, overrides: Sequence[str]) -> tuple[Recipe, Path | None]:
    """The recipe for `--resume PLACE`, the run's own unless `config` is given; and the checkpoint, if PLACE is one.

    Raises TepoError when another output folder is asked for.
    """
    run, checkpoint = run_and_checkpoint(place)
    recipe = load_recipe(config or run / "config.yaml", overrides)
    if any(override.startswith("output=") for override in overrides) and Path(recipe.output).resolve() != run.resolve():
        raise TepoError(
            f"output = {recipe.output!r}, and --resume goes on in {run}; to start a new run from its weights, use "
            f"model={checkpoint or run / 'checkpoints' / 'step_N'} without --resume"
        )
    return recipe.model_copy(update={"output": str(run)}), checkpoint


def begin_again(folder: RunFolder, recipe: Recipe, checkpoint: Path | None, allow_changes: bool) -> Start:
    """Lock the folder and choose: `checkpoint`, or the newest that is whole.

    Raises TepoError when there is none, when the one asked for is damaged, when another run uses the folder, and when
    the recipe has changed in a way that matters and that is not allowed. Nothing of the run is changed yet.
    """
    if not folder.holds_a_run:
        raise TepoError(
            f"output = {str(folder.path)!r} holds no run, and so no checkpoint to resume from; start one without "
            "--resume, or name the folder of another: --resume FOLDER"
        )
    changes = _changes(folder, recipe)
    fixed = [line for key, line in changes.items() if key.startswith(FIXED)]
    if fixed:
        raise TepoError(
            "\n".join([f"the run in {folder.path} cannot be resumed with another value of:", *_indented(fixed),
                       "to start a new run from its weights, use model=CHECKPOINT without --resume"])
        )  # fmt: skip
    if changes and not allow_changes:
        raise TepoError(
            "\n".join([f"the run in {folder.path} cannot be resumed with another recipe; it differs in:",
                       *_indented(list(changes.values())),
                       f"--resume {folder.path} takes the recipe of the run; --allow-changes goes on with this one"])
        )  # fmt: skip
    with told_to_the_user(folder.path):
        folder.lock.acquire()
    start = _newest(folder) if checkpoint is None else _chosen(checkpoint)
    start.changes = changes
    return start


def put_newer_aside(folder: RunFolder, start: Start) -> list[str]:
    """What comes after `start` will be written anew: newer checkpoints, and those passed over, go out of the way."""
    newer = [
        path for path in folder.checkpoints.glob("step_*") if path.name[5:].isdigit() and step_of(path) > start.step
    ]
    return [f"checkpoint {path.name} was put aside as {set_aside(path).name}" for path in sorted(newer, key=step_of)]


def _chosen(checkpoint: Path) -> Start:
    fault = damage(checkpoint)
    if fault is not None:
        whole = [path.name for path in checkpoints(checkpoint.parent) if damage(path) is None]
        raise TepoError(
            f"--resume {checkpoint}: the checkpoint is damaged: {fault}; whole ones: {', '.join(whole) or 'none'}"
        )
    return Start(checkpoint)


def _newest(folder: RunFolder) -> Start:
    start = Start(None)
    present = [path for path in folder.checkpoints.glob("step_*") if path.name[5:].isdigit()]
    for path in sorted(present, key=step_of, reverse=True):
        fault = damage(path)
        if fault is None:
            start.checkpoint = path
            return start
        start.notes.append(f"checkpoint {path.name} is damaged: {fault}; going on from the one before it")
    if present:
        raise TepoError(
            "\n".join(
                [f"output = {str(folder.path)!r} has no whole checkpoint to resume from:", *_indented(start.notes)]
            )
        )
    start.notes.append("the run has no checkpoint yet: it starts again from step 0")
    return start


def _changes(folder: RunFolder, recipe: Recipe) -> dict[str, str]:
    """What differs from the run's recipe and matters to a run that goes on."""
    # A constant rate does not depend on the number of steps: a run can then be made longer.
    longer = recipe.trainer.schedule == "constant"
    return differences(folder, recipe, (*HARMLESS, "trainer.steps") if longer else HARMLESS)


def differences(folder: RunFolder, recipe: Recipe, may_differ: tuple[str, ...]) -> dict[str, str]:
    """The keys that differ from the run's recipe, each with a line that says how; but for those that may, or begin so.

    Raises TepoError when the run's recipe cannot be read.
    """
    try:
        before = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        assert isinstance(before, dict)
    except (OSError, ValueError, yaml.YAMLError, AssertionError) as error:
        raise TepoError(
            f"{folder.config} cannot be read ({type(error).__name__}): it is the recipe of the run"
        ) from error
    now = recipe.model_dump(mode="json")
    return {
        key: f"{key}: {_show(before, key)} then, {_show(now, key)} now"
        for key in sorted(_leaves(before) | _leaves(now))
        if not key.startswith(may_differ) and _show(before, key) != _show(now, key)
    }


def _leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys of all values that are not sections."""
    keys: set[str] = set()
    for key, value in tree.items():
        keys |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key}
    return keys


def _show(tree: dict[str, Any], key: str) -> str:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return json.dumps(value)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
