"""What `import verl` finds of ours, verl's advantages and rewards through us, and what is said of what is missing.

Runs where verl 0.9 is installed (.ci/differential).
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: .ci/differential has an environment with it")
pytest.importorskip("hydra", reason="hydra-core is not installed: .ci/differential has an environment with it")

from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from tepo.data.problem import Problem, TaskData
from tepo.errors import TepoError
from tepo.integrations.verl.losses import ObjectiveLoss, ObjectiveLossConfig, policy_loss
from tepo.integrations.verl.parquet import write_parquet
from tepo.integrations.verl.score import compute_score
from tepo.integrations.verl.settings import check_actor, obstacle, verl_names
from tepo.objectives import get_objective, list_objectives

MODES = sorted(verl_names())


def test_import_verl_finds_the_plugin() -> None:
    assert [point.value for point in entry_points(group="verl.plugins") if point.name == "tepo"] == [
        "tepo.integrations.verl.plugin"
    ]
    code = (
        "import verl, sys\n"
        "assert 'verl.trainer.ppo.core_algos' not in sys.modules, 'the plugin imports what only trainers need'\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn, get_adv_estimator_fn\n"
        "print(get_policy_loss_fn('tepo_dapo').__module__, get_adv_estimator_fn('tepo_gpg').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["tepo.integrations.verl.losses", "gpg"]


def test_the_trainer_is_registered_with_verls() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("transfer_queue")
    code = (
        "import verl\n"
        "from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls\n"
        "print(issubclass(get_trainer_cls('tepo'), PPOTrainerSync), get_trainer_cls('tepo').__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["True", "ObjectivePPOTrainer"]


def test_another_version_is_a_message_and_not_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """verl passes over errors of plugins in silence, so ours is logged too."""
    monkeypatch.setattr("tepo.integrations.versions.version", lambda _: "0.8.0")
    monkeypatch.delitem(sys.modules, "tepo.integrations.verl.plugin", raising=False)
    with caplog.at_level(logging.ERROR), pytest.raises(ImportError, match=r"0\.9\.x.*0\.8\.0"):
        importlib.import_module("tepo.integrations.verl.plugin")
    assert "0.8.0" in caplog.text


def test_every_objective_is_carried_or_has_a_reason() -> None:
    carried = {objective.name for objective in verl_names().values()}
    assert carried | {name for name in list_objectives() if obstacle(get_objective(name))} == set(list_objectives())
    assert {"tepo", "tepo_v1", "grpo", "dapo", "gspo", "gtpo", "grpo_s", "dr_grpo", "cispo", "gpg"} <= carried
    assert not carried & {"ppo", "prpo", "skpo", "dpo", "orpo", "kl_cov", "clip_cov", "forking_tokens", "aent"}


def actor(loss: PolicyLossConfig, **settings: Any) -> FSDPActorConfig:
    config = FSDPActorConfig(strategy="fsdp", rollout_n=3, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **settings)
    config.global_batch_info.update(dp_size=2, batch_num_tokens=40, global_batch_size=12, loss_scale_factor=None)
    return config


@pytest.mark.parametrize("mode", MODES)
def test_options_reach_the_objective(mode: str) -> None:
    objective = verl_names()[mode]
    if objective.advantage.name != "standardized":
        return
    config = ObjectiveLossConfig(loss_mode=mode, options={"advantage_epsilon": 0.5})
    from tepo.integrations.verl.settings import objective_of

    assert objective_of(config) == get_objective(objective.name, advantage_epsilon=0.5)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(6, 5, generator=generator)
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1], [4], [5], [2]])).long()
    return {
        "old_log_prob": old, "log_prob": old + 0.3 * torch.randn(6, 5, generator=generator), "response_mask": mask,
        "advantages": torch.randn(6, 1, generator=generator).expand(6, 5) * mask,
    }  # fmt: skip


def test_a_loss_without_counts_is_an_error() -> None:
    config = actor(PolicyLossConfig(loss_mode="tepo_dapo"))
    config.global_batch_info.clear()
    with pytest.raises(ValueError, match="batch_num_tokens"):
        policy_loss(**tensors(), config=config)


def test_a_policy_loss_is_the_share_of_a_rank() -> None:
    """Divided by the tokens of the whole mini-batch, times the ranks over which verl averages gradients."""
    given = tensors()
    loss, metrics = policy_loss(**given, config=actor(PolicyLossConfig(loss_mode="tepo_dapo")))
    ratio = (given["log_prob"] - given["old_log_prob"]).exp()
    advantages = given["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    assert float(loss) == pytest.approx(float(-(gain * given["response_mask"]).sum() / 40 * 2), rel=1e-5)
    assert metrics["actor/objective/clip_fraction"] > 0


@pytest.mark.parametrize(
    ("mode", "options", "settings", "whole", "named"),
    [
        ("tepo", {}, {}, False, ["old_entropy", "trainer.v1.trainer_mode=tepo"]),
        ("tepo_grpo", {}, {}, False, ["ref_logp", "trainer.v1.trainer_mode=tepo"]),
        ("tepo_dapo", {}, {"clip_ratio_high": 0.28}, False, ["clip_ratio_high", "options"]),
        ("tepo_dapo", {}, {"loss_agg_mode": "seq-mean-token-mean"}, True, ["loss_agg_mode"]),
        ("tepo", {}, {"entropy_coeff": 0.01}, True, ["entropy_coeff"]),
        ("tepo_dapo", {"clip_low": {"from": 0.1, "to": 0.2, "over": 5}}, {}, False, ["clip_low", "schedule"]),
    ],
)
def test_settings_without_effect_are_refused(
    mode: str, options: dict[str, Any], settings: dict[str, Any], whole: bool, named: list[str]
) -> None:
    config = actor(ObjectiveLossConfig(loss_mode=mode, options=options), **settings)
    objective = verl_names()[mode] if not options else get_objective(mode.removeprefix("tepo_"), **options)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_actor(config, objective, whole_batch=whole)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("options", [{"clip_lo": 0.1}, {"kl_mask": {"estimator": "exact"}}])
def test_wrong_options_are_refused_when_verl_reads_its_configuration(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"clip_low|exact_kl"):
        ObjectiveLossConfig(loss_mode="tepo", options=options)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("mode", "without", "key"),
    [
        ("tepo", "new entropy", "actor_rollout_ref.actor.calculate_entropy=True"),
        ("tepo", "entropy", "algorithm.rollout_correction.bypass_mode=False"),
        ("tepo_grpo", "ref_log_prob", "actor_rollout_ref.actor.use_kl_loss=True"),
    ],
)
def test_what_the_batch_lacks_is_named_with_verls_key(mode: str, without: str, key: str) -> None:
    lengths = [3, 2]
    whole = nested([torch.rand(n + 2) for n in lengths])
    response = {name: nested([torch.rand(n) for n in lengths]) for name in
                ("old_log_probs", "advantages", "entropy", "ref_log_prob")}  # fmt: skip
    response["response_mask"] = nested([torch.ones(n) for n in lengths])
    response["prompts"] = nested([torch.ones(2, dtype=torch.long) for _ in lengths])
    response["responses"] = nested([torch.ones(n, dtype=torch.long) for n in lengths])
    response.pop(without, None)
    data = TensorDict(response, batch_size=2)
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=5, global_batch_size=2)
    output = {"log_probs": whole} | ({} if without == "new entropy" else {"entropy": whole})
    loss = ObjectiveLoss(verl_names()[mode], actor(ObjectiveLossConfig(loss_mode=mode)))
    with pytest.raises(ValueError, match=key):
        loss(model_output=output, data=data)


@pytest.mark.parametrize("mode", [mode for mode in MODES if not verl_names()[mode].advantage.needs])
def test_advantages_through_verl_are_ours(mode: str) -> None:
    """verl's compute_advantage with our estimator: groups in any order, a response alone, one without tokens."""
    from verl import DataProto

    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    objective = verl_names()[mode]
    uid = np.array(["b", "a", "b", "a", "a", "b", "alone", "pad"], dtype=object)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 0.0])
    lengths = torch.tensor([3, 1, 2, 3, 2, 1, 2, 0])
    mask = (torch.arange(3) < lengths[:, None]).long()
    scores = torch.zeros(8, 3)
    scores[torch.arange(7), lengths[:7] - 1] = rewards[:7]
    data = DataProto.from_dict({"token_level_rewards": scores, "response_mask": mask}, {"uid": uid})
    found = ray_trainer.compute_advantage(data, mode, config={}).batch["advantages"]
    groups = torch.tensor([0, 1, 0, 1, 1, 0, 2, 3])
    rows = torch.arange(6) if objective.advantage.relative_to_group else torch.arange(7)
    wanted = torch.zeros(8)
    wanted[rows] = objective.advantages(rewards[rows], groups[rows], lengths[rows])
    torch.testing.assert_close(found, wanted[:, None] * mask)


def test_advantages_of_old_scores_want_the_trainer() -> None:
    with pytest.raises(ValueError, match="trainer_mode=tepo"):
        core_algos.get_adv_estimator_fn("tepo_gtpo")(torch.ones(2, 2), torch.ones(2, 2), index=["a", "a"])


def test_the_trainers_own_advantages_and_marks() -> None:
    pytest.importorskip("transfer_queue")
    pytest.importorskip("ray")
    from tepo.integrations.verl.trainer import first_updates, token_advantages
    from tepo.objectives import TokenBatch

    mask = nested([torch.ones(n) for n in (1, 2, 3, 1, 2, 3, 1, 2)])
    assert [int(row[0]) for row in first_updates(mask, ranks=2, mini_batch=4).unbind()] == [1, 1, 0, 0, 1, 1, 0, 0]
    objective, generator = get_objective("gtpo"), torch.Generator().manual_seed(0)
    real = torch.arange(3) < torch.tensor([3, 2, 3, 1, 2])[:, None]
    old, entropy = -torch.rand(5, 3, generator=generator), torch.rand(5, 3, generator=generator)
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    data = TensorDict(
        {"response_mask": real.long(), "old_log_probs": old, "entropy": entropy,
         "rm_scores": torch.zeros(5, 3).index_fill(1, torch.tensor([0]), 1.0) * rewards[:, None]}, batch_size=5,
    )  # fmt: skip
    batch = TokenBatch.from_padded(old, old, real, rewards=rewards, groups=groups, old_entropy=entropy)
    found = token_advantages(objective, data, groups)
    torch.testing.assert_close(found[real], objective.token_advantages(batch))
    assert not found[~real].any()


def test_compute_score_is_the_verdict_priced() -> None:
    right, wrong = r"so it is \boxed{\frac{1}{2}}", r"so it is \boxed{3}"
    assert compute_score("math", right, "0.5") == {"score": 1.0, "acc": 1.0, "status": "correct"}
    assert compute_score("math", wrong, "0.5", {}, wrong=-1.0) == {"score": -1.0, "acc": 0.0, "status": "wrong"}
    shaped = compute_score("math", wrong, "0.5", pattern=r"\\boxed\{.+\}", pattern_score=0.25)
    assert shaped["score"] == 0.25
    assert compute_score("math", "", "0.5")["status"] == "no_answer"
    assert compute_score("x", "7.0", "7", {"verifier": "exact"})["acc"] == 0.0
    assert compute_score("x", "7", "7", {"id": "a", "problem": "?", "info": "{}"}, verifier="exact")["acc"] == 1.0


def test_verl_reads_the_problems(tmp_path: Path) -> None:
    """Through verl's own data set, with a chat template."""
    rl_dataset = pytest.importorskip("verl.utils.dataset.rl_dataset")
    from omegaconf import OmegaConf

    from tepo.config.recipe import ModelConfig
    from tepo.policy import load_model

    _, tokenizer = load_model(ModelConfig())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    problems = [Problem(f"p{i}", f"{i}+{i}=", str(2 * i), {"level": i}) for i in range(5)]
    task = TaskData("sums", problems[:3], problems[3:], "math", instruction="Box it.", system="Add.")
    train, test = write_parquet(task, tmp_path)
    config = OmegaConf.create({"max_prompt_length": 64, "filter_overlong_prompts": False, "cache_dir": str(tmp_path)})
    dataset = rl_dataset.RLHFDataset([str(train)], tokenizer, config)
    assert len(dataset) == 3
    row = dataset[2]
    assert row["raw_prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+2=\nBox it."},
    ]
    assert row["reward_model"]["ground_truth"] == "4"
    assert row["data_source"] == "sums"
    assert compute_score("sums", r"\boxed{4}", row["reward_model"]["ground_truth"], row["extra_info"])["acc"] == 1.0
    assert len(rl_dataset.RLHFDataset([str(test)], tokenizer, config)) == 2


def test_what_verl_cannot_ask_is_refused(tmp_path: Path) -> None:
    problem = Problem("p", "1+1=", "2")
    with pytest.raises(TepoError, match=r"data\.template"):
        write_parquet(TaskData("sums", [problem], [problem], "math", template="plain"), tmp_path)
    odd = Problem("p", "1+1=", "2", {"x": object()})
    with pytest.raises(TepoError, match="sums"):
        write_parquet(TaskData("sums", [odd], [odd], "math"), tmp_path)
