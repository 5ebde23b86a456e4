"""What a vLLM server runs in its workers, so that a run elsewhere can send it weights: `vllm_server.START`."""

from __future__ import annotations

import base64
from typing import Any

import safetensors.torch
from torch import Tensor


def packed(weights: dict[str, Tensor]) -> str:
    """Named weights as text: a safetensors file in base64."""
    return base64.b64encode(safetensors.torch.save(weights)).decode("ascii")


class WeightReceiver:
    """Mixed into vLLM's worker. Each method is called on every worker of the server; arguments are text."""

    def tepo_settings(self) -> dict[str, Any]:
        """What a client has to know: logprobs_mode, max_model_len, dtype."""
        config: Any = self.vllm_config.model_config  # type: ignore[attr-defined]
        return {
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "max_model_len": int(config.max_model_len),
            "dtype": str(config.dtype).removeprefix("torch."),
        }

    def tepo_receive(self, part: str) -> None:
        """Keep some of the weights until all have come."""
        self._tepo_weights = {**getattr(self, "_tepo_weights", {}), **safetensors.torch.load(base64.b64decode(part))}

    def tepo_load(self) -> None:
        """Sample with the weights that have come."""
        weights, self._tepo_weights = self._tepo_weights, {}
        self.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]

    def tepo_forget(self) -> None:
        """Drop what has come of an update that was never finished."""
        self._tepo_weights = {}
