"""One packed sequence through a decoder: each prompt once, its responses after it, no padding.

The decoder is called as transformers calls it, on ids [1, T]; what differs is its attention, which goes through
transformers' AttentionInterface: a prompt attends to itself, a response to its prompt and to itself. Positions go on
from the prompt in every response, so that what is computed is what each row would give alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tepo.policy.attention import Group, shared_attention
from tepo.policy.lean import make_lean, undo_lean
from tepo.policy.row import Row

IMPLEMENTATION = "tepo_packed"
"""The name of our attention in a model's configuration; without a packing it is transformers' `sdpa`."""

_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)


class CannotPack(Exception):
    """A decoder asks for an attention that the packed sequence does not have; the message says which."""


@dataclass(frozen=True)
class Packing:
    """Rows in one sequence of T tokens; a response's last token predicts nothing and is left out.

    ids, positions: [T]. predicts: [N] indices into the sequence of what predicts the response tokens, row after row.
    """

    ids: Tensor
    positions: Tensor
    predicts: Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Packing:
        """Rows with equal prompts share one, in whatever order they come."""
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            by_prompt.setdefault(tuple(row.prompt), []).append(i)
        ids: list[int] = []
        positions: list[int] = []
        groups: list[Group] = []
        predicts: list[list[int]] = [[] for _ in rows]
        for prompt, members in by_prompt.items():
            start = len(ids)
            ids += prompt
            positions += range(len(prompt))
            for i in members:
                fed = rows[i].response[:-1]
                predicts[i] = [start + len(prompt) - 1, *range(len(ids), len(ids) + len(fed))]
                ids += fed
                positions += range(len(prompt), len(prompt) + len(fed))
            groups.append(Group(start, len(prompt), tuple(len(rows[i].response) - 1 for i in members)))
        flat = [index for row in predicts for index in row]
        return cls(torch.tensor(ids), torch.tensor(positions), torch.tensor(flat), tuple(groups))

    def hidden_states(self, decoder: nn.Module, device: torch.device) -> Tensor:
        """[N, D]: the states that predict the response tokens. Raises CannotPack."""
        ids = self.ids.to(device)[None]
        token = _packing.set(self)
        try:
            # The mask is all ones: given, it keeps transformers from guessing sequences out of the positions.
            states: Tensor = decoder(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=self.positions.to(device)[None],
                use_cache=False,
            ).last_hidden_state
        finally:
            _packing.reset(token)
        return states[0].index_select(0, self.predicts.to(device))


@dataclass(frozen=True)
class PackedMask:
    """Stands where attention layers get their mask. allowed: of positions (query, key), or None for plain causality."""

    groups: tuple[Group, ...]
    allowed: Callable[[Tensor, Tensor], Tensor] | None


def _mask(*args: Any, **kwargs: Any) -> Any:
    """transformers' mask function: called with the pattern of a kind of layer (causal, sliding, chunked)."""
    packing = _packing.get()
    if packing is None:
        return sdpa_mask(*args, **kwargs)
    pattern = kwargs["mask_function"]
    if kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", True):
        raise CannotPack("its attention mask depends on more than the positions")
    if pattern is causal_mask_function:
        return PackedMask(packing.groups, None)
    return PackedMask(packing.groups, lambda q, k: pattern(q.new_zeros(()), q.new_zeros(()), q, k))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, d]."""
    if not isinstance(attention_mask, PackedMask):
        if _packing.get() is not None:
            raise CannotPack("its attention makes its mask itself")
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
        return out, None
    for name in ("softcap", "s_aux", "dropout", "position_bias"):
        given = kwargs.get(name)
        if given is not None and not (isinstance(given, float) and given == 0.0):
            raise CannotPack(f"its attention takes {name}")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise CannotPack("its attention is not causal")
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return shared_attention(query, key, value, attention_mask.groups, attention_mask.allowed, scale), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def install(decoder: nn.Module) -> None:
    """Give a decoder our attention and lean layers, for good: gradient checkpointing calls them again later.

    Raises CannotPack where it cannot have it.
    """
    config: Any = decoder.config
    if config._attn_implementation == IMPLEMENTATION:
        return
    if config._attn_implementation != "sdpa":
        raise CannotPack(f"its attention is {config._attn_implementation}, not sdpa")
    if not getattr(decoder, "_supports_attention_backend", False):
        raise CannotPack("its attention cannot be replaced")
    config._attn_implementation = IMPLEMENTATION
    make_lean(decoder)


def uninstall(decoder: nn.Module) -> None:
    """Give a decoder transformers' attention and layers back."""
    config: Any = decoder.config
    if config._attn_implementation == IMPLEMENTATION:
        config._attn_implementation = "sdpa"
        undo_lean(decoder)
