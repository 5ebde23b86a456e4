"""From logits to tokens and the log-probs under which they were drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from tepo.rollout.engine import Sampling

BLOCK = 256
"""Tokens of the vocabulary that are drawn from together (`draw`)."""


def sample(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [B] and their log-probs [B] under the distribution sampled from.

    logits: [B, V]; uniform: [B] float64 in [0, 1), what is random in each row; not read when greedy.
    """
    if sampling.temperature == 0:
        chosen = logits.argmax(dim=-1)
        return chosen, logits.gather(-1, chosen[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
    scaled = logits if sampling.temperature == 1 else logits / sampling.temperature
    probs = torch.softmax(_truncate(scaled, sampling), dim=-1)
    chosen = draw(probs, uniform)
    # Of a probability that is not 0; its logarithm is as exact as a difference of logits.
    return chosen, probs.gather(-1, chosen[:, None]).squeeze(-1).log()


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """probs [B, V], uniform [B] -> token ids [B]: the inverse of the distribution function.

    In two levels, blocks of tokens and the tokens of one block: a cumulative sum over the whole vocabulary would be
    slow, and inexact in fp32; a random number for each token (Gumbel's maximum) takes most of a decoding step on a CPU.
    """
    missing = -probs.shape[-1] % BLOCK
    whole = torch.nn.functional.pad(probs, (0, missing)) if missing else probs
    padded = whole.unflatten(-1, (-1, BLOCK))
    blocks = padded.sum(-1).double()
    block, before = _invert(blocks, uniform[:, None] * blocks.sum(-1, keepdim=True))
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


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with -inf for what top_k leaves out, and then for what top_p leaves out of the rest."""
    if 0 < sampling.top_k < logits.shape[-1]:
        values, index = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, index, values)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = torch.softmax(ordered, dim=-1)
        # The fewest most likely tokens whose probabilities reach top_p.
        beyond = probs.cumsum(dim=-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return logits
