"""The engine that a recipe names."""

from tepo.config.recipe import Recipe
from tepo.policy import Policy
from tepo.rollout.engine import Engine
from tepo.rollout.transformers import TransformersEngine, check_room


def open_engine(recipe: Recipe, policy: Policy, prompt_limit: int) -> Engine:
    """An engine that samples with a policy. prompt_limit: tokens of the longest prompt.

    Raises TepoError for one that is not installed or does not answer.
    """
    rollout = recipe.rollout
    if rollout.engine == "vllm":
        length = rollout.vllm_max_length or prompt_limit + rollout.max_response_tokens
        if rollout.vllm_server is not None:
            from tepo.rollout.vllm_server import VllmServer

            return VllmServer(policy, rollout.vllm_server, length)
        from tepo.rollout.vllm import VllmEngine

        return VllmEngine(policy, recipe.model.dtype, length, rollout.vllm_memory)
    return TransformersEngine(policy, rollout.batch_size, rollout.cache_tokens)


def check_engine(recipe: Recipe, longest: int) -> None:
    """Raise TepoError when the engine of a recipe cannot answer a prompt of `longest` tokens."""
    if recipe.rollout.engine == "transformers":
        check_room(recipe.rollout.cache_tokens, longest + recipe.rollout.max_response_tokens)
