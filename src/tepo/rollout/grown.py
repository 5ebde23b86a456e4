"""Decoding with transformers' own cache and attention, for models whose attention `slots` cannot stand in for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache

from tepo.policy import Policy


class GrownDecoder:
    """As SlotDecoder, with a cache that is copied to grow: slower, and new rows come only when there are no others."""

    refills = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.cache = DynamicCache(config=policy.base.config)
        self.attention = torch.zeros(0)
        self.positions = torch.zeros(0)

    def running(self) -> AbstractContextManager[None]:
        """The context that `admit` and `step` are called in."""
        return nullcontext()

    def admit(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """See SlotDecoder."""
        device = self.policy.device
        self.cache = DynamicCache(config=self.policy.base.config)
        ids, attention = pad_left(prompts, self.policy.pad_token)
        self.attention = attention.to(device)
        self.positions = (self.attention.cumsum(-1) - 1).clamp(min=0)
        states = self._forward(ids.to(device))
        self.keep(torch.arange(len(prompts)).repeat_interleave(torch.tensor(copies)).tolist())
        return states.repeat_interleave(torch.tensor(copies, device=device), dim=0)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See SlotDecoder."""
        self.positions = self.positions[:, -1:] + 1
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(tokens), 1)], dim=1)
        return self._forward(torch.tensor(tokens, device=self.policy.device)[:, None])

    def _forward(self, ids: Tensor) -> Tensor:
        states = self.policy.base.get_decoder()(
            input_ids=ids,
            attention_mask=self.attention,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = states.last_hidden_state[:, -1]
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        """See SlotDecoder."""
        index = torch.tensor(rows, dtype=torch.long, device=self.policy.device)
        self.cache.batch_select_indices(index)
        self.attention, self.positions = self.attention[index], self.positions[index]


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """-> ids and attention mask [prompts, longest]: the last prompt token of every row in the last column."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()
