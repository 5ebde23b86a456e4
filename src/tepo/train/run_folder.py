"""The folder of a run: everything that a run leaves behind, and where it stands."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from tepo.config import Recipe
from tepo.errors import TepoError

REPORTED_PACKAGES = ("tepo", "torch", "transformers", "accelerate", "peft", "math-verify", "datasets", "numpy")

MAY_CHANGE = ("output", "trainer.steps", "trainer.tokens_per_microbatch", "evaluation.", "checkpoint.", "trackers")
"""Keys that may change when a run is resumed: they do not alter what was done, only what follows or is shown."""


class RunFolder:
    """config.yaml, environment.json, data.json, metrics.jsonl, eval.json, rollouts/, evaluations/, checkpoints/, and
    TensorBoard's events."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "eval.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def create(self, recipe: Recipe) -> None:
        """Make the folder for a new run. Raises TepoError when it holds a run already or cannot be written."""
        if (self.path / "config.yaml").exists():
            raise TepoError(
                f"output = {str(self.path)!r} already holds a run: continue it with --resume, or choose another folder "
                "with output=FOLDER"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in ("rollouts", "evaluations", "checkpoints"):
                (self.path / name).mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(to_yaml(recipe), encoding="utf-8")
            _write_json(self.path / "environment.json", environment())
        except OSError as error:
            raise TepoError(f"output = {str(self.path)!r} cannot be written: {error.strerror}") from error

    def check_recipe(self, recipe: Recipe, may_change: tuple[str, ...] = MAY_CHANGE) -> None:
        """Raise TepoError, with the list of differences, when a run cannot be gone on with under another recipe."""
        before = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        now = recipe.model_dump(mode="json")
        differences = [
            f"  {key}: {_show(before, key)} then, {_show(now, key)} now"
            for key in sorted(_leaves(before) | _leaves(now))
            if not key.startswith(may_change) and _show(before, key) != _show(now, key)
        ]
        if differences:
            raise TepoError(
                "\n".join(
                    [f"the run in {self.path} cannot be resumed with another recipe; it differs in:", *differences]
                )
            )

    def append_metrics(self, record: dict[str, float]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, float]]:
        """The metrics of the steps so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def write_data(self, train: int, held_out: int, dropped: Mapping[str, int]) -> None:
        """data.json: how many problems are in use, and how many were left out, by reason."""
        _write_json(self.path / "data.json", {"train": train, "held_out": held_out, "dropped": dict(dropped)})

    def rewind(self, step: int, rollout: int) -> None:
        """Drop what a run wrote after the checkpoint of `step`, so that the resumed run writes it again."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            _replace(self.metrics, "".join(line + "\n" for line in kept))
        for file in (self.path / "rollouts").glob("rollout_*.jsonl"):
            if int(file.stem.removeprefix("rollout_")) > rollout:
                file.unlink()

    def write_rollout(self, index: int, records: Iterable[dict[str, Any]]) -> None:
        _write_lines(self.path / "rollouts" / f"rollout_{index:06d}.jsonl", records)

    def write_responses(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        _write_lines(self.path / "evaluations" / f"{name}.jsonl", records)

    def write_evaluations(self, evaluations: list[dict[str, Any]]) -> None:
        """eval.json: the newest sampled accuracy at the top, then every evaluation."""
        sampled = evaluations[-1]["sampled"]
        top = {"step": evaluations[-1]["step"], "accuracy": sampled["accuracy"], "interval": sampled["interval"]}
        _write_json(self.evaluation, top | {"evaluations": evaluations})


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, as a file that `--config` takes."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


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


def environment() -> dict[str, Any]:
    """What is needed to repeat a run on another machine: versions, command, commit, hardware."""
    import torch

    versions: dict[str, str | None] = {}
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "commit": _commit(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _commit() -> str | None:
    """The commit of the working copy that tepo runs from; None for an installed package."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _step_of(line: str) -> int:
    """The step of a line of metrics; a line cut off by a crash counts as the future."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return sys.maxsize


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _write_json(path: Path, value: Any) -> None:
    _replace(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    _replace(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
