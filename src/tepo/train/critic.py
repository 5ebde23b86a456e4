"""The critic of PPO: what a response is expected to earn, seen from before each of its tokens."""

from __future__ import annotations

import copy
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

    def clip(self, max_grad_norm: float) -> float:
        """Scale its gradient down to a norm. -> the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.trained.values(), max_grad_norm))

    def step(self, scale: float) -> None:
        """One optimizer step at `scale` times its learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = scale * self.learning_rate
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Its trained weights, by name, and the state of its optimizer."""
        return {
            "weights": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizer": optimizer_state(self.optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["weights"][name])
        load_optimizer_state(self.optimizer, state["optimizer"])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps of each parameter, by the parameter's number. Its settings come from the recipe."""
    return {str(number): dict(kept) for number, kept in optimizer.state_dict()["state"].items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `optimizer_state`."""
    kept = {int(number): value for number, value in state.items()}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})


def _width(policy: Policy) -> int:
    """D, of the states that the output layer reads."""
    return int(policy.model.config.get_text_config().hidden_size)
