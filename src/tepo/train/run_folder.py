"""The folder of a run: everything that a run leaves behind, and where it stands."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tepo.config import Recipe
from tepo.errors import TepoError
from tepo.files import fsync_file, replace_text, told_to_the_user, write_json
from tepo.train.checkpoint import clean
from tepo.train.environment import environment, rounding_differences
from tepo.train.lock import FolderLock
from tepo.train.tokens import RolloutTokens

CLOCK = ("seconds/", "tokens_per_second")
"""How the names of those metrics begin that are read off a clock: all others are the same when a run is repeated."""


class RunFolder:
    """config.yaml, environment.json, data.json, metrics.jsonl, eval.json, rollouts/, evaluations/, checkpoints/, and
    TensorBoard's events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = FolderLock(path)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "eval.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def identity(self) -> str:
        """What tells this run from one that had the same folder before."""
        return str(json.loads(self.environment.read_text(encoding="utf-8")).get("run", self.path.name))

    @property
    def holds_a_run(self) -> bool:
        return self.config.is_file()

    def refuse_to_write_over(self) -> None:
        """Raise TepoError when the folder holds a run already."""
        if self.holds_a_run:
            raise TepoError(
                f"output = {str(self.path)!r} already holds a run: continue it with --resume, or choose another folder "
                "with output=FOLDER"
            )

    def create(self, recipe: Recipe) -> None:
        """Make the folder for a new run. Raises TepoError when it holds or serves a run, or cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
            self.refuse_to_write_over()
            for name in ("rollouts", "evaluations", "checkpoints"):
                (self.path / name).mkdir(exist_ok=True)
            write_json(self.environment, {"run": uuid.uuid4().hex} | environment(recipe.seed))
            replace_text(self.config, to_yaml(recipe))  # last: a folder with this file holds a run
        except OSError as error:
            raise TepoError(f"output = {str(self.path)!r} cannot be written: {error.strerror}") from error

    def take_up(self, recipe: Recipe, step: int, changes: list[str]) -> list[str]:
        """Before a run goes on at `step`, under a recipe with these changes: the folder's own account of it.

        -> what a person should know: another machine rounds otherwise.
        """
        now = environment(recipe.seed)
        with told_to_the_user(self.environment):
            first = json.loads(self.environment.read_text(encoding="utf-8")) if self.environment.exists() else now
            entry = now | {"step": step, "changes": changes}
            write_json(self.environment, first | {"resumed": [*first.get("resumed", []), entry]})
            replace_text(self.config, to_yaml(recipe))
        differences = rounding_differences((first.get("resumed") or [first])[-1], now)
        if not differences:
            return []
        return [f"the last bits of numbers may differ from those of the run so far: {'; '.join(differences)}"]

    def rewind(self, step: int, rollout: int, evaluations: list[dict[str, Any]]) -> None:
        """Drop what a run wrote after step `step` and rollout `rollout`, so that the resumed run writes it again."""
        with told_to_the_user(self.path):
            clean(self.checkpoints)
            for path in (self.metrics, self.skipped):
                if path.exists():
                    lines = path.read_text(encoding="utf-8", errors="surrogatepass").splitlines()
                    replace_text(path, "".join(line + "\n" for line in lines if _step_of(line) <= step))
            for file in (self.path / "rollouts").glob("rollout_*.*"):
                if int(file.stem.removeprefix("rollout_")) > rollout:
                    file.unlink()
            made = {entry["step"] for entry in evaluations}
            for file in (self.path / "evaluations").glob("step_*.jsonl"):
                if int(file.stem.split("_")[1]) not in made:
                    file.unlink()
            if evaluations:
                self.write_evaluations(evaluations)
            else:
                self.evaluation.unlink(missing_ok=True)

    def append_metrics(self, record: dict[str, float]) -> None:
        self._append(self.metrics, [record])

    def read_metrics(self) -> list[dict[str, float]]:
        """The metrics of the steps so far."""
        if not self.metrics.exists():
            return []
        with told_to_the_user(self.metrics):
            return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def append_skipped(self, records: Iterable[dict[str, Any]]) -> None:
        """Responses whose loss or gradient was not finite, with the step that was skipped for it."""
        self._append(self.skipped, records)

    def sync(self) -> None:
        """What was appended so far is on the disk: a checkpoint is not to outlive the metrics before it."""
        for path in (self.metrics, self.skipped):
            if path.exists():
                with told_to_the_user(path):
                    fsync_file(path)

    def write_data(self, train: int, held_out: int, dropped: Mapping[str, int]) -> None:
        """data.json: how many problems are in use, and how many were left out, by reason."""
        path = self.path / "data.json"
        with told_to_the_user(path):
            write_json(path, {"train": train, "held_out": held_out, "dropped": dict(dropped)})

    def write_rollout(self, index: int, records: Iterable[dict[str, Any]]) -> None:
        self._write(self.path / "rollouts" / f"rollout_{index:06d}.jsonl", records)

    def write_tokens(self, index: int, tokens: RolloutTokens) -> None:
        path = self.path / "rollouts" / f"rollout_{index:06d}.safetensors"
        with told_to_the_user(path):
            tokens.write(path)

    def write_responses(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        self._write(self.path / "evaluations" / f"{name}.jsonl", records)

    def write_evaluations(self, evaluations: list[dict[str, Any]]) -> None:
        """eval.json: the newest sampled accuracy at the top, then every evaluation."""
        sampled = evaluations[-1]["sampled"]
        top = {"step": evaluations[-1]["step"], "accuracy": sampled["accuracy"], "interval": sampled["interval"]}
        with told_to_the_user(self.evaluation):
            write_json(self.evaluation, top | {"evaluations": evaluations})

    def _append(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        with told_to_the_user(path), path.open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(_lines(records))

    def _write(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        with told_to_the_user(path):
            replace_text(path, _lines(records))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, as a file that `--config` takes."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def _step_of(line: str) -> int:
    """The step of a line of metrics; a line cut off by a crash counts as the future."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
