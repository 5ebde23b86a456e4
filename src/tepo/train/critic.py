"""The critic of PPO: what a response is expected to earn, seen from before each of its tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tepo.policy import Policy, Row


class Critic:
    """A copy of the policy's decoder with one output, trained beside the policy with an optimizer of its own.

    Its output starts at 0: the advantages of the first rollout are those of the rewards alone. It takes as much memory
    for weights, gradients and optimizer state as the policy; of a policy with adapters, the copy's adapters are
    trained.
    """

    def __init__(self, policy: Policy, learning_rate: float, betas: tuple[float, float]) -> None:
        self.policy = policy
        self.decoder: Any = copy.deepcopy(policy.base.get_decoder())
        weights = next(self.decoder.parameters())
        self.output = nn.Linear(_width(policy), 1, device=weights.device, dtype=weights.dtype)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(list(self.trained.values()), learning_rate, betas=betas, weight_decay=0.0)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        parts = {"decoder": self.decoder, "output": self.output}
        named = ((f"{part}.{name}", p) for part, module in parts.items() for name, p in module.named_parameters())
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def values(self, rows: Sequence[Row]) -> Tensor:
        """[N] of the response tokens of `rows`, row after row, each from what stands before the token."""
        with self.policy.precision():
            hidden, _ = self.policy.hidden_states(rows, self.decoder)
        return self.output(hidden.to(self.output.weight.dtype)).squeeze(-1)  # type: ignore[no-any-return]

    def step(self, scale: float, max_grad_norm: float) -> float:
        """One optimizer step at `scale` times its learning rate. -> the norm of its gradient, before clipping.

        A step whose gradient is not finite is skipped.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), max_grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = scale * self.learning_rate
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values: its trained weights and its optimizer."""
        return {
            "weights": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def _width(policy: Policy) -> int:
    """D, of the states that the output layer reads."""
    return int(policy.model.config.get_text_config().hidden_size)
