"""ObjectiveTrainer: the steps of TRL's own trainer, with the loss and the gradients of ours.

Runs where TRL 1.16 is installed (.ci/differential).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: .ci/differential has an environment with it")

from datasets import Dataset
from trl import GRPOConfig

from tepo.config.recipe import ModelConfig, TrainerConfig
from tepo.data import Problem
from tepo.data.arithmetic import generate
from tepo.integrations.trl import ObjectiveTrainer, verdict_reward
from tepo.integrations.versions import check_version
from tepo.objectives import Objective, get_objective
from tepo.policy import Policy, load_model
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.sample import Sample
from tepo.train.update import Updater

MASKED = {"kl_mask": {"beta": 0.5}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tepo": MASKED, "grpo": {}, "dapo": {}, "gspo": {}, "gtpo": {}, "cispo": {}, "luspo": {},
}  # fmt: skip


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that varies within every group: how far the sampled text gets."""
    return [float(len(completion)) + completion.count("1") for completion in completions]


def settings(folder: Path, **changed: Any) -> GRPOConfig:
    values = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "use_cpu": True, "bf16": False,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False,
        "disable_tqdm": True, "seed": 3, "num_iterations": 2, "steps_per_generation": 1, "max_steps": 4,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    return GRPOConfig(**{**values, **changed})


def problems() -> Dataset:
    train, _ = generate(0, train=64, test=1)
    return Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in train])


Make = Callable[..., ObjectiveTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(objective: str | Objective, options: dict[str, Any] | None = None, **changed: Any) -> ObjectiveTrainer:
        model, tokenizer = load_model(ModelConfig())
        return ObjectiveTrainer(
            model, changed.pop("reward", digits), settings(tmp_path / "trl", **changed), train_dataset=problems(),
            processing_class=tokenizer, objective=objective, options=options,
        )  # fmt: skip

    return made


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@dataclasses.dataclass
class Recorder:
    """What TRL's trainer was given in each micro-batch, and the gradient and weights of each optimizer step."""

    inputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def watch(self, trainer: ObjectiveTrainer) -> None:
        compute = trainer._compute_loss

        def computed(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            self.inputs.append({key: value.clone() for key, value in inputs.items() if torch.is_tensor(value)})
            loss = compute(model, inputs)
            self.losses.append(float(loss.detach()))
            return loss

        trainer._compute_loss = computed
        trainer.create_optimizer()
        step = trainer.optimizer.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.weights.append({k: v.clone() for k, v in trainer.model.state_dict().items()})
            self.gradients.append(gradients(trainer.model).clone())
            return step(*args, **kwargs)

        trainer.optimizer.step = stepped


def run(trainer: ObjectiveTrainer) -> Recorder:
    recorder = Recorder()
    recorder.watch(trainer)
    trainer.train()
    return recorder


def in_our_trainer(
    objective: Objective, inputs: dict[str, Any], weights: dict[str, torch.Tensor], first: bool
) -> tuple[float, Any]:
    """Loss and gradient of our own Updater on the tokens, old scores and advantages of a micro-batch of TRL's.

    first: the policy still is the one that sampled, and its own scores are the old ones, as our trainer has it.
    """
    model, tokenizer = load_model(ModelConfig())
    model.load_state_dict(weights)
    updater = Updater(
        Policy(model, tokenizer), objective, TrainerConfig(max_grad_norm=1e9, tokens_per_microbatch=60),
        reference=Policy(load_model(ModelConfig(), trainable=False)[0], tokenizer),
    )  # fmt: skip
    samples = []
    for row in range(len(inputs["completion_ids"])):
        kept, given = inputs["completion_mask"][row].bool(), inputs["prompt_mask"][row].bool()
        ids = tuple(inputs["completion_ids"][row][kept].tolist())
        advantages = inputs["advantages"][row]
        sample = Sample(
            Problem("", "", ""), int(inputs["groups"][row]), tuple(inputs["prompt_ids"][row][given].tolist()),
            Response(ids, (0.0,) * len(ids), True), Verdict(Status.CORRECT, 1.0), 0.0,
            advantage=float(advantages) if advantages.dim() == 0 else 0.0,
            old_logp=None if first else inputs["old_per_token_logps"][row][kept],
            old_entropy=None if first else inputs["old_entropies"][row][kept],
            ref_logp=inputs["ref_per_token_logps"][row][kept] if "ref_per_token_logps" in inputs else None,
            token_advantages=None if advantages.dim() == 0 else advantages[kept],
        )  # fmt: skip
        samples.append(sample)
    found: list[torch.Tensor] = []
    updater.optimizer.step = lambda *_: found.append(gradients(model).clone())  # type: ignore[method-assign, assignment]
    return updater.step(samples, 1e-3)["loss"], found[0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_of_trls_trainer_is_a_step_of_ours(make: Make, name: str) -> None:
    """The same tokens and weights: TRL's training step, first and second update of a rollout, against our Updater."""
    trainer = make(name, OBJECTIVES[name])
    recorder = run(trainer)
    assert len(recorder.gradients) == 4
    steps = zip(recorder.inputs, recorder.weights, recorder.gradients, recorder.losses, strict=True)
    for step, (inputs, weights, gradient, loss) in enumerate(steps):
        objective = get_objective(name, **OBJECTIVES[name])
        ours_loss, ours = in_our_trainer(objective, inputs, weights, first=step % 2 == 0)
        assert loss == pytest.approx(ours_loss, rel=1e-5, abs=1e-6)
        assert (gradient - ours).norm() <= 1e-5 * ours.norm()
    shown = [line for line in trainer.state.log_history if "objective/loss" in line]
    assert len(shown) == 4
    if name == "tepo":
        assert shown[0]["objective/kl_mask_fraction"] == 0
        assert shown[1]["objective/kl_mask_fraction"] > 0
        assert shown[1]["objective/log_ratio_max"] > 0


def weights_after(trainer: ObjectiveTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Beside how far they have come from where they started."""
    moved = distance(one, load_model(ModelConfig())[0].state_dict())
    assert 1e-4 < moved < 1
    assert distance(one, other) < 1e-4 * moved


@pytest.mark.parametrize("name", ["tepo", "dapo", "grpo", "gspo"])
def test_accumulation_changes_nothing(make: Make, name: str) -> None:
    """One micro-batch of 8 or four of 2, two updates a rollout: the same weights after four steps (SGD)."""
    common: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.03}
    whole = weights_after(make(name, **common))
    parts = weights_after(
        make(name, **common, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4)
    )
    assert_same_weights(whole, parts)


def test_a_window_smaller_than_a_generation_counts_its_own_tokens(make: Make) -> None:
    """Four micro-batches generated at once, two to an optimizer step: each step is divided by its own tokens."""
    trainer = make(
        "dapo", per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=1,
        reward=ragged,
    )  # fmt: skip
    counted: list[tuple[int, int]] = []
    compute = trainer._compute_loss

    def computed(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        assert trainer._window_totals is not None
        counted.append((trainer._window_totals.tokens, int(inputs["completion_mask"].sum())))
        return compute(model, inputs)

    trainer._compute_loss = computed
    trainer.train()
    steps = [counted[i : i + 2] for i in range(0, len(counted), 2)]
    assert len(steps) == 4
    for step in steps:
        assert {total for total, _ in step} == {sum(tokens for _, tokens in step)}


def ragged(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """A group split over two processes (gloo), unequal lengths: the weights of one process with all of it."""
    script = Path(__file__).with_name("trl_processes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = []
    for processes in (1, 2):
        target = tmp_path / f"{processes}.pt"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launch, str(script), str(target), str(8 // processes)]
        subprocess.run(command, check=True, env=environment, timeout=300, capture_output=True)
        found.append(torch.load(target, weights_only=True))
    assert_same_weights(found[0], found[1])


@pytest.mark.parametrize(
    ("objective", "changed", "message"),
    [
        ("ppo", {}, r"objective ppo needs old_values, returns, values, which TRL's GRPOTrainer does not give"),
        ("dpo", {}, "objective dpo needs pairs of responses in one micro-batch"),
        ("aent", {}, "objective aent needs top_entropy"),
        ("tepo", {"epsilon": 0.3, "loss_type": "grpo"}, r"GRPOConfig\(loss_type, epsilon\) belong to TRL's own loss"),
        ("tepo", {"beta": 0.04}, r"GRPOConfig\(beta\) belong"),
        ("tepo", {"gradient_accumulation_steps": 3}, "gradient_accumulation_steps = 3: the tokens .* = 2"),
        (
            "kl_cov",
            {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
            "objective kl_cov looks at the whole optimizer step at once",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(make: Make, objective: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(objective, **changed)


def test_selections_and_schedules_and_adaptive_coefficients(make: Make) -> None:
    """KL-Cov chooses among all tokens of the step; an option moves with the rollouts; a coefficient with the steps."""
    trainer = make("kl_cov", {"share": 0.3, "policy_kl": {"beta": 1.0, "target": 1e-9}, "cov_kl": LINEAR})
    betas = []
    step = trainer._end_window

    def ended(mode: str) -> None:
        betas.append({term.name: term.beta for term in trainer.objective.terms})  # type: ignore[attr-defined]
        step(mode)

    trainer._end_window = ended
    trainer.train()
    assert [beta["cov_kl"] for beta in betas] == [1.0, 1.0, 3.0, 3.0]
    # Divergence 0 on the first update of a rollout halves the coefficient, anything on the second doubles it.
    assert [beta["policy_kl"] for beta in betas] == [1.0, 0.5, 1.0, 0.5]


LINEAR = {"from": 1, "to": 3, "over": 2}


def test_adaptive_coefficients_are_in_the_checkpoints(make: Make) -> None:
    options = {"policy_kl": {"beta": 1.0, "target": 1e-9}}
    trainer = make("dapo", options, save_strategy="steps", save_steps=3, max_steps=3)
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-3"
    other = make("dapo", options, max_steps=3)
    restored: list[dict[str, Any]] = []
    prepare = other._prepare_inputs

    def prepared(batch: Any) -> dict[str, Any]:
        restored.append(other.objective.state)
        return prepare(batch)

    other._prepare_inputs = prepared
    other.train(resume_from_checkpoint=str(folder))
    assert restored[0] == trainer.objective.state
    assert trainer.objective.state["policy_kl"]["beta"] == 0.5


def test_verdicts_as_a_reward_function() -> None:
    reward = verdict_reward("math", correct=1.0, wrong=-1.0, workers=1)
    completions = [r"so \boxed{\frac12}", [{"role": "assistant", "content": r"\boxed{3}"}], "no idea"]
    assert reward(["p"] * 3, completions, answer=["0.5", 4, "1"]) == [1.0, -1.0, -1.0]
    assert reward.__name__ == "verdict_math"
    with pytest.raises(ValueError, match=r"no column 'gold' .*; columns: answer"):
        verdict_reward("math", "gold", workers=1)(["p"], ["1"], answer=["1"])


def test_verdicts_reward_a_run(make: Make) -> None:
    trainer = make("tepo", reward=verdict_reward("exact", workers=1), max_steps=2, max_completion_length=40)
    trainer.train()
    assert any("rewards/verdict_exact/mean" in line for line in trainer.state.log_history)


def test_adapters_are_trained_against_the_model_without_them(make: Make, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokenizer = load_model(ModelConfig())
    trainer = ObjectiveTrainer(
        model, digits, settings(tmp_path / "lora"), train_dataset=problems(), processing_class=tokenizer,
        objective="grpo", peft_config=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    recorder = run(trainer)
    assert all("ref_per_token_logps" in inputs for inputs in recorder.inputs)
    first, last = recorder.inputs[0], recorder.inputs[-1]
    mask = first["completion_mask"].bool()
    torch.testing.assert_close(first["ref_per_token_logps"][mask], first["old_per_token_logps"][mask])
    assert not last["ref_per_token_logps"].allclose(last["old_per_token_logps"])


def test_another_version_of_trl_gives_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.integrations.versions.version", lambda _: "1.17.0")
    with pytest.raises(ImportError, match=r"tested with trl 1\.16\.x .* installed is 1\.17\.0"):
        check_version("trl", "1.16.")
