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
from tepo.train.nonfinite import Blame, blame
from tepo.train.ranks import Ranks
from tepo.train.sample import Sample, fill, stack

Backward = Callable[[Tensor], None]

OF_POLICIES = frozenset({"old_logp", "old_entropy", "ref_logp", "old_values", "process_reward"})
"""What advantages can be made of that takes a pass over the whole rollout first."""


class Updater:
    """Turns mini-batches of samples into optimizer steps on a policy.

    reference: the frozen policy, needed when `objective.needs_reference`. critic: needed when the objective trains one.
    process: fills in process rewards, for an objective that reads them. correction: of advantages. ranks: the processes
    that share the passes through the models; each is given the samples of all, and comes to the same weights.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.reference = reference
        self.backward = backward
        self.critic = critic
        self.process = process
        self.correction = correction or Correction()
        self.ranks = ranks or Ranks()
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            _decay_groups(policy, config.weight_decay), lr=config.learning_rate, betas=config.betas, fused=True
        )
        self.old_head: Head | None = None
        self.blamed: list[Blame] = []

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
                self.process(self.ranks.share(counted))
                self.ranks.spread(counted, "process_reward")
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
            for part in self._microbatches(self.ranks.share(samples)):
                scores = self.policy.score([sample.row for sample in part])
                fill(part, old_logp=scores.logp, old_entropy=scores.entropy)
                if keep_hidden:
                    fill(part, target_hidden=scores.hidden)
        self.ranks.spread(samples, "old_logp", "old_entropy", "target_hidden")

    def _score_reference(self, samples: Sequence[Sample]) -> None:
        assert self.reference is not None
        keep_hidden = self.objective.exact_kl_target == "reference"
        with self.reference.evaluating():
            for part in self._microbatches(self.ranks.share(samples)):
                scores = self.reference.score([sample.row for sample in part])
                fill(part, ref_logp=scores.logp)
                if keep_hidden:
                    fill(part, target_hidden=scores.hidden)
        self.ranks.spread(samples, "ref_logp", "target_hidden")

    def _score_values(self, samples: Sequence[Sample]) -> None:
        if self.critic is None:
            return
        with torch.no_grad():
            for part in self._microbatches(self.ranks.share(samples)):
                fill(part, old_values=self.critic.values([sample.row for sample in part]))
        self.ranks.spread(samples, "old_values")

    def step(self, samples: Sequence[Sample], learning_rate: float) -> dict[str, float]:
        """One optimizer step on a mini-batch; -> metrics of the objective, `grad_norm`, `skipped`.

        The denominators count every sample of the mini-batch that is in the loss, also those left out of the forward
        passes. A step whose loss or gradient is not finite changes nothing (`skipped`), and `blamed` says why.
        """
        counted = [sample for sample in samples if sample.in_loss]
        active = [sample for sample in counted if self.contributes(sample)]
        totals = self._totals(counted, active)
        self.optimizer.zero_grad(set_to_none=False)
        parts, mismatches = [], []
        for part in self._microbatches(self.ranks.share(active)):
            batch = self._batch(part)
            if stack(part, "old_logp") is None and batch.old_entropy is not None:
                fill(part, old_logp=batch.old_logp, old_entropy=batch.old_entropy)  # for who looks at the rollout
            out = self.objective(batch, totals)
            self.backward(out.loss)
            parts.append((out.metrics, out.num_tokens))
            mismatches.append((measure(self.objective, batch, sampled_logps(part, batch.old_logp)), batch.num_tokens))
        parts, mismatches = (
            [entry for share in shares for entry in share]
            for shares in zip(*self.ranks.exchange((parts, mismatches)), strict=True)
        )
        metrics = combine_metrics(parts) | combine_metrics(mismatches)
        self.ranks.add_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)) if active else 0.0
        if self.critic is not None:
            self.ranks.add_gradients(list(self.critic.trained.values()))
            metrics["critic_grad_norm"] = self.critic.clip(self.config.max_grad_norm)
        finite = all(math.isfinite(x) for x in (norm, metrics.get("loss", 0.0), metrics.get("critic_grad_norm", 0.0)))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            if self.critic is not None:
                self.critic.step(learning_rate / self.config.learning_rate)
        self.blamed = (
            [] if finite else blame(active, self.objective.surrogate.pairs, lambda part: self._alone(part, totals))
        )
        self._zero_gradients()
        if finite:
            self.objective = self.objective.adapted(metrics)
        return metrics | {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped": float(not finite),
            "tokens": float(sum(sample.num_tokens for sample in counted)),
            "active_tokens": float(sum(tokens for _, tokens in mismatches)),
        }

    def _alone(self, samples: Sequence[Sample], totals: Totals) -> tuple[float, float]:
        """The loss of samples and the norm of its gradient, without those of the others of the step."""
        self._zero_gradients()
        out = self.objective(self._batch(samples), totals)
        self.backward(out.loss)
        parameters = [*self.parameters, *(self.critic.trained.values() if self.critic else ())]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return float(out.loss.detach()), float(torch.nn.utils.get_total_norm(gradients))

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()

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
            whole = self.objective.prepare(self._whole_batch(chosen_from))
            measured = self.objective.totals(whole)
        if whole.selected is None:
            return dataclasses.replace(totals, statistics=measured.statistics)
        fill(chosen_from, selected=whole.selected)
        return measured

    def _whole_batch(self, samples: Sequence[Sample]) -> TokenBatch:
        """One batch of all samples, in their order whatever the micro-batches and the processes that score them.

        A choice among tokens, by chance or between equals, then does not depend on those.
        """
        parts = self._microbatches(self.ranks.share(samples))
        meeting = "cpu" if self.ranks.size > 1 else self.policy.device
        scored = [self._batch(part).to(meeting) for part in parts]
        places = {id(sample): place for place, sample in enumerate(samples)}
        order = [places[id(sample)] for part in parts for sample in part]
        shares = self.ranks.exchange((scored, order))
        whole = TokenBatch.concatenate([batch for batches, _ in shares for batch in batches])
        position = torch.tensor([place for _, places in shares for place in places]).argsort()
        ordered = whole.select(position)
        return ordered.keep(torch.argsort(ordered.sequence, stable=True)).to(self.policy.device)

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
