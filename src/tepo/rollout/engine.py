"""What every rollout engine gives: responses as sampled, never as text that was tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy; max_tokens counts the end token."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Response:
    """One response.

    ids: token ids as sampled, the end token included if there was one.
    logps: the log-prob of each id under the distribution sampled from, temperature applied (greedy: temperature 1).
    finished: it ended with one of the model's end tokens; otherwise it was cut off at max_tokens.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finished: bool

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""
        return "stop" if self.finished else "length"


class Engine(Protocol):
    """Samples responses to prompts."""

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """`count` responses to each prompt (token ids), in order; the same seed gives the same responses."""
        ...
