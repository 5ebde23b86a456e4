"""A run folder as it is read: its recipe, metrics, evaluations, machine and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tepo.config import Recipe, load_recipe
from tepo.errors import TepoError
from tepo.train.checkpoint import checkpoints, step_of
from tepo.train.tokens import RolloutTokens

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run left behind, or has so far: a run that still goes on, or was stopped, can be read as well.

    metrics: a row for each optimizer step, in order; a value that was not finite is NaN or an infinity.
    evaluations: of eval.json, in order of their steps: {"step", "sampled": {"accuracy", "interval", ...}, "greedy"?}.
    environment: of environment.json; empty when there is none.
    """

    folder: Path
    recipe: Recipe
    metrics: list[dict[str, float]]
    evaluations: list[Record]
    environment: Record

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read a run folder, its responses excepted. Raises TepoError when it is none, or a file in it is damaged."""
        path = Path(folder)
        config = path / "config.yaml"
        if not config.is_file():
            raise TepoError(f"{path}: is not a run folder, it holds no config.yaml")
        evaluation = _read_json(path / "eval.json")
        return cls(
            path,
            load_recipe(config),
            list(read_lines(path / "metrics.jsonl")),
            evaluation.get("evaluations", []),
            _read_json(path / "environment.json"),
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> int:
        """Optimizer steps made so far."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was measured."""
        rows = [row for row in self.metrics if key in row]
        return [int(row["step"]) for row in rows], [row[key] for row in rows]

    def rollouts(self) -> list[int]:
        """Indices of the rollouts whose responses are stored."""
        return sorted(int(file.stem.removeprefix("rollout_")) for file in self.folder.glob("rollouts/rollout_*.jsonl"))

    def responses(self, rollout: int) -> Iterator[Record]:
        """The responses of one rollout, read as they are asked for (fields: `tepo.evaluate.accuracy.record`).

        Raises TepoError when the rollout is not stored.
        """
        path = self.folder / "rollouts" / f"rollout_{rollout:06d}.jsonl"
        if not path.is_file():
            stored = self.rollouts()
            held = f"{len(stored)}, from {stored[0]} to {stored[-1]}" if stored else "none"
            raise TepoError(f"{self.folder}: rollout {rollout} is not stored; those that are: {held}")
        return read_lines(path)

    def tokens_path(self, rollout: int) -> Path:
        """Where the tokens of a rollout lie, if the run keeps them (rollout.save_tokens)."""
        return self.folder / "rollouts" / f"rollout_{rollout:06d}.safetensors"

    def tokens(self, rollout: int) -> RolloutTokens:
        """The tokens of one rollout, in the order of its responses. Raises TepoError when they are not stored."""
        path = self.tokens_path(rollout)
        if not path.is_file():
            raise TepoError(f"{self.folder}: the tokens of rollout {rollout} are not stored (rollout.save_tokens)")
        return RolloutTokens.read(path)

    def step_of(self, rollout: int) -> int:
        """The step after which a rollout was sampled: the optimizer steps that its policy had made."""
        return rollout * self.recipe.trainer.updates_per_rollout

    def checkpoints(self) -> dict[int, Path]:
        """Finished checkpoints by their step, in order."""
        return {step_of(path): path for path in checkpoints(self.folder / "checkpoints")}


def _read_json(path: Path) -> Record:
    """The object in a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value: Record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TepoError(f"{path}: is damaged, no JSON can be read from it ({error})") from None
    return value


def read_lines(path: Path) -> Iterator[Record]:
    """The objects in a file with one a line. A last line without its end is one that is being written, or was cut."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise TepoError(f"{path}: line {number} is damaged, no JSON can be read from it ({error})") from None
