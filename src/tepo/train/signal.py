"""Steps that teach nothing: every response to a prompt earned the same, so that no advantage differs from 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tepo.errors import TepoError
from tepo.objectives import Objective


@dataclass
class SignalWatch:
    """limit: such steps in a row after which a run stops, or None. silent: how many there are by now."""

    objective: Objective
    limit: int | None
    silent: int = 0

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step. Raises TepoError at the limit."""
        self.silent = self.silent + 1 if self._teaches_nothing(metrics) else 0
        if self.silent == self.limit:
            right, wrong = metrics["groups/all_correct"], metrics["groups/all_wrong"]
            raise TepoError(
                f"trainer.stop_without_signal = {self.limit}: no reward to learn from in {self.silent} steps in a row, "
                f"up to step {metrics['step']:.0f}: all responses to a prompt earned the same (last rollout: "
                f"{right:.0%} of the prompts all right, {wrong:.0%} all wrong)"
            )

    def _teaches_nothing(self, metrics: Mapping[str, float]) -> bool:
        if metrics["active_tokens"] == 0:
            return True
        needs_difference = self.objective.advantage.relative_to_group
        return (
            needs_difference
            and not self.objective.surrogate.touches_zero_advantage
            and metrics["groups/zero_variance"] == 1
        )
