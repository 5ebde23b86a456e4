"""What every rollout engine gives: responses as sampled, never as text that was tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tepo.seeds import derive_seed


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy; max_tokens counts the end token.

    top_p, top_k: only from the most likely tokens; 1 and 0 are all of them. stop: a response ends where its text
    (without special tokens) first contains one of these strings, as it does with an end token.
    """

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Response:
    """One response.

    ids: token ids as sampled, the end token included if there was one.
    logps: the log-prob of each id under the distribution sampled from, temperature applied (greedy: temperature 1).
    finished: it ended with an end token of the model or a stop string; otherwise it was cut off at max_tokens.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finished: bool

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""
        return "stop" if self.finished else "length"


class Engine(Protocol):
    """Samples responses to prompts with the weights of a policy."""

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """`count` responses to each prompt (token ids), in order.

        What is random in a response is decided by the seed, its prompt and its place among the responses to it, and by
        nothing else that is sampled in the same call.
        """
        ...

    def update_weights(self) -> None:
        """Sample with the policy's weights as they are now. To be called after they have changed."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""
        ...


def group_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """A seed for each prompt, from its tokens; a prompt that comes again gets another one."""
    seen: dict[tuple[int, ...], int] = {}
    seeds = []
    for prompt in map(tuple, prompts):
        seen[prompt] = seen.get(prompt, -1) + 1
        seeds.append(derive_seed(seed, "group", *prompt, "again", seen[prompt]))
    return seeds


def uniforms(group_seed: int, response: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): the random numbers of one response, one a token."""
    return np.random.Generator(np.random.Philox(key=[group_seed, response])).random(count)
