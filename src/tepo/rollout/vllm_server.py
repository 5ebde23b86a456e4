"""A vLLM server, on this machine or another: prompts and weights go to it over HTTP.

The server is started by its user, with the part of ours that receives weights (`vllm_worker`) and with the routes for
development that vLLM keeps closed by default. Anyone who reaches these can change the server's weights: it belongs in
a network of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from torch import Tensor

from tepo.errors import TepoError
from tepo.policy import Policy
from tepo.rollout.engine import Response, Sampling, group_seeds
from tepo.rollout.vllm import merged_weights
from tepo.rollout.vllm_worker import packed

PART_BYTES = 2**26
"""Weights in one request; a larger tensor goes alone."""

CONNECTIONS = 256
"""Prompts under way at once; the server has its own limit and lets the others wait."""

START = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --logprobs-mode "
    "processed_logprobs --worker-extension-cls tepo.rollout.vllm_worker.WeightReceiver"
)


class VllmServer:
    """See Engine.

    url: such as http://gpu1:8000. max_length: longest prompt and response, in tokens. timeout: seconds that a
    connection may take, and that a prompt's responses or a part of the weights may.
    Raises TepoError when there is no server, or one that cannot be used.
    """

    def __init__(self, policy: Policy, url: str, max_length: int, timeout: float = 1800.0) -> None:
        self.policy, self.url = policy, url.rstrip("/")
        # A connection that cannot be made is tried again; what was sent once is not sent again.
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=30.0),
            limits=httpx.Limits(max_connections=CONNECTIONS),
            transport=httpx.HTTPTransport(retries=3, limits=httpx.Limits(max_connections=CONNECTIONS)),
        )
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="tepo-vllm")
        try:
            self.model = str(self._ask("GET", "/v1/models")["data"][0]["id"])
            self._dtype = self._checked_dtype(max_length)
            self.update_weights()
        except BaseException:
            self.close()
            raise

    def _checked_dtype(self, max_length: int) -> torch.dtype:
        settings = self._call("tepo_settings")[0]
        if settings["logprobs_mode"] != "processed_logprobs":
            raise self._error(f"gives {settings['logprobs_mode']}, not the log-probs it samples under")
        if settings["max_model_len"] < max_length:
            raise self._error(
                f"takes {settings['max_model_len']} tokens of prompt and response, and the run may have {max_length} "
                "(--max-model-len)"
            )
        dtype: torch.dtype = getattr(torch, settings["dtype"])
        return dtype

    def update_weights(self) -> None:
        """See Engine."""
        self._call("tepo_forget")
        for part in _parts(merged_weights(self.policy), self._dtype):
            self._call("tepo_receive", part)
        self._call("tepo_load")
        self._ask("POST", "/reset_prefix_cache")

    def close(self) -> None:
        """See Engine. The server goes on."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """See Engine; the same seed gives the same responses as long as rounding does not depend on the batch."""
        if not all(map(len, prompts)):
            raise ValueError("a prompt without tokens: there is nothing to predict the first token of a response from")
        seeds = group_seeds(prompts, seed)
        return list(
            self._threads.map(lambda i: self._group(prompts[i], count, sampling, seeds[i]), range(len(prompts)))
        )

    def _group(self, prompt: Sequence[int], count: int, sampling: Sampling, seed: int) -> list[Response]:
        different = 1 if sampling.temperature == 0 else count
        reply = self._ask(
            "POST",
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(prompt),
                "n": different,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": sampling.max_tokens,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(self.policy.end_tokens),
                "include_stop_str_in_output": True,
                "logprobs": 0,
                "return_token_ids": True,
                "seed": seed % 2**63,
            },
        )
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        return [_response(choice) for choice in choices] * (count // different)

    def _call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of every worker."""
        found: list[Any] = self._ask("POST", "/collective_rpc", {"method": method, "args": list(arguments)})["results"]
        return found

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._client.request(verb, path, json=body)
        except httpx.HTTPError as error:
            raise self._error(f"does not answer ({type(error).__name__}: {error})") from error
        if reply.status_code == 404:
            raise self._error(f"has no {path}")
        if reply.is_error:
            raise self._error(f"answers {path} with {reply.status_code}: {reply.text[:500]}")
        answer: dict[str, Any] = reply.json() if reply.content else {}
        return answer

    def _error(self, what: str) -> TepoError:
        return TepoError(f"rollout.vllm_server = {self.url} {what}; start it as: {START}")


def _response(choice: dict[str, Any]) -> Response:
    logps = tuple(float(logp) for logp in choice["logprobs"]["token_logprobs"])
    ids = tuple(int(token) for token in choice["token_ids"])
    if len(ids) != len(logps):
        raise ValueError(f"{len(ids)} token ids and {len(logps)} log-probs")
    return Response(ids, logps, choice["finish_reason"] == "stop")


def _parts(weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[str]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        # A copy: output and input embeddings may be one tensor, which safetensors refuses.
        sent = weight.to("cpu", dtype if weight.is_floating_point() else None, copy=True).contiguous()
        if part and size + sent.nbytes > PART_BYTES:
            yield packed(part)
            part, size = {}, 0
        part[name] = sent
        size += sent.nbytes
    yield packed(part)
