"""Estimates of memory and time against figures that others published."""

from __future__ import annotations

import pytest

from tepo.config import load_recipe
from tepo.integrations.verl.estimate import H100, SHAPES, ModelShape, memory, seconds

LLAMA_8B = ModelShape(8.03e9, 32, 4096, 8, 128, 128256)
QWEN3_32B = ModelShape(32.76e9, 64, 5120, 8, 128, 151936)


def test_state_is_that_of_the_zero_paper() -> None:
    """1910.02054, figure 1: 7.5 billion parameters, all of the state partitioned over 64 devices: 1.9 GB of 120 GB."""
    shape = ModelShape(7.5e9, 10**9, 1, 1, 1, 1)  # layers without weight: the figure counts no gathered layer
    recipe = load_recipe("tepo-8gpu", ["verl.nodes=8"])
    assert memory(shape, recipe, H100).state / 1e9 == pytest.approx(1.9, abs=0.05)
    alone = load_recipe("tepo-8gpu", ["verl.nodes=1", "verl.gpus_per_node=1"])
    assert memory(shape, alone, H100).state / 1e9 == pytest.approx(120, rel=0.01)


def test_the_cache_of_llama_is_128_kib_a_token() -> None:
    assert LLAMA_8B.cache_bytes == 128 * 1024


@pytest.mark.parametrize(
    ("shape", "nodes", "tensor_parallel", "tokens", "measured"),
    [(LLAMA_8B, 2, 1, 1060, 97.7), (QWEN3_32B, 4, 4, 3206, 393.0)],
    ids=["Llama-3.1-8B on 16 H100", "Qwen3-32B on 32 H100"],
)
def test_seconds_of_published_runs(
    shape: ModelShape, nodes: int, tensor_parallel: int, tokens: int, measured: float
) -> None:
    """NeMo RL 0.4, performance summary, GRPO on policy: 2048 responses a step, at most 4096 tokens, mean as given."""
    recipe = load_recipe(
        "tepo-8gpu",
        [
            f"verl.nodes={nodes}", f"verl.tensor_parallel={tensor_parallel}", "trainer.prompts_per_rollout=64",
            "trainer.responses_per_prompt=32", "rollout.max_response_tokens=4096",
        ],
    )  # fmt: skip
    found = seconds(shape, recipe, H100, prompt=100, response=tokens - 100)
    assert found.total == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("name", ["tepo-qwen2.5-7b", "tepo-qwen3-14b", "tepo-8gpu"])
def test_our_recipes_fit_gpus_of_80_gb(name: str) -> None:
    recipe = load_recipe(name)
    need = memory(SHAPES[recipe.model.name], recipe, H100)
    assert need.training < 0.85 * H100.memory
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    assert need.cache_tokens > 16 * longest


def test_estimates_scale_as_they_should() -> None:
    shape, recipe = SHAPES["Qwen/Qwen2.5-7B"], load_recipe("tepo-qwen2.5-7b")
    twice = load_recipe("tepo-qwen2.5-7b", ["verl.nodes=8", "trainer.updates_per_rollout=4"])
    assert seconds(shape, recipe, H100, 200, 3000).training == pytest.approx(
        2 * seconds(shape, twice, H100, 200, 3000).training
    )
    without = load_recipe("tepo-qwen2.5-7b", ["model.gradient_checkpointing=false"])
    assert memory(shape, without, H100).activations > 5 * memory(shape, recipe, H100).activations
    reference = load_recipe("tepo-qwen2.5-7b", ["objective=grpo"])
    assert seconds(shape, reference, H100, 200, 3000).scoring == 2 * seconds(shape, recipe, H100, 200, 3000).scoring
