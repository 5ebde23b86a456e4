"""Which checkpoint a run goes on from, and under which recipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SHORT, assert_same_run, files_of, metrics_of

from tepo.config import load_recipe
from tepo.errors import TepoError
from tepo.train import train
from tepo.train.checkpoint import (
    Retention,
    Snapshot,
    best_checkpoint,
    checkpoints,
    damage,
    prune,
    read_state,
    write_checkpoint,
)  # fmt: skip
from tepo.train.lock import FolderLock
from tepo.train.random_state import random_state, seed_all, set_random_state
from tepo.train.resume import recipe_to_resume
from tepo.train.writer import copy_state

QUICK = ["trainer.steps=6", "data.max_problems=200", "evaluation.before=false", "evaluation.after=false"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("model.safetensors", truncate, "bytes of"),
        ("trainer.safetensors", flip, "SHA-256"),
        ("trainer.json", Path.unlink, "is missing"),
        ("manifest.json", truncate, "cannot be read"),
    ],
    ids=["truncated", "changed", "missing", "manifest"],
)
def test_a_damaged_newest_checkpoint_is_passed_over(run: Any, name: str, harm: Any, said: str) -> None:
    whole, _ = run(*QUICK, "checkpoint.every=2", output="whole")
    part, _ = run(*QUICK, "checkpoint.every=2", output="part")
    harm(part / "checkpoints" / "step_6" / name)
    _, printed = run(*QUICK, "checkpoint.every=2", output="part", resume=True)
    assert "checkpoint step_6 is damaged" in printed
    assert said in printed
    assert "step_4" in printed
    assert "put aside as step_6.set_aside" in printed
    assert (part / "checkpoints" / "step_6.set_aside").is_dir()
    assert_same_run(whole, part, 6)


def test_the_diagnosis_of_a_resumed_run_knows_the_steps_before(run: Any) -> None:
    """Two rollouts of answers that are cut off are wanted for a warning: one of them before the checkpoint."""
    options = ["rollout.max_response_tokens=3", "trainer.schedule=constant", "evaluation.before=false",
               "evaluation.after=false"]  # fmt: skip
    warning = "warning: The reward is flat: every answer is wrong"
    folder, before = run(*options, "trainer.steps=6")
    _, after = run(*options, "trainer.steps=8", resume=True)
    assert (warning in before, warning in after) == (False, True)
    assert json.loads((folder / "data.json").read_text())["held_out"] == 16


def test_no_whole_checkpoint_at_all_is_an_error(run: Any) -> None:
    folder, _ = run(*QUICK)
    truncate(folder / "checkpoints" / "step_6" / "model.safetensors")
    with pytest.raises(TepoError, match=r"(?s)no whole checkpoint to resume from:.*step_6 is damaged"):
        run(*QUICK, resume=True)


def test_a_run_without_a_checkpoint_starts_again(run: Any) -> None:
    """It was killed before the first."""
    whole, _ = run(*QUICK, output="whole")
    part, _ = run(*QUICK, output="part")
    for path in (part / "checkpoints").iterdir():
        path.rename(path.with_name(".step_6.tmp"))
    _, printed = run(*QUICK, output="part", resume=True)
    assert "no checkpoint yet: it starts again from step 0" in printed
    assert_same_run(whole, part, 6)
    assert not (part / "checkpoints" / ".step_6.tmp").exists()


def test_a_named_checkpoint_is_gone_on_from(run: Any) -> None:
    whole, _ = run(*QUICK, "checkpoint.every=2", output="whole")
    part, _ = run(*QUICK, "checkpoint.every=2", output="part")
    _, printed = run(
        *QUICK, "checkpoint.every=2", output="part", resume=True, checkpoint=part / "checkpoints" / "step_2"
    )
    assert "resumed from" in printed
    assert "step_4 was put aside" in printed
    assert_same_run(whole, part, 6)


def test_changes_are_listed_allowed_and_recorded(run: Any) -> None:
    folder, _ = run(*QUICK, "trainer.steps=4")
    before = files_of(folder)
    with pytest.raises(
        TepoError, match=r"(?s)differs in:.*trainer.learning_rate: 0.0001 then, 0.5 now.*--allow-changes"
    ):
        run(*QUICK, "trainer.steps=4", "trainer.learning_rate=0.5", resume=True)
    assert files_of(folder) == before
    changed = [*QUICK, "trainer.learning_rate=1e-5", "objective=dapo", "trainer.schedule=constant"]
    run(*changed, resume=True, allow_changes=True)
    assert metrics_of(folder)[-1]["learning_rate"] == 1e-5
    assert load_recipe(folder / "config.yaml").objective.name == "dapo"
    resumed = json.loads((folder / "environment.json").read_text())["resumed"]
    assert resumed[0]["step"] == 4
    assert any("objective.name" in line for line in resumed[0]["changes"])
    with pytest.raises(TepoError, match=r"(?s)another value of:.*model\.name: .embedded. then"):
        run(*changed, "model=smollm2", resume=True, allow_changes=True)


def test_another_objective_drops_the_rest_of_a_rollout(run: Any) -> None:
    run(*QUICK, "trainer.steps=3", "trainer.schedule=constant")
    folder, printed = run(*QUICK, "trainer.schedule=constant", "objective=grpo", resume=True, allow_changes=True)
    assert "left of the rollout in use was dropped" in printed
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 7))


def test_other_data_start_anew(run: Any) -> None:
    run(*QUICK, "trainer.steps=4", "trainer.schedule=constant")
    folder, printed = run(*QUICK, "data.max_problems=100", "trainer.schedule=constant", resume=True, allow_changes=True)
    assert "its order starts anew" in printed
    assert len(metrics_of(folder)) == 6


def test_a_folder_names_its_run_and_its_recipe(run: Any, tmp_path: Path) -> None:
    folder, _ = run(*QUICK, "checkpoint.every=2", "seed=3")
    recipe, checkpoint = recipe_to_resume(folder, None, ["trainer.steps=9"])
    assert (recipe.seed, recipe.trainer.steps, recipe.output, checkpoint) == (3, 9, str(folder), None)
    recipe, checkpoint = recipe_to_resume(folder / "checkpoints" / "step_2", None, [])
    assert (recipe.output, checkpoint) == (str(folder), folder / "checkpoints" / "step_2")
    with pytest.raises(TepoError, match=r"model=.*without --resume"):
        recipe_to_resume(folder, None, ["output=elsewhere"])
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TepoError, match="a run folder, or its checkpoints/step_N, is wanted"):
            recipe_to_resume(place, None, [])


def test_a_folder_in_use_is_refused(run: Any, tmp_path: Path) -> None:
    folder, _ = run(*QUICK)
    lock = FolderLock(folder)
    lock.acquire()
    with pytest.raises(TepoError, match=rf"in use by another run \(process {os.getpid()} on "):
        run(*QUICK, resume=True)
    lock.release()
    run(*QUICK, resume=True)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    hold = (
        "import sys, time\nfrom pathlib import Path\nfrom tepo.train.lock import FolderLock\n"
        f"FolderLock(Path({str(tmp_path)!r})).acquire(); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(TepoError, match=f"process {process.pid}"):
        FolderLock(tmp_path).acquire()
    process.kill()
    process.communicate()
    FolderLock(tmp_path).acquire()


def test_another_footing_is_told(run: Any) -> None:
    folder, _ = run(*QUICK, "trainer.steps=4", "trainer.schedule=constant")
    environment = json.loads((folder / "environment.json").read_text())
    environment["torch_threads"] += 1
    (folder / "environment.json").write_text(json.dumps(environment))
    _, printed = run(*QUICK, "trainer.schedule=constant", resume=True)
    assert f"torch_threads: {environment['torch_threads']} then" in printed
    _, again = run(*QUICK, "trainer.schedule=constant", resume=True)
    assert "last bits" not in again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on(run: Any, tmp_path: Path, number: int) -> None:
    """As a user sees it: exit status 75, and a folder to resume."""
    options = [*SHORT, "trainer.steps=30", "data.max_problems=200", "evaluation.after=false"]
    whole, _ = run(*options, output="whole")
    command = [sys.executable, "-m", "tepo", "train"]
    process = subprocess.Popen([*command, *options, f"output={tmp_path / 'part'}"], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "part" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 75, said
    assert signal.Signals(number).name in said
    assert "is saved, --resume goes on from it" in said
    assert 0 < len(metrics_of(tmp_path / "part")) < 30
    train(recipe_to_resume(tmp_path / "part", None, [])[0], resume=True)
    assert_same_run(whole, tmp_path / "part", 30)


def test_a_signal_breaks_an_evaluation_off(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing of the run, may take long, and is made again."""
    from tepo.errors import Stopped
    from tepo.evaluate.session import Session

    options = ["trainer.steps=4", "data.max_problems=200", "evaluation.every=2"]
    whole, _ = run(*options, output="whole")
    evaluate, calls = Session.evaluate, []

    def interrupted(self: Session, **keywords: Any) -> Any:
        calls.append(keywords)
        if len(calls) == 3:  # the one at step 2, after two at step 0
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, **keywords)

    monkeypatch.setattr(Session, "evaluate", interrupted)
    with pytest.raises(Stopped, match="stopped after step 2 of 4"):
        run(*options, output="part")
    run(*options, output="part", resume=True)
    assert_same_run(whole, tmp_path / "part", 4)


def test_random_states_come_back() -> None:
    import random

    import numpy as np

    def drawn() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    seed_all(2**62 + 7)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    state = json.loads(json.dumps({key: value for key, value in random_state().items() if key in ("python", "numpy")}))
    state |= {"torch": random_state()["torch"], "cuda": []}
    first = drawn()
    drawn()
    set_random_state(state)
    assert drawn() == first


def saved(folder: Path, step: int, model: Any, tokenizer: Any, **metrics: float) -> Path:
    return write_checkpoint(folder, Snapshot(step, model, tokenizer, {"a": [torch.arange(3), None, 1.5]}, metrics))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    from models import character_tokenizer, tiny_model

    model, tokenizer = tiny_model(), character_tokenizer()
    for step, value in enumerate([0.1, 0.9, 0.3, 0.9, float("nan"), 0.2], start=9):
        saved(tmp_path, step, model, tokenizer, score=value)
    saved(tmp_path, 15, model, tokenizer)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step_{step}" for step in range(9, 16)]
    assert best_checkpoint(checkpoints(tmp_path), Retention(2, "score", True)) == tmp_path / "step_9"
    prune(tmp_path, Retention(2, "score"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_12", "step_14", "step_15"]
    state = read_state(tmp_path / "step_12")
    assert torch.equal(state["a"][0], torch.arange(3))
    assert state["a"][1:] == [None, 1.5]
    assert all(damage(path) is None for path in checkpoints(tmp_path))


def test_a_snapshot_does_not_change_with_the_run() -> None:
    tensor = torch.zeros(2)
    copied = copy_state({"a": [tensor]})
    tensor += 1
    assert torch.equal(copied["a"][0], torch.zeros(2))


@pytest.mark.parametrize("options", [[], ["model.lora.rank=4"]], ids=["full", "lora"])
def test_writing_in_the_background_changes_nothing(run: Any, options: list[str]) -> None:
    both = [*QUICK, "checkpoint.every=1", *options]
    a, _ = run(*both, "checkpoint.background=false", output="a")
    b, _ = run(*both, output="b")
    for step in range(1, 7):
        assert_same_run(a, b, step)
