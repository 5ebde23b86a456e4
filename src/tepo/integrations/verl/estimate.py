"""What a run on a cluster takes, before it is started: memory of a GPU and seconds of a rollout with its updates.

Bytes are counted; seconds follow from operations and bytes with two shares of what a device can do, MFU and BANDWIDTH,
set once by two published runs (tests/integrations/test_verl_estimate.py), which come out within a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.config.recipe import Recipe

MFU = 0.3
"""Share of the peak operations a second that training and scoring reach."""

BANDWIDTH = 0.4
"""Share of the peak memory bandwidth that decoding reaches."""

STATE_BYTES = 16
"""For each trained parameter: fp32 weight, gradient and two moments of Adam (ZeRO, 1910.02054, has 16 too)."""

LOGIT_BYTES = 12
"""For each token and word of the vocabulary: bf16 logits and their gradient, fp32 softmax and its gradient."""

LAYER_BYTES = 34
"""For each token and hidden unit of the one layer that is recomputed, without attention scores (2205.05198, eq. 2)."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a decoder, as in its config.json; parameters: all weights."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def cache_bytes(self) -> int:
        """Of the key-value cache in bf16, a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Device:
    """A GPU: dense bf16 operations a second, bytes a second and bytes of its memory."""

    flops: float
    bandwidth: float
    memory: float


H100 = Device(flops=989e12, bandwidth=3.35e12, memory=80e9)

SHAPES = {
    "Qwen/Qwen2.5-7B": ModelShape(7.62e9, 28, 3584, 4, 128, 152064),
    "Qwen/Qwen3-14B-Base": ModelShape(14.77e9, 40, 5120, 8, 128, 151936),
}
"""Of the models of our recipes."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU while it trains: `state` (sharded), `activations`, `logits`. Tokens that vLLM has room for."""

    state: float
    activations: float
    logits: float
    cache_tokens: float

    @property
    def training(self) -> float:
        return self.state + self.activations + self.logits


@dataclass(frozen=True)
class Seconds:
    """Of one rollout and its updates: sampling, scores of the old (and the reference) policy, training."""

    sampling: float
    scoring: float
    training: float

    @property
    def total(self) -> float:
        return self.sampling + self.scoring + self.training


def memory(shape: ModelShape, recipe: Recipe, device: Device) -> Memory:
    """Memory of a GPU of the recipe's cluster under full sharding (FSDP), bf16 arithmetic and full fine-tuning.

    With `verl.offload` the state lies in the machine's memory while vLLM samples, and is back on the GPU for training.
    """
    ranks = recipe.verl.nodes * recipe.verl.gpus_per_node
    tokens = recipe.trainer.tokens_per_microbatch
    layer = LAYER_BYTES * tokens * shape.hidden
    kept = 2 * tokens * shape.hidden * shape.layers if recipe.model.gradient_checkpointing else layer * shape.layers
    gathered = 2 * 2 * shape.parameters / shape.layers  # two layers in bf16: the one at work and the next
    state = STATE_BYTES * shape.parameters / ranks
    room = recipe.rollout.vllm_memory * device.memory - 2 * shape.parameters / recipe.verl.tensor_parallel
    return Memory(
        state + gathered,
        kept + layer,
        LOGIT_BYTES * tokens * shape.vocabulary,
        max(room, 0) * recipe.verl.tensor_parallel / shape.cache_bytes,
    )


def seconds(shape: ModelShape, recipe: Recipe, device: Device, prompt: float, response: float) -> Seconds:
    """Time of one rollout with its updates, given mean numbers of tokens of prompts and responses.

    Decoding reads the weights once a token of the longest response, and the cache of every response: half its final
    length on average. Rewards, moving weights, checkpoints and waiting are not counted.
    """
    ranks = recipe.verl.nodes * recipe.verl.gpus_per_node
    responses = recipe.trainer.prompts_per_rollout * recipe.trainer.responses_per_prompt
    tokens = responses * (prompt + response)
    cluster = ranks * device.flops * MFU
    engines = ranks / recipe.verl.tensor_parallel
    reading = device.bandwidth * BANDWIDTH * recipe.verl.tensor_parallel
    weights = recipe.rollout.max_response_tokens * 2 * shape.parameters / reading
    cache = responses / engines * shape.cache_bytes * response * (prompt + response / 2) / reading
    passes = 2 + 2 * recipe.objective.build().needs_reference
    backward = 8 if recipe.model.gradient_checkpointing else 6
    return Seconds(
        weights + cache, passes * shape.parameters * tokens / cluster, backward * shape.parameters * tokens / cluster
    )


def summary(recipe: Recipe, device: Device = H100) -> str:
    """One line for a recipe of a known model: memory, and seconds if all responses are of full length."""
    shape = SHAPES.get(recipe.model.name)
    if shape is None or recipe.model.lora or recipe.model.dtype != "bf16":
        return f"no estimate: they are for full fine-tuning in bf16 of {', '.join(SHAPES)}"
    space = memory(shape, recipe, device)
    most = seconds(shape, recipe, device, recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens)
    return (
        f"estimate for H100 of 80 GB: {space.training / 1e9:.0f} GB in training (state {space.state / 1e9:.0f}, "
        f"activations {space.activations / 1e9:.0f}, logits {space.logits / 1e9:.0f}); a rollout and its updates with "
        f"responses of full length {most.total:.0f} s (sampling {most.sampling:.0f}, scoring {most.scoring:.0f}, "
        f"training {most.training:.0f})"
    )
