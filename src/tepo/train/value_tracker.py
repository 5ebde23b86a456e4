"""What responses to each prompt have earned so far: a running value that forgets as the policy moves (SKPO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HALF_LIFE = 8.0
"""Nats of divergence after which what was known of a prompt counts half."""
LEAST_KEPT, MOST_KEPT = 0.875, 0.96


@dataclass
class Estimate:
    """value: of the rewards. weight: how many observations it is worth. moved: nats, where the policy was by then."""

    value: float
    weight: float
    moved: float


class ValueTracker:
    """V <- V + eta (R - V) with eta = 1/(rho N + 1), rho = clip(2^(-KL/8), .875, .96) and N <- rho N + 1 (2604.08690).

    KL is how far the policy has moved since the prompt was last seen, in nats a response: the divergences of the
    rollouts between, added up (`moved`). A prompt never seen has the mean of those that were.
    """

    def __init__(self) -> None:
        self.estimates: dict[str, Estimate] = {}
        self.moved = 0.0

    def baseline(self, problem: str) -> float | None:
        """What responses to a problem (its id) are expected to earn; None before anything is known."""
        if problem in self.estimates:
            return self.estimates[problem].value
        if not self.estimates:
            return None
        return sum(estimate.value for estimate in self.estimates.values()) / len(self.estimates)

    def update(self, problem: str, reward: float) -> None:
        """A group's mean reward was seen."""
        known = self.estimates.get(problem, Estimate(reward, 0.0, self.moved))
        kept = min(max(2.0 ** ((known.moved - self.moved) / HALF_LIFE), LEAST_KEPT), MOST_KEPT)
        weight = kept * known.weight + 1
        self.estimates[problem] = Estimate(known.value + (reward - known.value) / weight, weight, self.moved)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"moved": self.moved, "estimates": {key: asdict(value) for key, value in self.estimates.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.moved = state["moved"]
        self.estimates = {key: Estimate(**value) for key, value in state["estimates"].items()}
