"""`tepo verl`: what a recipe becomes in verl's configuration, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tepo.config import Recipe, load_recipe, recipe_names
from tepo.config.data import FormatReward, OverlongPunishment
from tepo.config.recipe import LoraConfig
from tepo.errors import TepoError
from tepo.integrations.verl.overrides import WITHOUT_COUNTERPART, hydra, verl_overrides

RECIPES = [name for name in recipe_names() if name.startswith("tepo-")]

needs_verl = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("verl", "hydra", "ray")),
    reason="verl is not installed: .ci/differential has an environment with it",
)


def values(recipe: Recipe) -> dict[str, str]:
    return dict(override.split("=", 1) for override in verl_overrides(recipe))


def composed(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def test_there_are_recipes() -> None:
    assert {"tepo-qwen2.5-7b", "tepo-qwen3-14b", "tepo-8gpu"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_sizes_of_a_recipe_are_those_of_verl(name: str) -> None:
    recipe = load_recipe(name)
    found, trainer, actor = values(recipe), recipe.trainer, "actor_rollout_ref.actor"
    assert int(found["data.train_batch_size"]) == trainer.prompts_per_rollout == 64
    assert int(found["actor_rollout_ref.rollout.n"]) == trainer.responses_per_prompt == 8
    mini = int(found[f"{actor}.ppo_mini_batch_size"])
    assert trainer.prompts_per_rollout // mini == trainer.updates_per_rollout
    assert int(found["trainer.total_training_steps"]) * trainer.updates_per_rollout == trainer.steps
    assert int(found["trainer.save_freq"]) * trainer.updates_per_rollout == recipe.checkpoint.every
    assert int(found[f"{actor}.optim.lr_warmup_steps"]) * trainer.updates_per_rollout == trainer.warmup_steps
    assert float(found[f"{actor}.optim.lr"]) == trainer.learning_rate


@needs_verl
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "more",
    [[], ["objective=grpo", "objective.clip_high=0.28", "objective.ref_kl.beta=0.01", "model.lora.rank=8"]],
    ids=["as it is", "another objective"],
)
def test_verl_accepts_the_command(name: str, more: list[str]) -> None:
    """Hydra's composition, then the checks and dataclasses of verl's own entry point."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from tepo.integrations.verl.settings import check_actor, objective_of

    recipe = load_recipe(name, more)
    # verl rounds the rank of an adapter with a function of vLLM's, which is not here
    overrides = [o for o in verl_overrides(recipe) if not o.startswith("actor_rollout_ref.model.lora")]
    config = composed(overrides)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert not need_critic(config)
    assert need_reference_policy(config) == recipe.objective.build().needs_reference
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert objective_of(actor.policy_loss) == recipe.objective.build()
    assert objective_of({"loss_mode": config.algorithm.adv_estimator, "options": config.algorithm.get("options")}) == (
        recipe.objective.build()
    )
    check_actor(actor, objective_of(actor.policy_loss), whole_batch=True)
    assert tuple(actor.optim.betas) == recipe.trainer.betas
    assert actor.optim.clip_grad == recipe.trainer.max_grad_norm
    assert actor.fsdp_config.strategy == "fsdp2"
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.response_length == recipe.rollout.max_response_tokens
    assert config.reward.custom_reward_function.reward_kwargs.verifier == "auto"


@needs_verl
@pytest.mark.parametrize(
    "value",
    [
        "plain", "with space", "it's", r"back\slash", r"ends with \\"[:-1], r"\\boxed\{.+\}", "a=b", "[x]", "{y: 1}",
        "true", "null", "1e-6", "12", "comma,", "", "ü", "nan", "x#y", "'", r"\'", 0.1, 1e-6, -3, True, None,
        [1, "a b"],
        {"beta": 0.5, "target": "old", "none": None},
    ],
    ids=repr,
)  # fmt: skip
def test_values_survive_hydra(value: Any) -> None:
    config = composed([f"+probe={hydra(value)}"])
    assert config.probe == value
    assert type(config.probe) is type(value) or isinstance(value, list | dict)


CHANGED: dict[str, Any] = {
    "seed": 7, "output": "elsewhere", "objective.name": "grpo", "model.name": "Qwen/Qwen3-4B", "model.dtype": "fp32",
    "model.revision": "v2", "model.lora": LoraConfig(rank=4), "model.gradient_checkpointing": False,
    "model.trust_remote_code": True, "model.device": "cpu", "data.template": "plain", "data.max_prompt_tokens": 500,
    "reward.verifier": "exact", "reward.correct": 2.0, "reward.wrong": -1.0, "reward.partial": True,
    "reward.process": "my:process", "reward.missing_end": -10.0, "reward.format": FormatReward(),
    "reward.overlong": OverlongPunishment(), "reward.timeout": 2.0, "reward.memory_mb": 512, "reward.workers": 3,
    "rollout.max_response_tokens": 256, "rollout.temperature": 0.9, "rollout.batch_size": 8,
    "rollout.engine": "transformers", "rollout.cache_tokens": 512, "rollout.stop": ["x"],
    "rollout.save_tokens": 2, "rollout.vllm_server": "http://localhost:8000",
    "rollout.correction": "truncated",
    "rollout.correction_cap": 3.0, "rollout.vllm_memory": 0.3, "rollout.vllm_max_length": 9500, "trainer.steps": 800,
    "trainer.prompts_per_rollout": 128, "trainer.responses_per_prompt": 16, "trainer.updates_per_rollout": 2,
    "trainer.tokens_per_microbatch": 30000, "trainer.learning_rate": 2e-6, "trainer.critic_learning_rate": 1e-5,
    "trainer.warmup_steps": 16, "trainer.schedule": "cosine", "trainer.weight_decay": 0.1, "trainer.betas": (0.8, 0.9),
    "trainer.max_grad_norm": 0.5, "trainer.dynamic_sampling": True, "trainer.max_sampling_rounds": 3,
    "trainer.overlong_filtering": True, "evaluation.every": 160, "evaluation.samples": 3, "evaluation.temperature": 0.3,
    "evaluation.top_p": 0.7,
    "evaluation.top_k": 20, "evaluation.save_every": 3, "evaluation.greedy": True, "evaluation.before": False,
    "evaluation.after": False,
    "checkpoint.every": 240, "checkpoint.keep": 9, "verl.nodes": 2, "verl.gpus_per_node": 4, "verl.tensor_parallel": 4,
    "verl.sequence_parallel": 4, "verl.offload": True, "verl.overrides": ["trainer.x=1"],
    "trackers": ["wandb"],
}  # fmt: skip
"""Every key of a recipe with another value than that of tepo-qwen2.5-7b."""

BY_THE_DATA = {
    "data.name", "data.file", "data.test_file", "data.split", "data.test_split", "data.subset", "data.columns",
    "data.system", "data.instruction", "data.max_problems", "data.test_problems", "data.options",
}  # fmt: skip
"""Those that decide which problems are written as Parquet, and how they are asked."""

FIXED = {"rollout.top_p"}
"""One value is possible."""


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from keys(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.rpartition(".")
    if not section:
        return recipe.model_copy(update={name: value})
    part = getattr(recipe, section).model_copy(update={name: value})
    return recipe.model_copy(update={section: part})


@pytest.mark.parametrize("key", sorted(set(keys(Recipe)) - BY_THE_DATA - FIXED))
def test_no_key_is_dropped(key: str) -> None:
    """Changing a key changes the command, or is refused with the key's name."""
    recipe = load_recipe("tepo-qwen2.5-7b", ["rollout.correction=truncated"] if key.endswith("_cap") else [])
    other = changed(recipe, key, CHANGED[key])
    assert other != recipe
    try:
        assert verl_overrides(other) != verl_overrides(recipe)
    except TepoError as error:
        assert key in str(error)  # noqa: PT017
        refused = key in WITHOUT_COUNTERPART or key in ("model.device", "data.template")
        assert refused or key in ("rollout.engine", "evaluation.greedy", "evaluation.after")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.steps=1601"], ["trainer.steps = 1601", "8 steps"]),
        (["trainer.schedule=linear"], ["trainer.schedule", "cosine"]),
        (["objective=kl_cov"], ["kl_cov", "whole mini-batch"]),
        (["objective=policy_kl"], ["policy_kl", "adapts"]),
        (["objective=dpo"], ["dpo", "micro-batch"]),
        (["objective=ppo"], ["ppo", "values"]),
        (["objective.kl_mask.estimator=exact"], ["exact_kl"]),
        (["trainer.tokens_per_microbatch=9000"], ["trainer.tokens_per_microbatch = 9000", "9216"]),
        (["verl.gpus_per_node=7"], ["responses", "28 ranks"]),
        (["verl.tensor_parallel=3"], ["verl.tensor_parallel = 3"]),
        (
            ["reward.overlong.max_length=4096", "reward.overlong.cache=64"],
            ["reward.overlong.max_length = 4096", "8192"],
        ),
        (["model.name=embedded"], ["model.name", "folder"]),
        (["rollout.correction=mask"], ["rollout.correction", "denominators"]),
        (["objective=gtpo", "rollout.correction=truncated"], ["rollout.correction", "gtpo"]),
        (["rollout.vllm_max_length=9000"], ["rollout.vllm_max_length = 9000", "9216"]),
    ],
)
def test_faults_are_named(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(TepoError) as caught:
        verl_overrides(load_recipe("tepo-qwen2.5-7b", overrides))
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_dry_run_prints_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tepo", "verl", "tepo-8gpu", "trainer.learning_rate=3e-6", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m verl.trainer.main_ppo" in done.stdout
    assert "actor_rollout_ref.actor.optim.lr=3e-06" in done.stdout
    assert "note: " in done.stdout
    assert not list(tmp_path.iterdir())


def test_without_what_it_needs_it_says_so_before_it_writes(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("everything is installed")
    command = [sys.executable, "-m", "tepo", "verl", "tepo-8gpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: verl" in done.stderr
    assert "vllm" in done.stderr
    assert not list(tmp_path.iterdir())
