"""A key-value cache of slots that are written in place, and the attention of one new token in each to its own keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tepo.policy import Policy
from tepo.rollout.packed import packed_layers

ATTENTION = "tepo_slots"
"""The name under which transformers knows `slot_attention`."""


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one query to the keys of its slot, for transformers' AttentionInterface; of more, plain sdpa.

    query: [B, H, 1, d]; key, value: [B, K, T, d], K heads that H / K queries share; attention_mask: [B, 1, 1, T] bool.
    The queries that share keys are one small matrix, so that no key is repeated. -> [B, 1, H, d].
    """
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise NotImplementedError("attention with soft-capped scores or sinks")
    if query.shape[2] != 1:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    batch, heads, _, width = query.shape
    shared = query.view(batch, key.shape[1], heads // key.shape[1], width)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(batch, 1, heads, -1), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class SlotLayer(CacheLayerMixin):
    """Keys and values [slots, heads, capacity, width] of one layer. `update` writes one token into each used slot."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.is_initialized = True
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.span = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The tensors are there from the start."""

    def at(self, lengths: Tensor, span: int) -> None:
        """The next token of the first slots comes behind `lengths` [B] others; span: of the longest, with it."""
        self.lengths, self.span = lengths, span

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        used = len(key_states)
        slots = torch.arange(used, device=self.keys.device)
        self.keys[slots, :, self.lengths] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[slots, :, self.lengths] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:used, :, : self.span], self.values[:used, :, : self.span]

    def get_seq_length(self) -> int:
        return self.span - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_max_cache_shape(self) -> int:
        return int(self.keys.shape[2])


class SlotDecoder:
    """Prompts and tokens in, hidden states out. The rows in use are the first slots, in the order they came.

    slots: rows decoded at once. capacity: tokens that a row can hold, prompt included.
    """

    refills = True

    def __init__(self, policy: Policy, slots: int, capacity: int) -> None:
        self.policy = policy
        self.slots = slots
        self.capacity = capacity
        self.lengths: list[int] = []
        self.layers: list[SlotLayer] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context that `admit` and `step` are called in."""
        base = self.policy.base
        before = base.config._attn_implementation
        base.set_attn_implementation(ATTENTION)
        try:
            with packed_layers(base):
                yield
        finally:
            base.set_attn_implementation(before)

    def admit(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """New rows, copies[i] for prompts[i], which go through the model once. -> [rows, D], what predicts next."""
        ids, attention = pad_right(prompts, self.policy.pad_token, self.policy.device)
        cache = DynamicCache()
        states = self.policy.base.get_decoder()(
            input_ids=ids, attention_mask=attention, past_key_values=cache, use_cache=True
        ).last_hidden_state
        filled: list[Any] = cache.layers
        if not self.layers:
            self.layers = [self._layer(layer.keys, layer.values) for layer in filled]
        rows = torch.arange(len(prompts), device=ids.device).repeat_interleave(torch.tensor(copies, device=ids.device))
        used = slice(len(self.lengths), len(self.lengths) + len(rows))
        for layer, prompt in zip(self.layers, filled, strict=True):
            layer.keys[used, :, : ids.shape[1]] = prompt.keys[rows].to(layer.keys.dtype)
            layer.values[used, :, : ids.shape[1]] = prompt.values[rows].to(layer.values.dtype)
        self.lengths += [len(prompt) for prompt, times in zip(prompts, copies, strict=True) for _ in range(times)]
        last = attention.sum(-1) - 1
        hidden: Tensor = states[torch.arange(len(prompts), device=ids.device), last][rows]
        return hidden

    def _layer(self, keys: Tensor, values: Tensor) -> SlotLayer:
        # In mixed precision attention rounds its inputs anyway; zeros, since what is masked must still be finite.
        kind = keys.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else keys.dtype
        made = [
            torch.zeros((self.slots, tensor.shape[1], self.capacity, tensor.shape[3]), dtype=dtype, device=keys.device)
            for tensor in (keys, values)
        ]
        return SlotLayer(*made)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """The next token of every row -> [rows, D]."""
        device, span = self.policy.device, max(self.lengths) + 1
        lengths = torch.tensor(self.lengths, device=device)
        for layer in self.layers:
            layer.at(lengths, span)
        states = self.policy.base.get_decoder()(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            # Of four dimensions: the model takes it as it is.
            attention_mask=(torch.arange(span, device=device) <= lengths[:, None])[:, None, None],
            position_ids=lengths[:, None],
            past_key_values=Cache(layers=[*self.layers]),
            use_cache=True,
        ).last_hidden_state
        self.lengths = [length + 1 for length in self.lengths]
        hidden: Tensor = states[:, -1]
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, as the first ones, in this order."""
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new, old = (torch.tensor(side, device=self.policy.device) for side in zip(*moves, strict=True))
            span = max(self.lengths)
            for layer in self.layers:
                layer.keys[new, :, :span] = layer.keys[old, :, :span]
                layer.values[new, :, :span] = layer.values[old, :, :span]
        self.lengths = [self.lengths[row] for row in rows]


def pad_right(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """-> ids and attention mask [prompts, longest], both int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids, (torch.arange(width, device=device) < lengths[:, None]).long()
