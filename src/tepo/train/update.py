"""One optimizer step: scores, objective, backward, clip, step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tepo.config.recipe import TrainerConfig
from tepo.objectives import Objective, TokenBatch, Totals, combine_metrics
from tepo.objectives.adaptive import AdaptiveEntropy
from tepo.policy import Policy
from tepo.policy.head import Head
from tepo.policy.policy import TokenScores
from tepo.train.credit import set_advantages, shared_tokens
from tepo.train.critic import Critic
from tepo.train.microbatch import plan_microbatches
from tepo.train.mismatch import Correction, measure, sampled_logps
from tepo.train.sample import Sample, fill, stack

Backward = Callable[[Tensor], None]

OF_POLICIES = frozenset({"old_logp", "old_entropy", "ref_logp", "old_values", "process_reward"})
"""What advantages can be made of that takes a pass over the whole rollout first."""


class Updater:
    """Turns mini-batches of samples into optimizer steps on a policy.

    reference: the frozen policy, needed when `objective.needs_reference`. critic: needed when the objective trains one.
    process: fills in process rewards, for an objective that reads them. correction: of advantages.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: TrainerConfig,
        reference: Policy | None = None,
        backward: Backward = torch.Tensor.backward,
        critic: Critic | None = None,
        process: Callable[[Sequence[Sample]], None] | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.reference = reference
        self.backward = backward
        self.critic = critic
        self.process = process
        self.correction = correction or Correction()
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            _decay_groups(policy, config.weight_decay), lr=config.learning_rate, betas=config.betas, fused=True
        )
        self.old_head: Head | None = None

    def contributes(self, sample: Sample) -> bool:
        """Whether a sample can have a gradient: exactly, not nearly. The others are left out of every forward pass."""
        if not sample.in_loss or self.objective.touches_zero_advantage:
            return sample.in_loss
        return sample.advantage != 0 if sample.token_advantages is None else bool(sample.token_advantages.any())

    def prepare(self, samples: Sequence[Sample], updates: Sequence[Sequence[Sample]]) -> None:
        """Before the first update of a rollout: advantages, and what old and reference policy say of its samples.

        updates: the same samples by optimizer step. Those of the first one find the policy as it was when it sampled:
        their scores before their own step are the old ones (`_batch`), unless the advantages need them now.
        """
        if self.objective.exact_kl_target == "old":
            self.old_head = self.policy.head.frozen()
        needs = self.objective.advantage.needs
        if needs & OF_POLICIES:
            counted = [sample for sample in samples if sample.in_loss]
            self._score_old(counted)
            if "ref_logp" in needs:
                self._score_reference(counted)
            self._score_values(counted)
            if self.process is not None:
                self.process(counted)
            set_advantages(self.objective, samples)
        else:
            set_advantages(self.objective, samples)
            for later in updates[1:]:
                self._score_old([sample for sample in later if self.contributes(sample)])
        if self.objective.needs_reference and "ref_logp" not in needs:
            self._score_reference([sample for sample in samples if self.contributes(sample)])

    def _score_old(self, samples: Sequence[Sample]) -> None:
        keep_hidden = self.objective.exact_kl_target == "old"
        with self.policy.evaluating():
            for part in self._microbatches(samples):
                scores = self.policy.score([sample.row for sample in part])
                fill(part, old_logp=scores.logp, old_entropy=scores.entropy)
                if keep_hidden:
                    fill(part, target_hidden=scores.hidden)

    def _score_reference(self, samples: Sequence[Sample]) -> None:
        assert self.reference is not None
        keep_hidden = self.objective.exact_kl_target == "reference"
        with self.reference.evaluating():
            for part in self._microbatches(samples):
                scores = self.reference.score([sample.row for sample in part])
                fill(part, ref_logp=scores.logp)
                if keep_hidden:
                    fill(part, target_hidden=scores.hidden)

    def _score_values(self, samples: Sequence[Sample]) -> None:
        if self.critic is None:
            return
        with torch.no_grad():
            for part in self._microbatches(samples):
                fill(part, old_values=self.critic.values([sample.row for sample in part]))

    def step(self, samples: Sequence[Sample], learning_rate: float) -> dict[str, float]:
        """One optimizer step on a mini-batch; -> metrics of the objective, `grad_norm`, `skipped`.

        The denominators count every sample of the mini-batch that is in the loss, also those left out of the forward
        passes. A step whose gradient is not finite is skipped.
        """
        counted = [sample for sample in samples if sample.in_loss]
        active = [sample for sample in counted if self.contributes(sample)]
        totals = self._totals(counted, active)
        self.optimizer.zero_grad(set_to_none=False)
        parts, mismatches = [], []
        for part in self._microbatches(active):
            batch = self._batch(part)
            if stack(part, "old_logp") is None and batch.old_entropy is not None:
                fill(part, old_logp=batch.old_logp, old_entropy=batch.old_entropy)  # for who looks at the rollout
            out = self.objective(batch, totals)
            self.backward(out.loss)
            parts.append((out.metrics, out.num_tokens))
            mismatches.append((measure(self.objective, batch, sampled_logps(part, batch.old_logp)), batch.num_tokens))
        metrics = combine_metrics(parts) | combine_metrics(mismatches)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)) if active else 0.0
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            if self.critic is not None:
                metrics["critic_grad_norm"] = self.critic.step(
                    learning_rate / self.config.learning_rate, self.config.max_grad_norm
                )
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()
        self.objective = self.objective.adapted(metrics)
        return metrics | {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped": float(not finite),
            "tokens": float(sum(sample.num_tokens for sample in counted)),
            "active_tokens": float(sum(tokens for _, tokens in mismatches)),
        }

    def _microbatches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        together = [sample.group for sample in samples] if self.objective.surrogate.pairs else None
        rows = [sample.row for sample in samples]
        padded = not self.policy.packs
        plan = plan_microbatches(rows, self.config.tokens_per_microbatch, together, padded=padded)
        return [[samples[i] for i in part] for part in plan]

    def _totals(self, counted: Sequence[Sample], active: Sequence[Sample]) -> Totals:
        """What the step is divided by; and the tokens it chooses, if its objective does, from a pass of their own."""
        lengths = [sample.num_tokens for sample in counted]
        shared = sum(sample.shared for sample in counted)
        groups = len({sample.group for sample in counted})
        totals = Totals(sum(lengths), len(counted), groups, shared_tokens=shared)
        chosen_from = active if self.objective.selection is None else counted
        if not self.objective.needs_whole_step or not chosen_from:
            return totals
        with torch.no_grad():
            parts = self._microbatches(chosen_from)
            whole = self.objective.prepare(TokenBatch.concatenate([self._batch(part) for part in parts]))
            measured = self.objective.totals(whole)
        if whole.selected is None:
            return dataclasses.replace(totals, statistics=measured.statistics)
        fill([sample for part in parts for sample in part], selected=whole.selected)
        return measured

    def _batch(self, samples: Sequence[Sample]) -> TokenBatch:
        """Score samples with the current policy. Where no old scores were kept the current ones are the old ones."""
        scores = self._score(samples)
        lengths = torch.tensor([sample.num_tokens for sample in samples])
        device = scores.logp.device
        old_logp, old_entropy = stack(samples, "old_logp"), stack(samples, "old_entropy")
        token_advantages = stack(samples, "token_advantages")
        rows = [sample.row for sample in samples]

        def per_token(values: Sequence[float | int]) -> Tensor:
            dtype = scores.logp.dtype if isinstance(values[0], float) else torch.long
            return torch.tensor(values, dtype=dtype).repeat_interleave(lengths).to(device)

        old_logp = scores.logp.detach() if old_logp is None else old_logp
        sequence = per_token(range(len(samples)))
        advantages = per_token([s.advantage for s in samples]) if token_advantages is None else token_advantages
        return TokenBatch(
            logp=scores.logp,
            old_logp=old_logp,
            sequence=sequence,
            group=torch.tensor([sample.group for sample in samples], device=device),
            advantages=self.correction(advantages, old_logp, sampled_logps(samples, old_logp), sequence),
            entropy=scores.entropy,
            old_entropy=scores.entropy.detach() if old_entropy is None else old_entropy,
            ref_logp=stack(samples, "ref_logp"),
            exact_kl=scores.exact_kl,
            entropy_direction=scores.entropy_direction,
            top_entropy=scores.top_entropy,
            values=None if self.critic is None else self.critic.values(rows),
            old_values=stack(samples, "old_values"),
            returns=stack(samples, "returns"),
            shared=shared_tokens(samples).to(device) if "shared" in self.objective.needs else None,
            selected=stack(samples, "selected"),
        )

    def _score(self, samples: Sequence[Sample]) -> TokenScores:
        needs = self.objective.needs
        head = (
            self.reference.head if self.reference and self.objective.exact_kl_target == "reference" else self.old_head
        )
        hidden = stack(samples, "target_hidden")
        clamped = [term.dropped for term in self.objective.terms if isinstance(term, AdaptiveEntropy)]
        scores = self.policy.score(
            [sample.row for sample in samples],
            entropy_gradient="entropy_gradient" in needs,
            entropy_direction="entropy_direction" in needs,
            top_entropy=clamped[0] if clamped else None,
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
