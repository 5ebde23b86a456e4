"""The embedded engine: a decoding loop on the model that is trained, so that weights are never out of date."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tepo.errors import TepoError
from tepo.policy import Policy
from tepo.rollout.engine import Response, Sampling, group_seeds, uniforms
from tepo.rollout.grown import GrownDecoder
from tepo.rollout.probe import why_no_slots
from tepo.rollout.sampling import sample
from tepo.rollout.slots import SlotDecoder
from tepo.rollout.stop import StopStrings

PREFILL_TOKENS = 16384
"""Prompt tokens, padding included, that go through the model at once."""


class Decoder(Protocol):
    """Rows of tokens in, the hidden states [rows, D] that predict their next tokens out."""

    refills: bool

    def running(self) -> AbstractContextManager[None]: ...
    def admit(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor: ...
    def step(self, tokens: Sequence[int]) -> Tensor: ...
    def keep(self, rows: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class _Entry:
    """Responses that start together from one prompt: numbers first to first + count of those to prompt `index`."""

    index: int
    prompt: Sequence[int]
    first: int
    count: int


@dataclass
class _Row:
    """A response in the making."""

    index: int
    number: int
    uniforms: np.ndarray
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finished: bool = False


class TransformersEngine:
    """Decodes many responses at once. Rows that have ended leave at once, and those that wait take their places.

    batch_size: responses decoded at once, at most. cache_tokens: prompt and response tokens that the key-value cache
    has room for; as many responses are decoded at once as fit at full length.
    """

    def __init__(self, policy: Policy, batch_size: int = 256, cache_tokens: int = 2**17) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.cache_tokens = cache_tokens
        self._announced: set[str] = set()

    def update_weights(self) -> None:
        """See Engine: there is one copy of them."""

    def close(self) -> None:
        """See Engine: between two calls nothing is held."""

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """See Engine. Each prompt goes through the model once, its keys and values are copied to its responses.

        Raises TepoError when the cache has no room for one response.
        """
        responses: list[list[Response | None]] = [[None] * count for _ in prompts]
        if not prompts:
            return []
        if not all(map(len, prompts)):
            raise ValueError("a prompt without tokens: there is nothing to predict the first token of a response from")
        capacity = max(map(len, prompts)) + sampling.max_tokens
        check_room(self.cache_tokens, capacity)
        slots = min(self.batch_size, self.cache_tokens // capacity, len(prompts) * count)
        queue = _entries(prompts, count, slots)
        seeds = group_seeds(prompts, seed)
        decoder = self._decoder(slots, capacity)
        with self.policy.sampling(), decoder.running():
            for row in self._decode(decoder, queue, slots, sampling, seeds):
                responses[row.index][row.number] = Response(tuple(row.ids), tuple(row.logps), row.finished)
        return [[response for response in group if response is not None] for group in responses]

    def _decoder(self, slots: int, capacity: int) -> Decoder:
        reason = why_no_slots(self.policy, capacity)
        if reason is None:
            return SlotDecoder(self.policy, slots, capacity)
        if reason not in self._announced:
            self._announced.add(reason)
            warnings.warn(
                f"rollouts use transformers' own cache and attention, which is slower, since this model has {reason}",
                stacklevel=3,
            )
        return GrownDecoder(self.policy)

    def _decode(
        self, decoder: Decoder, queue: deque[_Entry], slots: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[_Row]:
        head, stop = self.policy.head, StopStrings(self.policy.tokenizer, sampling.stop)
        rows: list[_Row] = []
        done: list[_Row] = []
        while queue or rows:
            entries = _admissible(queue, slots, len(rows), decoder.refills)
            if entries:
                states = decoder.admit([entry.prompt for entry in entries], [entry.count for entry in entries])
                rows += [
                    _Row(entry.index, number, uniforms(seeds[entry.index], number, sampling.max_tokens))
                    for entry in entries
                    for number in range(entry.first, entry.first + entry.count)
                ]
            else:
                states = decoder.step([row.ids[-1] for row in rows])
            part = rows[len(rows) - len(states) :]
            random = torch.tensor(np.array([row.uniforms[len(row.ids)] for row in part]), device=states.device)
            tokens, logps = sample(head(states), sampling, random)
            for row, token, logp in zip(part, tokens.tolist(), logps.tolist(), strict=True):
                row.ids.append(token)
                row.logps.append(logp)
                row.finished = token in self.policy.end_tokens or stop.ends(row.ids)
            order = _survivors([not row.finished and len(row.ids) < sampling.max_tokens for row in rows])
            if len(order) < len(rows):
                staying = set(order)
                done += [row for i, row in enumerate(rows) if i not in staying]
                decoder.keep(order)
                rows = [rows[i] for i in order]
        return done


def check_room(cache_tokens: int, capacity: int) -> None:
    """Raise TepoError for a cache without room for a whole response to the longest prompt, `capacity` tokens."""
    if cache_tokens < capacity:
        raise TepoError(
            f"rollout.cache_tokens = {cache_tokens}: the longest prompt and rollout.max_response_tokens make "
            f"{capacity} tokens; the cache must have room for that many"
        )


def _entries(prompts: Sequence[Sequence[int]], count: int, slots: int) -> deque[_Entry]:
    """Groups by length of prompt. One that takes most of the batch comes in parts, so as not to wait for all of it."""
    most = slots if len(prompts) * count <= slots else max(slots // 2, 1)
    return deque(
        _Entry(index, prompts[index], first, min(most, count - first))
        for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, count, most)
    )


def _admissible(queue: deque[_Entry], slots: int, used: int, refills: bool) -> list[_Entry]:
    """What enters now, taken from the queue: in bunches, since a pass over prompts costs as much as a step or more."""
    free = slots - used
    if used and (not refills or free < slots // 8):
        return []
    entries: list[_Entry] = []
    while queue and queue[0].count <= free:
        longest = max(len(entry.prompt) for entry in (*entries, queue[0]))
        if entries and (len(entries) + 1) * longest > PREFILL_TOKENS:
            break
        entries.append(queue.popleft())
        free -= entries[-1].count
    return entries


def _survivors(going: Sequence[bool]) -> list[int]:
    """The rows that go on, in the order in which they fill the first places: those at the end fill the gaps."""
    left = sum(going)
    late = deque(i for i in range(left, len(going)) if going[i])
    return [i if going[i] else late.popleft() for i in range(left)]
