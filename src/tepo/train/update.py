"""One optimizer step: scores, objective, backward, clip, step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tepo.config.recipe import TrainerConfig
from tepo.objectives import Objective, TokenBatch, Totals, combine_metrics
from tepo.policy import Policy
from tepo.policy.head import Head
from tepo.policy.policy import TokenScores
from tepo.train.microbatch import plan_microbatches
from tepo.train.sample import Sample

Backward = Callable[[Tensor], None]


class Updater:
    """Turns mini-batches of samples into optimizer steps on a policy.

    reference: the frozen policy, needed when `objective.needs_reference`.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: TrainerConfig,
        reference: Policy | None = None,
        backward: Backward = torch.Tensor.backward,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.reference = reference
        self.backward = backward
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            _decay_groups(policy, config.weight_decay), lr=config.learning_rate, betas=config.betas, fused=True
        )
        self.old_head: Head | None = None

    def contributes(self, sample: Sample) -> bool:
        """Whether a sample can have a gradient: exactly, not nearly. The others are left out of every forward pass."""
        return sample.in_loss and (self.objective.touches_zero_advantage or sample.advantage != 0)

    def score_old(self, samples: Sequence[Sample]) -> None:
        """Fill in what the policy that sampled says of the samples, before the first update makes it another one.

        Skipped for samples of the first update, whose scores before their own step are the same (`_batch`).
        """
        wanted = [sample for sample in samples if self.contributes(sample)]
        keep_hidden = self.objective.exact_kl_target == "old"
        if keep_hidden:
            self.old_head = self.policy.head.frozen()
        with self.policy.evaluating():
            for part in self._microbatches(wanted):
                scores = self.policy.score([sample.row for sample in part])
                _fill(part, old_logp=scores.logp, old_entropy=scores.entropy)
                if keep_hidden:
                    _fill(part, target_hidden=scores.hidden)

    def score_reference(self, samples: Sequence[Sample]) -> None:
        """Fill in what the reference policy says of the samples, if the objective asks."""
        if not self.objective.needs_reference:
            return
        assert self.reference is not None
        keep_hidden = self.objective.exact_kl_target == "reference"
        wanted = [sample for sample in samples if self.contributes(sample)]
        with self.reference.evaluating():
            for part in self._microbatches(wanted):
                scores = self.reference.score([sample.row for sample in part])
                _fill(part, ref_logp=scores.logp)
                if keep_hidden:
                    _fill(part, target_hidden=scores.hidden)

    def step(self, samples: Sequence[Sample], learning_rate: float) -> dict[str, float]:
        """One optimizer step on a mini-batch; -> metrics of the objective, `grad_norm`, `skipped`.

        The denominators count every sample of the mini-batch that is in the loss, also those left out of the forward
        passes. A step whose gradient is not finite is skipped.
        """
        totals = self._totals(samples)
        active = [sample for sample in samples if self.contributes(sample)]
        if self.objective.statistics and active:
            totals = dataclasses.replace(totals, statistics=self._statistics(active))
        self.optimizer.zero_grad(set_to_none=False)
        parts = []
        for part in self._microbatches(active):
            batch = self._batch(part)
            out = self.objective(batch, totals)
            self.backward(out.loss)
            parts.append((out.metrics | _mismatch(batch, part), batch.num_tokens))
        metrics = combine_metrics(parts)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)) if active else 0.0
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics | {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped": float(not finite),
            "tokens": float(totals.tokens),
            "active_tokens": float(sum(tokens for _, tokens in parts)),
        }

    def _microbatches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        plan = plan_microbatches([len(sample.row) for sample in samples], self.config.tokens_per_microbatch)
        return [[samples[i] for i in part] for part in plan]

    def _totals(self, samples: Sequence[Sample]) -> Totals:
        counted = [sample for sample in samples if sample.in_loss]
        tokens = sum(len(sample.response.ids) for sample in counted)
        return Totals(tokens, len(counted), len({sample.group for sample in counted}))

    def _statistics(self, active: Sequence[Sample]) -> dict[str, float]:
        """Sums over the whole mini-batch under the current policy, from a pass of their own."""
        sums: dict[str, float] = {}
        with torch.no_grad():
            for part in self._microbatches(active):
                for name, value in self.objective.totals(self._batch(part)).statistics.items():
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def _batch(self, samples: Sequence[Sample]) -> TokenBatch:
        """Score samples with the current policy. Where no old scores were kept the current ones are the old ones."""
        scores = self._score(samples)
        lengths = torch.tensor([len(sample.response.ids) for sample in samples])
        device = scores.logp.device
        old_logp = _stack([sample.old_logp for sample in samples])
        old_entropy = _stack([sample.old_entropy for sample in samples])

        def per_token(values: Sequence[float | int]) -> Tensor:
            dtype = scores.logp.dtype if isinstance(values[0], float) else torch.long
            return torch.tensor(values, dtype=dtype).repeat_interleave(lengths).to(device)

        return TokenBatch(
            logp=scores.logp,
            old_logp=scores.logp.detach() if old_logp is None else old_logp,
            sequence=per_token(range(len(samples))),
            group=torch.tensor([sample.group for sample in samples], device=device),
            advantages=per_token([sample.advantage for sample in samples]),
            entropy=scores.entropy,
            old_entropy=scores.entropy.detach() if old_entropy is None else old_entropy,
            ref_logp=_stack([sample.ref_logp for sample in samples]),
            exact_kl=scores.exact_kl,
            entropy_direction=scores.entropy_direction,
        )

    def _score(self, samples: Sequence[Sample]) -> TokenScores:
        needs = self.objective.needs
        head = (
            self.reference.head if self.reference and self.objective.exact_kl_target == "reference" else self.old_head
        )
        hidden = _stack([sample.target_hidden for sample in samples])
        scores = self.policy.score(
            [sample.row for sample in samples],
            entropy_gradient="entropy_gradient" in needs,
            entropy_direction="entropy_direction" in needs,
            kl_target=None if head is None or hidden is None else (head, hidden),
        )
        if "exact_kl" in needs and scores.exact_kl is None:
            # The policy that sampled is the current one: the divergence is 0, and so is its gradient.
            scores = dataclasses.replace(scores, exact_kl=scores.logp * 0.0)
        return scores


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """The rate of step `step` (0 is the first): linear warm-up, then the schedule, which would reach 0 at `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    factors = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.learning_rate * factors[config.schedule]


def _decay_groups(policy: Policy, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices, none on norms and biases."""
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def _fill(samples: Sequence[Sample], **values: Tensor) -> None:
    """Set fields of samples from [N, ...] tensors over all their tokens."""
    lengths = [len(sample.response.ids) for sample in samples]
    for name, value in values.items():
        for sample, part in zip(samples, torch.split(value, lengths), strict=True):
            setattr(sample, name, part.clone())


def _stack(values: Sequence[Tensor | None]) -> Tensor | None:
    """[N, ...] from one tensor a sample, or None where they have none."""
    present = [value for value in values if value is not None]
    return torch.cat(present) if len(present) == len(values) else None


def _mismatch(batch: TokenBatch, samples: Sequence[Sample]) -> dict[str, float]:
    """How far the log-probs under which tokens were sampled are from the recomputed ones."""
    sampled = torch.tensor([logp for sample in samples for logp in sample.response.logps], device=batch.old_logp.device)
    difference = (batch.old_logp - sampled).abs()
    return {"mismatch": float(difference.mean()), "mismatch_max": float(difference.max())}
