"""The input of every objective: flat vectors over the response tokens, and the counts that losses are divided by."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

TOKEN_FIELDS = (
    "logp",
    "old_logp",
    "advantages",
    "entropy",
    "old_entropy",
    "ref_logp",
    "exact_kl",
    "entropy_direction",
    "top_entropy",
    "values",
    "old_values",
    "returns",
    "process_reward",
    "baseline",
    "shared",
    "selected",
)
"""The fields of a TokenBatch with one value for each token."""

DIFFERENTIABLE = ("logp", "entropy", "exact_kl", "top_entropy", "values")
"""Those among them that may carry a gradient."""


def widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def whole_numbers(name: str, labels: Tensor) -> Tensor:
    """Labels as int64. Raises ValueError for fractions, which would merge."""
    whole = labels.long()
    if not torch.equal(whole.to(labels.dtype), labels):
        raise ValueError(f"{name} holds labels that are not whole numbers")
    return whole


def _real_tokens(logp: Tensor, mask: Tensor) -> Tensor:
    """[S, T] bool from a mask of zeros and ones. Raises ValueError for what cannot be one."""
    if logp.dim() != 2:
        raise ValueError(f"logp has shape {list(logp.shape)}; [responses, tokens] is wanted")
    if mask.shape != logp.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, logp has {list(logp.shape)}")
    real = mask.bool()
    if not torch.equal(real.to(mask.dtype), mask):
        raise ValueError("mask holds values other than 0 and 1: was another tensor passed in its place?")
    return real


@dataclass(frozen=True)
class Totals:
    """What the losses of one optimizer step are divided by, over all micro-batches and ranks.

    Counted once for the whole step and handed to every micro-batch, so that a micro-batch contributes its share of
    one sum and the split changes nothing. Totals of ranks add up.

    tokens: response tokens N. sequences: responses S with at least one token. groups: prompts with such a response
        (ranks hold whole groups).
    statistics: further sums over the whole step that an objective asked for (`Objective.totals`).
    group_sizes: responses of each group label, where the totals were counted on a batch with rewards: a micro-batch
        that brings rewards must hold whole groups.
    shared_tokens: those of the tokens that belong to a prefix which the responses of a group share.
    """

    tokens: int
    sequences: int
    groups: int
    statistics: Mapping[str, float] = field(default_factory=dict)
    group_sizes: Mapping[int, int] = field(default_factory=dict)
    shared_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        if self.statistics.keys() != other.statistics.keys():
            raise ValueError(f"totals with different statistics: {set(self.statistics)} and {set(other.statistics)}")
        return Totals(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.groups + other.groups,
            {key: value + other.statistics[key] for key, value in self.statistics.items()},
            dict(Counter(self.group_sizes) + Counter(other.group_sizes)),
            self.shared_tokens + other.shared_tokens,
        )


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The real response tokens of S responses, concatenated: N values for each quantity and no padding.

    logp: [N] log-probability of each token under the current policy, temperature applied; carries the gradient.
    old_logp: [N] the same under the policy that sampled.
    sequence: [N] int64, the response (0..S-1) that a token belongs to, in any order.
    group: [S] int64, the prompt that a response answers; any labels.
    advantages: [N], or None when `rewards` [S] are given: then the objective makes them (`Objective.advantages`).
    entropy, old_entropy: [N] entropy (nats) of the next-token distribution now and at sampling time.
    ref_logp: [N] log-probability under the frozen reference policy.
    exact_kl: [N] KL divergence (nats) from the current policy to the target of a KL term, summed over the vocabulary.
    entropy_direction: [N] first-order change of the entropy when the token's own logit is raised along the policy
        gradient: sum_j p_j S_j - S_a with S_j = p_j (log p_j + H). Negative: raising the token lowers the entropy.
    top_entropy: [N] entropy of the distribution on its most likely tokens alone, renormalised (AEnt).
    values, old_values: [N] what a critic expects a response to earn, seen from before each token: now and at sampling.
    returns: [N] what `values` are trained towards (`Objective.prepare`).
    process_reward: [N] from 0 to 1, what a process reward model says of the segment that a token is in.
    baseline: [N] what responses to the prompt are expected to earn, from earlier rollouts (SKPO).
    shared: [N] bool, the tokens of a prefix that the responses of a group share (SKPO): a row of its own.
    selected: [N] bool, the tokens that the objective chose over the whole step (`Objective.prepare`).

    Only DIFFERENTIABLE fields carry gradients, the others are detached. Half precision is refused (sums over long
    responses stagnate in it); `from_padded` makes it float32.
    """

    logp: Tensor
    old_logp: Tensor
    sequence: Tensor
    group: Tensor
    advantages: Tensor | None = None
    rewards: Tensor | None = None
    entropy: Tensor | None = None
    old_entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    exact_kl: Tensor | None = None
    entropy_direction: Tensor | None = None
    top_entropy: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    process_reward: Tensor | None = None
    baseline: Tensor | None = None
    shared: Tensor | None = None
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("sequence", *TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None and value.is_floating_point() and value.itemsize < 4:
                raise ValueError(f"{name} is {value.dtype}; float32 or float64 is wanted (from_padded converts)")
            if value is not None and name not in DIFFERENTIABLE:
                object.__setattr__(self, name, value.detach())
            if value is not None and value.shape != self.logp.shape:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, logp has {list(self.logp.shape)}: one value a token"
                )
        if self.logp.dim() != 1:
            raise ValueError(
                f"logp has {self.logp.dim()} dimensions; a TokenBatch is flat (use TokenBatch.from_padded)"
            )
        if self.group.dim() != 1:
            raise ValueError(f"group has shape {list(self.group.shape)}: one label a response is wanted")
        if self.rewards is not None and self.rewards.shape != self.group.shape:
            raise ValueError(f"rewards has shape {list(self.rewards.shape)}, group has {list(self.group.shape)}")
        if self.num_tokens and not 0 <= int(self.sequence.min()) <= int(self.sequence.max()) < self.num_sequences:
            raise ValueError(f"sequence must hold indices from 0 to {self.num_sequences - 1}")

    @classmethod
    def from_padded(
        cls,
        logp: Tensor,
        old_logp: Tensor,
        mask: Tensor,
        advantages: Tensor | None = None,
        rewards: Tensor | None = None,
        groups: Tensor | None = None,
        entropy: Tensor | None = None,
        old_entropy: Tensor | None = None,
        ref_logp: Tensor | None = None,
        **fields: Tensor | None,
    ) -> TokenBatch:
        """Take the real tokens out of padded [S, T] tensors; what stands in the padding is never read.

        mask: [S, T], 1 for response tokens that are trained on, 0 elsewhere. advantages: [S] or [S, T].
        rewards, groups: [S], used when advantages is None. The rest, and any further field of a TokenBatch: [S, T].
        Raises ValueError for a shape that does not fit, a mask with values other than 0 and 1, rewards without groups.
        """
        real = _real_tokens(logp, mask)
        if unknown := fields.keys() - set(TOKEN_FIELDS):
            raise TypeError(
                f"a TokenBatch has no field {', '.join(sorted(unknown))}; fields: {', '.join(TOKEN_FIELDS)}"
            )
        if advantages is None and rewards is None:
            raise ValueError("give advantages, or rewards and groups")
        if rewards is not None and advantages is None and groups is None:
            raise ValueError("rewards need groups: the label of the prompt that each response answers")
        responses = torch.arange(len(logp), device=logp.device)
        if groups is not None and groups.shape != responses.shape:
            raise ValueError(f"groups has shape {list(groups.shape)}, [{len(logp)}] is wanted")

        def flat(name: str, padded: Tensor | None) -> Tensor | None:
            if padded is None:
                return None
            if padded.shape != logp.shape:
                raise ValueError(f"{name} has shape {list(padded.shape)}, logp has {list(logp.shape)}")
            kept = padded[real]
            return kept.float() if kept.is_floating_point() and kept.itemsize < 4 else kept

        if advantages is not None and advantages.dim() == 1:
            if advantages.shape != responses.shape:
                raise ValueError(
                    f"advantages has shape {list(advantages.shape)}, [{len(logp)}] or {list(logp.shape)} is wanted"
                )
            advantages = advantages[:, None].expand_as(logp)
        tokens = {
            "logp": logp,
            "old_logp": old_logp,
            "advantages": advantages,
            "entropy": entropy,
            "old_entropy": old_entropy,
            "ref_logp": ref_logp,
            **fields,
        }
        return cls(
            sequence=responses[:, None].expand_as(logp)[real],
            group=responses if groups is None else whole_numbers("groups", groups),
            rewards=rewards,
            **{name: flat(name, value) for name, value in tokens.items()},  # type: ignore[arg-type]
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.logp)

    @property
    def num_sequences(self) -> int:
        """S, responses without a token included."""
        return len(self.group)

    @cached_property
    def lengths(self) -> Tensor:
        """[S] tokens of each response."""
        return torch.bincount(self.sequence, minlength=self.num_sequences)

    @cached_property
    def totals(self) -> Totals:
        """The counts of this batch, taken as the whole step. A response without a token counts nowhere."""
        present = self.lengths > 0
        groups = len(torch.unique(self.group[present]))
        sizes = {} if self.rewards is None else dict(Counter(self.group.tolist()))
        shared = 0 if self.shared is None else int(self.shared.sum())
        return Totals(self.num_tokens, int(present.sum()), groups, {}, sizes, shared)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N] -> [S]: mean over the tokens of each response; 0 for a response without a token."""
        total = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        total = total.index_add(0, self.sequence, values)
        return total / self.lengths.clamp(min=1)

    def select(self, sequences: Tensor) -> TokenBatch:
        """The batch of some responses alone, in the order given: sequences [K] int64 indices into 0..S-1.

        Raises ValueError when a response is named twice.
        """
        if len(torch.unique(sequences)) != len(sequences):
            raise ValueError(f"sequences holds a response twice: {sequences.tolist()}")
        position = torch.full((self.num_sequences,), -1, device=self.sequence.device)
        position[sequences] = torch.arange(len(sequences), device=position.device)
        renumbered = position[self.sequence]
        kept = renumbered >= 0
        tokens = {name: value[kept] for name in TOKEN_FIELDS if (value := getattr(self, name)) is not None}
        return dataclasses.replace(
            self,
            sequence=renumbered[kept],
            group=self.group[sequences],
            rewards=None if self.rewards is None else self.rewards[sequences],
            **tokens,
        )

    def keep(self, tokens: Tensor) -> TokenBatch:
        """The batch of some tokens alone: tokens [N] bool. Responses stay, also those left without a token."""
        kept = {name: value[tokens] for name in TOKEN_FIELDS if (value := getattr(self, name)) is not None}
        return dataclasses.replace(self, sequence=self.sequence[tokens], **kept)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on a device."""
        tensors = ("sequence", "group", "rewards", *TOKEN_FIELDS)
        moved = {name: value.to(device) for name in tensors if (value := getattr(self, name)) is not None}
        return dataclasses.replace(self, **moved)

    @staticmethod
    def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
        """One batch of the responses of several, in their order. Fields that one of them lacks are left out."""
        starts = itertools.accumulate((batch.num_sequences for batch in batches), initial=0)
        tokens = {
            name: torch.cat(values) if all(value is not None for value in values) else None
            for name in TOKEN_FIELDS
            if (values := [getattr(batch, name) for batch in batches])
        }
        rewards = [batch.rewards for batch in batches if batch.rewards is not None]
        return TokenBatch(
            sequence=torch.cat([batch.sequence + start for batch, start in zip(batches, starts, strict=False)]),
            group=torch.cat([batch.group for batch in batches]),
            rewards=torch.cat(rewards) if len(rewards) == len(batches) else None,
            **tokens,  # type: ignore[arg-type]
        )
