"""A recipe as overrides of verl's configuration: every key has a counterpart, or an error that names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tepo.config.recipe import Recipe
from tepo.errors import TepoError
from tepo.integrations.verl.settings import obstacle, verl_name

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, SCORE = "actor_rollout_ref.model", "reward.custom_reward_function"
LOSS_CONFIG = "tepo.integrations.verl.losses.ObjectiveLossConfig"
SCORE_MODULE = "pkg://tepo.integrations.verl.score"

WITHOUT_COUNTERPART = {
    "model.revision": "verl loads a hub id as it is: download the revision and name its folder",
    "rollout.batch_size": "vLLM packs responses by itself",
    "rollout.cache_tokens": "vLLM's cache takes rollout.vllm_memory of the device",
    "rollout.save_tokens": "verl keeps no tokens of its rollouts",
    "rollout.vllm_server": "verl starts vLLM by itself",
    "rollout.stop": "verl ends responses at end tokens alone",
    "reward.missing_end": "verl's reward function does not learn whether a response ended",
    "reward.process": "verl has no process rewards",
    "evaluation.save_every": "verl writes a validation when it is complete",
    "trainer.critic_learning_rate": "no objective that trains a critic runs in verl",
    "trainer.max_sampling_rounds": "verl samples until the batch is full",
    "trainer.stop_without_signal": "verl does not stop for it",
    "trainer.overlong_filtering": "verl keeps truncated responses in the loss; reward.overlong punishes them",
}
"""Keys that must be left at their default, and why."""

Pairs = Iterator[tuple[str, Any]]


def verl_overrides(recipe: Recipe) -> list[str]:
    """`key=value` for `python -m verl.trainer.main_ppo`; the data are the Parquet files that `data_files` names.

    Raises TepoError naming each key that verl has no counterpart for.
    """
    faults = [
        f"{key} = {_value(recipe, key)!r}: {why}" for key, why in WITHOUT_COUNTERPART.items() if _set(recipe, key)
    ]
    faults += [fault for check in _CHECKS for fault in check(recipe)]
    if faults:
        raise TepoError("\n".join(["the recipe cannot run in verl:", *(f"  {fault}" for fault in faults)]))
    pairs = [pair for section in _SECTIONS for pair in section(recipe)]
    return [f"{key}={hydra(value)}" for key, value in pairs] + list(recipe.verl.overrides)


def data_files(recipe: Recipe) -> tuple[Path, Path]:
    """Where the training and the held-out problems are written for verl."""
    folder = Path(recipe.output).absolute() / "data"
    return folder / "train.parquet", folder / "test.parquet"


def hydra(value: Any) -> str:
    """A value as the grammar of Hydra's overrides has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {hydra(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(hydra, value)) + "]"
    text = str(value)
    if "${" in text:
        raise TepoError(f"{text!r}: verl's configuration reads ${{...}} as an interpolation")
    if re.fullmatch(r"[A-Za-z_./][\w./:@-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    quoted = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)  # of backslashes, those before a quote count
    return "'" + re.sub(r"\\+$", lambda found: found[0] * 2, quoted) + "'"


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _set(recipe: Recipe, key: str) -> bool:
    return bool(_value(recipe, key) != _value(Recipe(), key))


def objective_options(recipe: Recipe) -> dict[str, Any]:
    """The options that the recipe gives its objective."""
    return dict(recipe.objective.model_extra or {})


def _rollouts(recipe: Recipe) -> int:
    return recipe.trainer.steps // recipe.trainer.updates_per_rollout


def _in_rollouts(recipe: Recipe, key: str) -> int:
    """A number of steps as the number of rollouts that verl counts in."""
    return int(_value(recipe, key)) // recipe.trainer.updates_per_rollout


# What a recipe says that verl cannot do, one line each.


def _check_model(recipe: Recipe) -> Iterator[str]:
    if recipe.model.name in ("embedded", "smollm2"):
        yield f"model.name = {recipe.model.name!r}: verl loads a folder or a hub id"
    if recipe.model.device not in ("auto", "cuda"):
        yield f"model.device = {recipe.model.device!r}: verl runs on GPUs; allowed: auto, cuda"
    if recipe.model.lora and not recipe.model.lora.alpha.is_integer():
        yield f"model.lora.alpha = {recipe.model.lora.alpha}: verl takes a whole number"


def _check_data(recipe: Recipe) -> Iterator[str]:
    if recipe.data.template not in ("auto", "chat"):
        yield f"data.template = {recipe.data.template!r}: verl asks by the model's chat template; allowed: chat"


def _check_objective(recipe: Recipe) -> Iterator[str]:
    objective = recipe.objective.build()
    if why := obstacle(objective):
        yield f"objective = {objective.name!r} needs {why}, which verl does not give: use tepo train"


def _check_reward(recipe: Recipe) -> Iterator[str]:
    limits, longest = recipe.reward.overlong, recipe.rollout.max_response_tokens
    if limits and limits.max_length < longest:
        yield (
            f"reward.overlong.max_length = {limits.max_length}: verl's punishment goes on growing beyond it; allowed "
            f"is rollout.max_response_tokens ({longest}) or more"
        )


def _check_sampling(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.engine != "vllm":
        yield f"rollout.engine = {rollout.engine!r}: verl samples with vLLM; allowed: vllm"
    longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    if rollout.vllm_max_length is not None and rollout.vllm_max_length < longest:
        yield f"rollout.vllm_max_length = {rollout.vllm_max_length}: a sequence may have {longest} tokens"
    if rollout.correction == "mask":
        yield "rollout.correction = 'mask': verl's denominators count what it leaves out; allowed: none, truncated"
    if rollout.correction == "truncated" and recipe.objective.build().advantage.needs:
        yield (
            f"rollout.correction = 'truncated': the advantages of objective {recipe.objective.name!r} are made of old "
            "scores, in a step of ours that verl's correction is no part of; allowed: none"
        )


def _check_trainer(recipe: Recipe) -> Iterator[str]:
    trainer, updates = recipe.trainer, recipe.trainer.updates_per_rollout
    if trainer.schedule == "linear":
        yield "trainer.schedule = 'linear': verl has constant and cosine"
    for key in ("trainer.steps", "trainer.warmup_steps", "evaluation.every", "checkpoint.every"):
        if (_value(recipe, key) or 0) % updates:
            yield f"{key} = {_value(recipe, key)}: verl counts in rollouts, of {updates} steps (updates_per_rollout)"
    responses = trainer.prompts_per_rollout * trainer.responses_per_prompt // updates
    ranks = recipe.verl.nodes * recipe.verl.gpus_per_node
    if ranks % recipe.verl.sequence_parallel:
        yield f"verl.sequence_parallel = {recipe.verl.sequence_parallel} does not divide the {ranks} GPUs"
    if ranks % recipe.verl.tensor_parallel:
        yield f"verl.tensor_parallel = {recipe.verl.tensor_parallel} does not divide the {ranks} GPUs"
    if responses % max(ranks // recipe.verl.sequence_parallel, 1):
        yield (
            f"trainer.prompts_per_rollout x responses_per_prompt / updates_per_rollout = {responses} responses: every "
            f"one of the {ranks // recipe.verl.sequence_parallel} ranks must get the same number in an update"
        )
    room = trainer.tokens_per_microbatch * recipe.verl.sequence_parallel
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    if room < longest:
        yield (
            f"trainer.tokens_per_microbatch = {trainer.tokens_per_microbatch}, on verl.sequence_parallel = "
            f"{recipe.verl.sequence_parallel} GPUs: a sequence may have {longest} tokens and is not cut"
        )


def _check_evaluation(recipe: Recipe) -> Iterator[str]:
    config = recipe.evaluation
    if config.greedy:
        yield "evaluation.greedy = True: verl validates in one way, and this is by samples; allowed: false"
    if not config.after and config.every is not None:
        yield "evaluation.after = False: verl validates after the last rollout wherever evaluation.every is set"


# The overrides, by section of the recipe.


def _objective(recipe: Recipe) -> Pairs:
    objective, options = recipe.objective.build(), objective_options(recipe)
    name = verl_name(recipe.objective.name)
    yield "trainer.v1.trainer_mode", "tepo"
    yield f"{ACTOR}.policy_loss._target_", LOSS_CONFIG
    yield f"{ACTOR}.policy_loss.loss_mode", name
    yield "algorithm.adv_estimator", name
    if options:
        yield f"+{ACTOR}.policy_loss.options", options
        yield "+algorithm.options", options
    yield f"{ACTOR}.calculate_entropy", "entropy" in objective.needs
    yield f"{ACTOR}.use_kl_loss", objective.needs_reference


def _model(recipe: Recipe) -> Pairs:
    model = recipe.model
    yield f"{MODEL}.path", model.name
    yield f"{MODEL}.trust_remote_code", model.trust_remote_code
    yield "data.trust_remote_code", model.trust_remote_code
    yield f"{MODEL}.enable_gradient_checkpointing", bool(model.gradient_checkpointing)
    yield f"{ACTOR}.strategy", "fsdp2"
    yield "critic.strategy", "fsdp2"  # never built; verl validates it beside the actor's
    if model.dtype == "fp32":
        precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        yield f"+{ACTOR}.fsdp_config.mixed_precision", precision
        yield f"{ROLLOUT}.dtype", "float32"
    if model.lora:
        yield f"{MODEL}.lora_rank", model.lora.rank
        yield f"{MODEL}.lora_alpha", int(model.lora.alpha)
        yield f"{MODEL}.target_modules", model.lora.targets
        yield f"{ROLLOUT}.load_format", "safetensors"


def _data(recipe: Recipe) -> Pairs:
    train, test = data_files(recipe)
    yield "data.train_files", str(train)
    yield "data.val_files", str(test)
    yield "data.max_prompt_length", recipe.data.max_prompt_tokens
    yield "data.filter_overlong_prompts", True
    yield "data.seed", recipe.seed
    yield f"{ACTOR}.data_loader_seed", recipe.seed
    yield f"{ACTOR}.fsdp_config.seed", recipe.seed
    yield f"{ROLLOUT}.seed", recipe.seed


def _reward(recipe: Recipe) -> Pairs:
    reward = recipe.reward
    yield f"{SCORE}.path", SCORE_MODULE
    yield f"{SCORE}.name", "compute_score"
    arguments: dict[str, Any] = {
        name: getattr(reward, name) for name in ("verifier", "correct", "wrong", "partial", "timeout", "memory_mb")
    }
    if reward.format is not None:
        arguments |= {"pattern": reward.format.pattern, "pattern_score": reward.format.score}
    for name, value in arguments.items():
        yield f"+{SCORE}.reward_kwargs.{name}", value
    if reward.workers != "auto":
        yield "reward.num_workers", reward.workers
    if reward.overlong:
        yield "reward.reward_manager.name", "dapo"
        buffer = {"enable": True, "len": reward.overlong.cache, "penalty_factor": 1.0, "log": True}
        yield "+reward.reward_kwargs.overlong_buffer_cfg", buffer
        yield "+reward.reward_kwargs.max_resp_len", reward.overlong.max_length


def _sampling(recipe: Recipe) -> Pairs:
    yield f"{ROLLOUT}.name", "vllm"
    yield f"{ROLLOUT}.n", recipe.trainer.responses_per_prompt
    yield f"{ROLLOUT}.temperature", recipe.rollout.temperature
    yield f"{ROLLOUT}.tensor_model_parallel_size", recipe.verl.tensor_parallel
    yield f"{ROLLOUT}.gpu_memory_utilization", recipe.rollout.vllm_memory
    yield f"{ROLLOUT}.max_model_len", recipe.rollout.vllm_max_length
    yield "data.max_response_length", recipe.rollout.max_response_tokens
    if recipe.rollout.correction == "truncated":
        yield "algorithm.rollout_correction.rollout_is", "token"
        yield "algorithm.rollout_correction.rollout_is_threshold", recipe.rollout.correction_cap


def _trainer(recipe: Recipe) -> Pairs:
    trainer, rollouts = recipe.trainer, _rollouts(recipe)
    yield "data.train_batch_size", trainer.prompts_per_rollout
    yield f"{ACTOR}.ppo_mini_batch_size", trainer.prompts_per_rollout // trainer.updates_per_rollout
    yield f"{ACTOR}.use_dynamic_bsz", True
    yield f"{ACTOR}.ppo_max_token_len_per_gpu", trainer.tokens_per_microbatch
    yield f"{ACTOR}.ulysses_sequence_parallel_size", recipe.verl.sequence_parallel
    yield f"{ACTOR}.fsdp_config.param_offload", recipe.verl.offload
    yield f"{ACTOR}.fsdp_config.optimizer_offload", recipe.verl.offload
    yield f"{ACTOR}.optim.lr", trainer.learning_rate
    yield f"{ACTOR}.optim.lr_scheduler_type", trainer.schedule
    yield f"{ACTOR}.optim.lr_warmup_steps", _in_rollouts(recipe, "trainer.warmup_steps")
    yield f"{ACTOR}.optim.weight_decay", trainer.weight_decay
    yield f"{ACTOR}.optim.betas", list(trainer.betas)
    yield f"{ACTOR}.optim.clip_grad", trainer.max_grad_norm
    if trainer.dynamic_sampling:
        yield "algorithm.filter_groups.enable", True
        yield "algorithm.filter_groups.metric", "acc"
    yield "trainer.total_training_steps", rollouts
    yield "trainer.total_epochs", rollouts  # as many as there could be: the steps end the run
    yield "trainer.nnodes", recipe.verl.nodes
    yield "trainer.n_gpus_per_node", recipe.verl.gpus_per_node


def _evaluation(recipe: Recipe) -> Pairs:
    config, rollouts = recipe.evaluation, _rollouts(recipe)
    temperature = recipe.rollout.temperature if config.temperature is None else config.temperature
    yield f"{ROLLOUT}.val_kwargs.do_sample", True
    yield f"{ROLLOUT}.val_kwargs.n", config.samples
    yield f"{ROLLOUT}.val_kwargs.temperature", temperature
    yield f"{ROLLOUT}.val_kwargs.top_p", config.top_p
    yield f"{ROLLOUT}.val_kwargs.top_k", config.top_k or -1
    yield "trainer.val_before_train", config.before
    every = None if config.every is None else _in_rollouts(recipe, "evaluation.every")
    yield "trainer.test_freq", every or (rollouts if config.after else -1)


def _run(recipe: Recipe) -> Pairs:
    folder = Path(recipe.output).absolute()
    every = None if recipe.checkpoint.every is None else _in_rollouts(recipe, "checkpoint.every")
    yield "trainer.save_freq", every or _rollouts(recipe)
    yield "trainer.max_actor_ckpt_to_keep", recipe.checkpoint.keep
    yield f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"]
    yield f"{ACTOR}.checkpoint.load_contents", ["model", "optimizer", "extra"]
    yield "trainer.default_local_dir", str(folder / "checkpoints")
    yield "trainer.rollout_data_dir", str(folder / "rollouts")
    yield "trainer.validation_data_dir", str(folder / "evaluations")
    yield "trainer.project_name", "tepo"
    yield "trainer.experiment_name", folder.name
    yield "trainer.logger", ["console", "tensorboard", *recipe.trackers]


_CHECKS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _check_model, _check_data, _check_objective, _check_reward, _check_sampling, _check_trainer, _check_evaluation,
)  # fmt: skip
_SECTIONS: tuple[Callable[[Recipe], Pairs], ...] = (
    _objective, _model, _data, _reward, _sampling, _trainer, _evaluation, _run,
)  # fmt: skip
