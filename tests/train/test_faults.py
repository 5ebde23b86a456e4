"""What goes wrong beside the run does not end it, and what ends it loses nothing."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_run, metrics_of
from torch import Tensor

from tepo.errors import Diverged, TepoError
from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.surrogates import Clip
from tepo.rollout import Response, TransformersEngine
from tepo.train.checkpoint import checkpoints, damage
from tepo.train.sample import check_finite

QUICK = ["trainer.steps=6", "data.max_problems=200", "evaluation.before=false", "evaluation.after=false"]


@dataclass(frozen=True)
class Broken(Clip):
    """Not a number in value, or in gradient alone, for tokens whose old log-prob is among the least likely."""

    gradient: bool = False

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        value, clipped = super().__call__(batch, log_ratio, advantages)
        bad = batch.old_logp < BELOW
        if not self.gradient:
            return value.masked_fill(bad, torch.nan), clipped
        root = torch.zeros_like(value)
        root[bad] = (batch.logp - batch.logp.detach())[bad].abs().sqrt()  # 0, and its slope is infinite
        return value + root, clipped


BELOW = -3.0
GRPO = get_objective("dapo")
LOSS = replace(GRPO, name="broken_loss", surrogate=Broken(0.2, 0.2))
GRADIENT = replace(GRPO, name="broken_gradient", surrogate=Broken(0.2, 0.2, gradient=True))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objectives and verifiers of this module go by its name, in worker processes too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.mark.parametrize("objective", ["LOSS", "GRADIENT"])
def test_a_step_that_is_not_finite_is_skipped_and_explained(run: Any, objective: str) -> None:
    folder, printed = run(*QUICK, f"objective=test_faults:{objective}", "checkpoint.every=1")
    metrics = metrics_of(folder)
    skipped = [line["step"] for line in metrics if line["skipped"]]
    assert 0 < len(skipped) < 6
    assert metrics[-1]["skipped_in_all"] == len(skipped)
    assert f"step {skipped[0]} was skipped" in printed
    records = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records} == set(skipped)
    assert all(record["alone"] for record in records)
    # Exactly the responses with such a token, and an advantage: no other can have a gradient.
    rollouts = [json.loads(x) for x in (folder / "rollouts" / "rollout_000000.jsonl").read_text().splitlines()]
    written = {record["response"] for record in rollouts}
    first = [record for record in records if record["rollout"] == 0]
    assert first
    assert {record["response"] for record in first} <= written
    assert len(first) < len(rollouts)
    assert all({"id", "problem", "advantage", "loss", "grad_norm"} <= record.keys() for record in records)


def test_weights_and_coefficients_do_not_move_in_a_skipped_step(run: Any) -> None:
    folder, _ = run(*QUICK, "objective=test_faults:LOSS", "checkpoint.every=1")
    steps = metrics_of(folder)
    at = next(line["step"] for line in steps if line["skipped"] and line["step"] > 1)
    before, after = (folder / "checkpoints" / f"step_{step}" / "model.safetensors" for step in (at - 1, at))
    assert before.read_bytes() == after.read_bytes()


def test_too_many_skipped_steps_end_the_run(run: Any) -> None:
    with pytest.raises(TepoError, match=r"(?s)not finite in 1 steps in a row \(trainer.skip_limit\)"):
        run(*QUICK, "objective=test_faults:LOSS", "trainer.skip_limit=1")


def test_diverged_weights_are_told() -> None:
    sound, broken = Response((5, 6), (-0.1, -0.2), True), Response((5, 6), (-0.1, math.nan), True)
    check_finite([[sound, sound]])
    with pytest.raises(Diverged, match=r"not numbers in 1 of 4 responses.*--allow-changes"):
        check_finite([[sound, sound], [broken, sound]])


def test_a_judge_that_dies_costs_its_own_answers_alone(run: Any) -> None:
    folder, _ = run(*QUICK, "reward.verifier=verifiers:fatal")
    rollouts = [
        json.loads(x) for path in sorted((folder / "rollouts").iterdir()) for x in path.read_text().splitlines()
    ]
    assert {record["status"] for record in rollouts if "99" in record["response"]} == {"error"}
    assert {record["status"] for record in rollouts if "99" not in record["response"]} == {"correct", "wrong"}
    assert metrics_of(folder)[-1]["step"] == 6


def test_an_engine_that_fails_leaves_a_checkpoint(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done until then is saved, although no checkpoint was due."""
    whole, _ = run(*QUICK, output="whole")
    generate, calls = TransformersEngine.generate, []

    def failing(self: TransformersEngine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise TepoError("the engine is gone")
        return generate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", failing)
        with pytest.raises(TepoError, match="the engine is gone"):
            run(*QUICK, output="part")
    assert [path.name for path in checkpoints(tmp_path / "part" / "checkpoints")] == ["step_4"]
    run(*QUICK, output="part", resume=True)
    assert_same_run(whole, tmp_path / "part", 6)


def test_a_tracker_that_fails_is_told_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import TensorBoardTracker

    def unreachable(self: Any, values: Any, step: int) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(TensorBoardTracker, "log", unreachable)
    folder, printed = run(*QUICK)
    assert printed.count("tracker tensorboard failed") == 1
    assert "ConnectionError: no route to host" in printed
    assert len(metrics_of(folder)) == 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_costs_checkpoints_and_not_the_run(run: Any, small_disk: Path, tmp_path: Path) -> None:
    """Each takes about 10 MiB: the first two fit. When there is room again the last is written."""
    options = [*QUICK, "checkpoint.every=1", "trackers=[]"]
    whole, _ = run(*options, output="whole")
    with pytest.raises(TepoError, match=r"the last checkpoint, of step 6, cannot be written"):
        run(*options, output="disk/part")
    part = small_disk / "part"
    kept = checkpoints(part / "checkpoints")
    assert [path.name for path in kept] == ["step_1", "step_2"]
    assert all(damage(path) is None for path in kept)
    assert not list((part / "checkpoints").glob(".step_*"))
    assert len(metrics_of(part)) == 6
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    _, printed = run(*options, output="disk/part", resume=True)
    assert "resumed from" in printed
    assert_same_run(whole, part, 6)


def test_metrics_that_cannot_be_written_are_told(run: Any, small_disk: Path) -> None:
    options = [*QUICK, "checkpoint.every=2", "trainer.schedule=constant"]
    folder, _ = run(*options, "trainer.steps=4", output="disk/part")
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(TepoError, match=r"cannot be written: No space left on device; make room"):
        run(*options, output="disk/part", resume=True)
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    run(*options, output="disk/part", resume=True)
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 7))
