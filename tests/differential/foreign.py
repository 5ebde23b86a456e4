"""Random ragged steps, and what a loss or an advantage of TRL (foreign_trl.py) or verl (foreign_verl.py) is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.objectives import TokenBatch

GROUP_SIZE = 4


@dataclass(frozen=True)
class Step:
    """The padded tensors of one optimizer step, or of a part of it: [S, T]; rewards and groups [S].

    advantages: [S], or [S, T] when they vary inside a response. shared: the last response of a group stands for a
    prefix that the others share. What stands in the padding is noise.
    """

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    groups: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    shared: Tensor

    def rows(self, index: slice) -> Step:
        """Some responses; gradients flow back into the whole."""
        return Step(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})

    def token_advantages(self) -> Tensor:
        """[S, T], 0 in the padding."""
        return (self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]) * self.mask

    def token_rewards(self) -> Tensor:
        """[S, T]: the reward of a response stands at its last token."""
        last = (self.mask.cumsum(-1) == self.mask.sum(-1, keepdim=True)) & self.mask.bool()
        return self.rewards[:, None] * last

    def in_pairs(self) -> Step:
        """+1 for the response of a group with the highest reward, -1 for that with the lowest; log-probs below 0."""
        advantages = torch.zeros_like(self.rewards)
        for group in self.groups.unique():
            rows = torch.nonzero(self.groups == group).flatten()
            advantages[rows[self.rewards[rows].argmax()]] = 1
            advantages[rows[self.rewards[rows].argmin()]] = -1
        logp = (-self.logp.detach().abs() - 0.01).requires_grad_()
        return dataclasses.replace(self, advantages=advantages, logp=logp)

    def pairs(self) -> list[tuple[int, int]]:
        """The rows of the chosen and of the rejected response of each group (after `in_pairs`)."""
        chosen, rejected = (torch.nonzero(self.advantages == sign).flatten() for sign in (1, -1))
        partner = {int(self.groups[row]): int(row) for row in rejected}
        return [(int(row), partner[int(self.groups[row])]) for row in chosen]

    def rollout(self) -> TokenBatch:
        """For our advantages: rewards in the advantages' place."""
        return dataclasses.replace(self.batch(), advantages=None, returns=None, rewards=self.rewards)

    def batch(self) -> TokenBatch:
        """The same for our objectives."""
        return TokenBatch.from_padded(
            self.logp,
            self.old_logp,
            self.mask,
            advantages=self.advantages,
            groups=self.groups,
            entropy=self.entropy,
            old_entropy=self.entropy.detach(),
            ref_logp=self.ref_logp,
            values=self.values,
            old_values=self.old_values,
            returns=self.returns,
            shared=self.shared,
        )


@dataclass(frozen=True)
class Window:
    """The counts of a whole optimizer step that is computed in `parts` pieces."""

    tokens: int
    sequences: int
    parts: int


Loss = Callable[[Step, Window], Tensor]
"""(a part of a step, the counts of the whole) -> its share of the loss, with a gradient in logp, entropy and values."""

Advantages = Callable[[Step], Tensor]
"""A step -> advantages [S, T], 0 in the padding."""


def random_step(seed: int, drift: float, vary_advantages: bool = False, empty_responses: int = 0) -> Step:
    """A ragged step of 12 responses with 1 to 9 tokens, in groups of GROUP_SIZE, in float64.

    drift: standard deviation of logp - old_logp, and twice that of the mean of a response's.
    empty_responses: how many (the first ones) have no token in the mask.
    """
    responses, width = 12, 9
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*(shape or (responses, width)), generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (responses,), generator=generator)
    lengths[:2] = torch.tensor([1, width])
    lengths = lengths[torch.randperm(responses, generator=generator)]
    lengths[:empty_responses] = 0
    old_logp = -normal().abs() - 0.05
    logp = old_logp + drift * (normal() + 2 * normal(responses, 1))
    advantages = normal() if vary_advantages else normal(responses)
    advantages[responses // 2] = 0.0
    step = Step(
        logp=logp.requires_grad_(),
        old_logp=old_logp,
        ref_logp=logp.detach() + 0.3 * normal(),
        # Of float32 precision: TRL rounds the threshold of its entropy mask to it.
        entropy=normal().abs().float().double().requires_grad_(),
        mask=(torch.arange(width) < lengths[:, None]).long(),
        advantages=advantages,
        rewards=normal(responses),
        groups=torch.arange(responses) // GROUP_SIZE,
        values=normal().requires_grad_(),
        old_values=normal(),
        returns=normal(),
        shared=(torch.arange(responses) % GROUP_SIZE == GROUP_SIZE - 1)[:, None].expand(responses, width),
    )
    return dataclasses.replace(step, old_values=step.values.detach() + drift * step.old_values)


def window(step: Step, parts: int) -> Window:
    """The counts of a step."""
    return Window(int(step.mask.sum()), int((step.mask.sum(-1) > 0).sum()), parts)
