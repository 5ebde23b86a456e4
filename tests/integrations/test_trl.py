"""ObjectiveTrainer: the steps of TRL's own trainer, with the loss and the gradients of ours.

Runs where TRL 1.16 is installed (.ci/differential).
"""

from __future__ import annotations

import dataclasses
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
from tepo.integrations.trl import ObjectiveTrainer
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
