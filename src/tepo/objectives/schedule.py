"""Options that change over a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """From `start` in the first rollout to `end` in rollout number `over`, in equal steps, and constant afterwards.

    HoelderPO (2605.12058): p from 2 to -2 over 500 rollouts.
    """

    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                raise ValueError(f"a schedule runs from {self.start!r} to {self.end!r}; two numbers are wanted")
        if isinstance(self.over, bool) or not isinstance(self.over, int) or self.over < 1:
            raise ValueError(f"a schedule is over {self.over!r} rollouts; a whole number above 0 is wanted")

    def at(self, rollout: int) -> float:
        """The value in a rollout; the first is 1."""
        if rollout < 1:
            raise ValueError(f"rollout {rollout}: the first is 1")
        if rollout >= self.over:
            return self.end
        return self.start + (self.end - self.start) * (rollout - 1) / (self.over - 1)
