"""From rewards, and what old policy, critic and process reward model say, to the advantages of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tepo.objectives import Objective, TokenBatch
from tepo.objectives.segments import SegmentAdvantage
from tepo.rewards.steps import ProcessRewardModel, Steps, score_steps
from tepo.train.sample import Sample, fill, stack


def set_advantages(objective: Objective, samples: Sequence[Sample]) -> None:
    """Fill in the advantages of all samples of a rollout: one each, or one for each of their tokens and their mean."""
    if objective.advantage.needs:
        counted = [sample for sample in samples if sample.in_loss]
        batch = _batch(counted)
        advantages = objective.token_advantages(batch)
        fill(counted, token_advantages=advantages)
        for sample, mean in zip(counted, batch.sequence_mean(advantages).tolist(), strict=True):
            sample.advantage = mean  # for those who read the rollout
        returns = objective.advantage.returns(batch)
        if returns is not None:
            fill(counted, returns=returns)
        return
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = torch.tensor([sample.group for sample in samples])
    # What is left out of the loss weighs nothing where advantages weigh responses by their length.
    lengths = torch.tensor([sample.num_tokens * sample.in_loss for sample in samples])
    advantages = objective.advantages(rewards, groups, lengths)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def _batch(samples: Sequence[Sample]) -> TokenBatch:
    """What advantages can be made of; where nothing was scored, the log-probs are those of sampling."""
    scored = stack(samples, "old_logp")
    logp = torch.tensor([x for sample in samples for x in sample.sampled_logps]) if scored is None else scored
    lengths = torch.tensor([sample.num_tokens for sample in samples])
    sequence = torch.arange(len(samples)).repeat_interleave(lengths).to(logp.device)
    baselines = [sample.baseline for sample in samples if sample.baseline is not None]
    known = len(baselines) == len(samples)
    return TokenBatch(
        logp=logp,
        old_logp=logp,
        sequence=sequence,
        group=torch.tensor([sample.group for sample in samples], device=logp.device),
        rewards=torch.tensor([sample.reward for sample in samples], device=logp.device),
        old_entropy=stack(samples, "old_entropy"),
        ref_logp=stack(samples, "ref_logp"),
        old_values=stack(samples, "old_values"),
        process_reward=stack(samples, "process_reward"),
        baseline=torch.tensor(baselines, device=logp.device)[sequence] if known else None,
        shared=shared_tokens(samples).to(logp.device),
    )


def shared_tokens(samples: Sequence[Sample]) -> torch.Tensor:
    """[N] bool: the tokens of a prefix that the responses of a group share."""
    return torch.tensor([t < sample.shared for sample in samples for t in range(sample.num_tokens)], dtype=torch.bool)


@dataclass(frozen=True)
class ProcessScorer:
    """Fills in what a process reward model says of samples, cut where their entropy spikes.

    name, model: `reward.process`, and what it stands for. decode: token ids -> text.
    """

    name: str
    model: ProcessRewardModel
    advantage: SegmentAdvantage
    decode: Callable[[Sequence[int]], str]

    def __call__(self, samples: Sequence[Sample]) -> None:
        """Samples with their old entropies."""
        lengths, responses = [], []
        for sample in samples:
            assert sample.old_entropy is not None
            ends = [*self.advantage.segments(sample.old_entropy)[1:], sample.num_tokens]
            lengths.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
            responses.append(Steps(sample.problem, self._texts(sample.row.response, ends)))
        scores = score_steps(self.name, self.model, responses)
        for sample, row, parts in zip(samples, scores, lengths, strict=True):
            assert sample.old_entropy is not None
            sample.process_reward = torch.tensor(row).repeat_interleave(torch.tensor(parts)).to(sample.old_entropy)

    def _texts(self, ids: Sequence[int], ends: Sequence[int]) -> tuple[str, ...]:
        """The texts of segments, cut out of the whole text: tokens alone may decode to something else."""
        texts, before = [], ""
        for end in ends:
            text = self.decode(ids[:end])
            texts.append(text[len(before) :])
            before = text
        return tuple(texts)
