"""The embedded engine: a decoding loop on the model that is trained, so that weights are never out of date."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from tepo.policy import Policy
from tepo.rollout.engine import Response, Sampling

BLOCK = 256
"""Tokens of the vocabulary that are drawn from together (`draw`)."""


class TransformersEngine:
    """Decodes with a key-value cache, many responses at once; rows that have ended leave the batch.

    batch_size: responses decoded at once.
    """

    def __init__(self, policy: Policy, batch_size: int = 256) -> None:
        self.policy = policy
        self.batch_size = batch_size

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """See Engine. Prompts of similar length are decoded together, which changes nothing but the speed."""
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows = [i for i in order for _ in range(count)]
        responses: list[list[Response]] = [[] for _ in prompts]
        with self.policy.sampling():
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                for i, response in zip(
                    batch, self._decode([prompts[i] for i in batch], sampling, generator), strict=True
                ):
                    responses[i].append(response)
        return responses

    def _decode(self, prompts: list[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> list[Response]:
        device = self.policy.device
        head = self.policy.head
        decoder = self.policy.base.get_decoder()
        ends = torch.tensor(sorted(self.policy.end_tokens), device=device)
        ids, attention = _pad_left(prompts, self.policy.pad_token)
        ids, attention = ids.to(device), attention.to(device)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.policy.base.config)
        active = torch.arange(len(prompts), device=device)
        going = torch.ones(len(prompts), dtype=torch.bool, device=device)
        tokens = torch.full((len(prompts), sampling.max_tokens), -1, device=device)
        logps = torch.zeros((len(prompts), sampling.max_tokens), device=device)
        for step in range(sampling.max_tokens):
            states = decoder(
                input_ids=ids, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True
            )
            chosen, logp = sample(head(states.last_hidden_state[:, -1]), sampling, generator)
            tokens[active, step], logps[active, step] = chosen, logp.float()
            going = going & ~torch.isin(chosen, ends)
            if not bool(going.any()):
                break
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones(len(attention), 1)], dim=1)
            # Ended rows go when they are a good part of the batch: to move the cache at every step would cost more.
            if int(going.sum()) <= 0.75 * len(going):
                kept = torch.nonzero(going).flatten()
                cache.batch_select_indices(kept)
                active, going = active[kept], going[kept]
                ids, positions, attention = ids[kept], positions[kept], attention[kept]
        return _cut(tokens, logps, ends)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> token ids [B] and their log-probs [B] under the distribution sampled from."""
    if sampling.temperature == 0:
        log_probs = torch.log_softmax(logits, dim=-1)
        chosen = logits.argmax(dim=-1)
    else:
        log_probs = torch.log_softmax(logits / sampling.temperature, dim=-1)
        if sampling.top_p < 1:
            log_probs = _nucleus(log_probs, sampling.top_p)
        chosen = draw(log_probs.exp(), generator)
    return chosen, log_probs.gather(-1, chosen[:, None]).squeeze(-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """probs [B, V] -> token ids [B], one uniform number a row and the inverse of the distribution function.

    In two levels, blocks of tokens and the tokens of one block: a cumulative sum over the whole vocabulary would be
    slow, and inexact in fp32; a random number for each token (Gumbel's maximum) takes most of a decoding step on a CPU.
    """
    padded = torch.nn.functional.pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    uniform = torch.rand(len(probs), 1, dtype=torch.float64, generator=generator, device=probs.device)
    blocks = padded.sum(-1).double()
    block, before = _invert(blocks, uniform * blocks.sum(-1, keepdim=True))
    inside = padded[torch.arange(len(probs), device=probs.device), block.squeeze(-1)].double()
    token, _ = _invert(inside, before)
    return (block * BLOCK + token).squeeze(-1)


def _invert(weights: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Where `point` [B, 1] falls in the cumulative sum of weights [B, K]: the index [B, 1], and what is left within it.

    Never an entry of weight 0, also where rounding puts the point at the very end.
    """
    cumulative = weights.cumsum(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    index = torch.minimum(torch.searchsorted(cumulative, point, right=True), last)
    return index, point - (cumulative - weights).gather(-1, index)


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """The distribution on the fewest most likely tokens whose probabilities reach top_p, renormalised."""
    ordered, index = log_probs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return torch.log_softmax(log_probs.masked_fill(dropped, -torch.inf), dim=-1)


def _pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """-> ids and attention mask [prompts, longest]: the last prompt token of every row in the last column."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    attention = torch.zeros((len(prompts), width), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError("a prompt without tokens: there is nothing to predict the first token of a response from")
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        attention[i, width - len(prompt) :] = 1
    return ids, attention


def _cut(tokens: Tensor, logps: Tensor, ends: Tensor) -> list[Response]:
    """Rows of sampled tokens (-1 where none was) -> responses up to and with their first end token."""
    finished = torch.isin(tokens, ends).any(dim=1).tolist()
    lengths = (tokens >= 0).sum(dim=1).tolist()
    # A row that has ended is decoded on until it leaves the batch; what it sampled after its end is not the response's.
    first_end = torch.where(torch.isin(tokens, ends), 1, 0).argmax(dim=1).tolist()
    responses = []
    for ids, row, end, length, first in zip(tokens.tolist(), logps.tolist(), finished, lengths, first_end, strict=True):
        length = first + 1 if end else length
        responses.append(Response(tuple(ids[:length]), tuple(row[:length]), end))
    return responses
