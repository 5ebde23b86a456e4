"""ObjectivePPOTrainer with a real TransferQueue and verl's actor worker: the steps that are ours, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: .ci/differential has an environment with it")
pytest.importorskip("ray", reason="Ray is not installed: .ci/differential has an environment with it")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: .ci/differential has it")

from test_verl_engine import MASKED, MINI_BATCH, ROUNDING, flat, free_port, in_our_trainer, rollout, settings

from tepo.config.recipe import ModelConfig
from tepo.objectives import TokenBatch, get_objective
from tepo.policy import load_model

CASES: dict[str, dict[str, Any]] = {"tepo": MASKED, "gtpo": {}}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    scratch = tmp_path_factory.mktemp("trainer")
    model, tokenizer = load_model(ModelConfig())
    model.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    given = {}
    for name, options in CASES.items():
        rows = rollout(name, options)
        for row in rows:
            row["scores"] = torch.zeros(len(row["response"]))
            row["scores"][-1] = float(row["response"].sum() % 7)
        mode = name if name == "tepo" else f"tepo_{name}"
        overrides = [
            *settings(scratch / "model", name, options), f"algorithm.adv_estimator={mode}",
            "trainer.v1.trainer_mode=tepo", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            # old scores from other micro-batches than the update's: equal up to rounding alone
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=400",
        ]  # fmt: skip
        given[name] = {"overrides": overrides, "rows": rows}
    torch.save(given, scratch / "given")
    env = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "TRANSFER_QUEUE_ENABLE": "1",
    }  # fmt: skip
    script = Path(__file__).with_name("verl_trainer_step.py")
    command = [sys.executable, str(script), str(scratch / "given"), str(scratch / "found")]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return given, torch.load(scratch / "found", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_verls_trainer(steps: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    """Old scores, advantages, marks and update: the gradients of our Updater, and a first update that is on policy."""
    given, found = steps
    rows, result, objective = given[name]["rows"], found[name], get_objective(name, **CASES[name])
    assert (result["mode"], result["buffer"]) == ("sync", "ReplayBuffer")
    kept = result["kept"]
    rewards = torch.tensor([float(row["scores"].sum()) for row in rows])
    groups = torch.tensor([row["group"] for row in rows])
    pad = {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in kept.items()}
    real = torch.nn.utils.rnn.pad_sequence([row["mask"] for row in rows], batch_first=True).bool()
    batch = TokenBatch.from_padded(
        pad["old_log_probs"], pad["old_log_probs"], real, rewards=rewards, groups=groups, old_entropy=pad["entropy"]
    )
    torch.testing.assert_close(pad["advantages"][real], objective.token_advantages(batch))
    for row, logp, entropy, advantages in zip(
        rows, kept["old_log_probs"], kept["entropy"], kept["advantages"], strict=True
    ):
        row |= {"old_log_probs": logp, "old_entropy": entropy, "advantages": advantages}
    assert result["metrics"]["objective/log_ratio_max"][0] == 0
    assert result["metrics"]["objective/log_ratio_max"][1] > 0
    if name == "tepo":
        assert result["metrics"]["objective/kl_mask_fraction"][0] == 0
        assert result["metrics"]["objective/kl_mask_fraction"][1] > 0
    for step, (weights, gradients) in enumerate(zip(result["weights"], result["gradients"], strict=True)):
        mini = rows[step * MINI_BATCH : (step + 1) * MINI_BATCH]
        loss, ours = in_our_trainer(name, CASES[name], mini, weights, fresh=step == 0)
        assert result["metrics"]["loss"][step] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert (flat(gradients) - flat(ours)).norm() <= ROUNDING[step] * flat(ours).norm()
