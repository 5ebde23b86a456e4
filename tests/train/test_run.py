"""A run from start to end: what it leaves behind, that it can be repeated, and resumed exactly."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_run, metrics_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tepo.config import load_recipe
from tepo.errors import TepoError

FULL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def with_signal(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps in which some group was neither all right nor all wrong: the others score no token."""
    return [line for line in metrics if line["active_tokens"]]


def weights_of(folder: Path, step: int, name: str = FULL) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step}" / name)


def test_what_a_run_leaves_behind(run: Any) -> None:
    folder, printed = run("checkpoint.every=4", "evaluation.every=4")
    assert load_recipe(folder / "config.yaml").trainer.steps == 8
    assert {"packages", "command", "cpu_cores"} <= json.loads((folder / "environment.json").read_text()).keys()
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == list(range(1, 9))
    wanted = {
        "reward",
        "accuracy",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "kl_mask_fraction",
        "grad_norm",
        "mismatch",
    }
    assert all(wanted <= line.keys() for line in with_signal(metrics))
    evaluation = json.loads((folder / "eval.json").read_text())
    assert [entry["step"] for entry in evaluation["evaluations"]] == [0, 4, 8]
    assert evaluation["accuracy"] == evaluation["evaluations"][-1]["sampled"]["accuracy"]
    assert len((folder / "rollouts" / "rollout_000001.jsonl").read_text().splitlines()) == 32
    assert len((folder / "evaluations" / "step_000008_greedy.jsonl").read_text().splitlines()) == 16
    assert list(folder.rglob("events.out.tfevents.*"))
    assert not list(folder.rglob("*.tmp"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_4", "step_8"]
    assert "step 8/8" in printed
    assert "held-out accuracy" in printed
    assert "reward" in printed


def test_a_checkpoint_is_a_hugging_face_model(run: Any) -> None:
    folder, _ = run()
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step_8")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step_8")
    ids = tokenizer("345+678=", return_tensors="pt", add_special_tokens=False).input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=48, do_sample=False)[0], skip_special_tokens=True)
    assert text.startswith("345+678=")
    assert "####" in text


def test_training_changes_the_weights_and_the_same_seed_repeats_the_run(run: Any) -> None:
    first, _ = run(output="a")
    second, _ = run(output="b")
    assert_same_run(first, second, 8)
    other, _ = run("seed=1", output="c")
    assert metrics_of(first) != metrics_of(other)
    start = load_file(files("tepo") / "assets" / "embedded" / "model.safetensors")
    end = weights_of(first, 8)
    moved = [not torch.equal(end[key], value) for key, value in start.items()]
    assert all(moved)


@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (["trainer.dynamic_sampling=true", "trainer.schedule=cosine"], FULL),
        (["objective.kl_mask.estimator=exact", "objective.ref_kl=0.01", "trainer.overlong_filtering=true"], FULL),
        (["model.lora.rank=4", "objective.kl_mask.target=reference", "trainer.learning_rate=1e-3"], ADAPTER),
        (["objective=ppo"], FULL),
        (["objective=ppo", "model.lora.rank=4"], ADAPTER),
        (["objective=skpo", "data.max_problems=20"], FULL),
    ],
    ids=["full", "exact-kl", "lora", "critic", "critic-lora", "tracker"],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(run: Any, options: list[str], weights: str, stop: int) -> None:
    """In the middle of a rollout's updates, and at its boundary."""
    if stop != 5 and ("model.lora.rank=4" in options or "objective" in options[0].split("=")):
        pytest.skip("one stop is enough for the adapter, the critic and the tracker")
    whole, _ = run(*options, "checkpoint.every=1", "evaluation.every=3", output="whole")
    part = whole.parent / "part"
    shutil.copytree(whole, part)
    for step in range(stop + 1, 9):
        shutil.rmtree(part / "checkpoints" / f"step_{step}")
    # A line that a crash cut off in the middle.
    with (part / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    _, printed = run(*options, "checkpoint.every=1", "evaluation.every=3", output="part", resume=True)
    assert f"step_{stop}" in printed
    assert_same_run(whole, part, 8)


def test_a_run_is_never_written_over(run: Any) -> None:
    folder, _ = run("trainer.steps=4")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(TepoError, match=r"already holds a run.*--resume"):
        run("trainer.steps=4")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_refuses_another_recipe_and_names_the_difference(run: Any) -> None:
    run("trainer.steps=4")
    with pytest.raises(TepoError, match=r"(?s)differs in:.*trainer.learning_rate: 0.0001 then, 0.5 now"):
        run("trainer.steps=4", "trainer.learning_rate=0.5", resume=True)
    with pytest.raises(TepoError, match=r"objective\.name"):
        run("trainer.steps=4", "objective=dapo", resume=True)


def test_a_longer_run_can_follow_a_finished_one(run: Any) -> None:
    run("trainer.steps=4", "trainer.schedule=constant")
    folder, _ = run("trainer.steps=8", "trainer.schedule=constant", resume=True)
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 9))
    assert load_recipe(folder / "config.yaml").trainer.steps == 8


def test_a_longer_run_has_another_schedule(run: Any) -> None:
    """The rate of a schedule that falls depends on the number of steps: those that were made had another."""
    run("trainer.steps=4", "trainer.schedule=linear")
    with pytest.raises(TepoError, match=r"trainer\.steps: 4 then, 8 now"):
        run("trainer.steps=8", "trainer.schedule=linear", resume=True)
    folder, _ = run("trainer.steps=8", "trainer.schedule=linear", resume=True, allow_changes=True)
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 9))


def test_resume_without_a_run_says_so(run: Any) -> None:
    with pytest.raises(TepoError, match="holds no run, and so no checkpoint to resume from"):
        run(resume=True)


def test_only_the_newest_checkpoints_are_kept(run: Any) -> None:
    folder, _ = run("checkpoint.every=2", "checkpoint.keep=2")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_6", "step_8"]


@pytest.mark.parametrize("objective", ["tepo", "tepo_v1"])
def test_one_update_per_rollout_is_announced_as_degenerate(run: Any, objective: str) -> None:
    """Consequence 5 of the specification: the mask is empty, the ratio is 1, and the user is told."""
    folder, printed = run("trainer.updates_per_rollout=1", "trainer.steps=2", f"objective={objective}")
    assert "TEPO is then DAPO without clip-higher" in " ".join(printed.split())
    for line in with_signal(metrics_of(folder)):
        assert line["log_ratio_max"] == 0
        assert line["clip_fraction"] == 0
        assert line.get("kl_mask_fraction", 0) == 0


def test_several_updates_are_not_announced_and_the_mask_fills(run: Any) -> None:
    """The ratio is exactly 1 on the first mini-batch of a rollout and not on the second (torchforge PR 571)."""
    folder, printed = run("trainer.learning_rate=3e-4")
    assert "TEPO is then DAPO" not in " ".join(printed.split())
    metrics = metrics_of(folder)
    first, later = with_signal([metrics[0], metrics[4]]), with_signal([*metrics[1:4], *metrics[5:8]])
    assert first
    assert later
    for line in first:
        assert line["log_ratio_max"] == 0
        assert line["kl_mask_fraction"] == 0
    for line in later:
        assert line["log_ratio_max"] > 0
    assert any(line["kl_mask_fraction"] > 0 for line in later)


@pytest.mark.parametrize(
    "options",
    [
        ["objective=grpo"],
        ["objective=dr_grpo", "objective.length_normalizer=48"],
        ["objective=dapo", "trainer.dynamic_sampling=true"],
        ["objective=gspo"],
        ["objective=gspo_token"],
        ["objective=tepo_v1", "objective.ratio=sequence_token"],
        ["objective=tepo", "objective.kl_mask.normalizer=masked"],
        ["objective=tepo", "objective.kl_mask.entropy_test=first_order"],
        ["objective=tepo", "objective.kl_mask.estimator=exact", "objective.kl_mask.target=reference"],
        ["objective=tepo", "objective.entropy_bonus=0.001"],
        ["model.dtype=bf16"],
        ["model.gradient_checkpointing=true"],
        ["trainer.tokens_per_microbatch=200"],
    ],
    ids=" ".join,
)
def test_every_choice_trains(run: Any, options: list[str]) -> None:
    folder, _ = run(*options)
    metrics = metrics_of(folder)
    assert len(metrics) == 8
    assert all(line["skipped"] == 0 for line in metrics)
    assert any(line["grad_norm"] > 0 for line in metrics)
    if "objective=grpo" in options:
        assert metrics[0]["ref_kl"] < 1e-9
        assert metrics[-1]["ref_kl"] > metrics[0]["ref_kl"]
