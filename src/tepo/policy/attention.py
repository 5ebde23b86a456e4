"""Attention over a packed sequence: prompts to themselves, responses to their prompt and to themselves.

Queries are [1, H, T, d], keys and values [1, K, T, d] with K a divisor of H (grouped queries), the result [1, T, H, d].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

Allowed = Callable[[Tensor, Tensor], Tensor]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Group:
    """A prompt and its responses, which follow it. start: where in the sequence; the rest: lengths in tokens."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.prompt, *self.responses)


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], allowed: Allowed | None, scale: float
) -> Tensor:
    """allowed: which (query, key) positions [.., ..] may attend, or None for plain causality."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if allowed is None and query.device.type == "cpu":
        out: Tensor = _PrefixAttention.apply(query, key, value, groups, scale)
        return out.transpose(1, 2)
    if not torch.is_grad_enabled():
        return _padded(query, key, value, groups, allowed, scale)
    # Recomputed, so that what is kept for the backward pass holds each prompt's keys once, not once a response.
    recomputed: Tensor = checkpoint(_padded, query, key, value, groups, allowed, scale, use_reentrant=False)
    return recomputed


class _PrefixAttention(torch.autograd.Function):
    """Causal attention in two parts, to the own sequence and to the prompt, merged by their log-sum-exps.

    torch's CPU kernel gives the log-sum-exp of its scores, and its backward pass takes output and log-sum-exp as given:
    with the merged ones each part's backward pass is its share of the whole gradient. No keys are copied or padded.
    Of bf16 the arithmetic is in fp32: that kernel's backward pass takes nearly twice the time in bf16.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], scale: float) -> Tensor:
        given = query, key, value
        query, key, value = _at_least_fp32(*given)
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
        total = query.new_empty(1, query.shape[2], query.shape[1]).transpose(1, 2)
        for own in _sequences(groups):
            out[:, :, own], total[:, :, own] = _flash(
                query[:, :, own], key[:, :, own], value[:, :, own], 0.0, True, scale=scale
            )
        for prompt, responses in _crossings(groups):
            part, lse = _flash(query[:, :, responses], key[:, :, prompt], value[:, :, prompt], 0.0, False, scale=scale)
            merged = torch.logaddexp(total[:, :, responses], lse)
            weights = (total[:, :, responses] - merged).exp_()[..., None], (lse - merged).exp_()[..., None]
            out[:, :, responses] = out[:, :, responses] * weights[0] + part * weights[1]
            total[:, :, responses] = merged
        out = out.to(given[0].dtype)
        ctx.save_for_backward(*given, out, total)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, total = ctx.saved_tensors
        query, key, value, out, above = _at_least_fp32(*given, gradients[0])
        grads = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]

        def part(queries: slice, keys: slice, causal: bool) -> Any:
            return _flash_backward(
                above[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys],
                out[:, :, queries], total[:, :, queries], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip

        for own in _sequences(ctx.groups):
            for gradient, share in zip(grads, part(own, own, True), strict=True):
                gradient[:, :, own] = share
        for prompt, responses in _crossings(ctx.groups):
            places = (responses, prompt, prompt)
            for gradient, place, share in zip(grads, places, part(responses, prompt, False), strict=True):
                gradient[:, :, place] += share
        return *(gradient.to(given[0].dtype) for gradient in grads), None, None


def _at_least_fp32(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _sequences(groups: Sequence[Group]) -> list[slice]:
    """Where each prompt and each response is, those of no token left out."""
    found = []
    for group in groups:
        start = group.start
        for length in group.lengths:
            if length:
                found.append(slice(start, start + length))
            start += length
    return found


def _crossings(groups: Sequence[Group]) -> list[tuple[slice, slice]]:
    """Where each prompt is, and all of its responses."""
    ends = [(group.start + group.prompt, group.start + sum(group.lengths)) for group in groups]
    return [
        (slice(group.start, first), slice(first, last))
        for group, (first, last) in zip(groups, ends, strict=True)
        if last > first
    ]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], allowed: Allowed | None, scale: float
) -> Tensor:
    """The same on any device and with any mask: a group's responses as a batch, padded to the longest of them."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    lengths = [length for group in groups for length in group.lengths]
    pieces = [x[0].transpose(0, 1).split(lengths) for x in (query, key, value)]  # each [length, H, d]
    out, first = [], 0
    for group in groups:
        here = slice(first, first + 1 + len(group.responses))
        out.append(_group_attention([list(x[here]) for x in pieces], group, allowed, scale))
        first = here.stop
    return torch.cat(out)[None]


def _group_attention(pieces: Sequence[list[Tensor]], group: Group, allowed: Allowed | None, scale: float) -> Tensor:
    """Queries, keys, values as [prompt, *responses], each [length, H, d] -> the group's outputs [tokens, H, d]."""
    longest = max(group.responses)
    positions = torch.arange(group.prompt + longest, device=pieces[0][0].device)
    rows, columns = positions[:, None], positions[None]
    mask = columns <= rows if allowed is None else allowed(rows, columns)
    q, k, v = (x[0][None] for x in pieces)
    prompt = _attend(q, k, v, mask[: group.prompt, : group.prompt], scale)
    if not longest:
        return prompt[0]
    own_q, own_k, own_v = (pad_sequence(x[1:], batch_first=True) for x in pieces)  # [R, longest, H, d]
    responses = _attend(
        own_q,
        torch.cat([k.expand(len(own_k), -1, -1, -1), own_k], dim=1),
        torch.cat([v.expand(len(own_v), -1, -1, -1), own_v], dim=1),
        mask[group.prompt :],
        scale,
    )
    return torch.cat([prompt[0], *(x[:n] for x, n in zip(responses, group.responses, strict=True))])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[R, length, H, d] each, mask [queries, keys]; -> as the queries."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return attended.transpose(1, 2)
