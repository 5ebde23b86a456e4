"""verl's synchronous trainer with an objective of ours: `trainer.v1.trainer_mode=tepo`.

verl's own steps, and three of ours: the loss in the engine is the objective, which sees entropies and the
reference; the rows of a rollout's first update are marked, so that their old scores are exact; advantages that are made
of the old policy's scores are made here.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from tepo.integrations.verl.losses import ObjectiveAdvantages, ObjectiveLoss, comparable, group_labels
from tepo.integrations.verl.settings import objective_of
from tepo.objectives import Objective, TokenBatch, at_rollout
from tepo.objectives.own import is_own


@register_trainer("tepo")
class ObjectivePPOTrainer(PPOTrainerSync):  # type: ignore[misc, unused-ignore]
    """PPOTrainerSync with the objective of `actor_rollout_ref.actor.policy_loss` (`ObjectiveLossConfig`)."""

    def __init__(self, config: DictConfig) -> None:
        self.actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.objective: Objective = objective_of(self.actor_config.policy_loss)
        self.loss = ObjectiveLoss(self.objective, self.actor_config)
        correction = config.algorithm.get("rollout_correction") or {}
        if self.objective.advantage.needs and (correction.get("rollout_is") or correction.get("rollout_rs")):
            raise ValueError(
                f"algorithm.rollout_correction: the advantages of objective {self.objective.name} are made of old "
                "scores, in a step of ours that verl's correction is no part of; leave it out"
            )
        if is_own(config.algorithm.adv_estimator):
            register_adv_est(config.algorithm.adv_estimator)(ObjectiveAdvantages(config.algorithm.adv_estimator))
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        self.trainer_mode = "sync"  # what verl asks for where its trainers differ: this one is synchronous
        return super()._build_replay_buffer()

    def on_init_end(self) -> None:
        self.actor_rollout_wg.set_loss_fn(self.loss)
        super().on_init_end()

    def on_step_begin(self) -> None:
        """Scheduled options as they are in this rollout."""
        super().on_step_begin()
        now = at_rollout(self.objective, self.global_steps)
        if now != self.loss.objective:
            self.loss = ObjectiveLoss(now, self.actor_config)
            self.actor_rollout_wg.set_loss_fn(self.loss)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.objective.advantage.needs:
            return super()._compute_advantage(batch, metrics)
        fields = ["uid", "response_mask", "rm_scores", "old_log_probs", "entropy"]
        fields += ["ref_log_prob"] if self.objective.needs_reference else []
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        mask, labels = data["response_mask"], group_labels(data.pop("uid").tolist())
        advantages = token_advantages(self.objective, data.to_padded_tensor(), labels)
        nested = response_to_nested(advantages, mask)
        made = TensorDict({"advantages": nested, "returns": nested}, batch_size=len(batch))
        stored: KVBatchMeta = transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=made)
        return stored

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        actor = self.config.actor_rollout_ref.actor
        if actor.ppo_epochs == 1 and not actor.shuffle:
            ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            responses = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
            data = transfer_queue.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
            )
            marked = first_updates(data["response_mask"], ranks, responses)
            # The batch that comes back lists the field, and workers are given those that are listed.
            batch = transfer_queue.kv_batch_put(
                keys=batch.keys,
                partition_id=batch.partition_id,
                fields=TensorDict({"on_policy": marked}, batch_size=len(batch)),
            )
        return super()._update_actor(batch, metrics)


def first_updates(mask: Tensor, ranks: int, mini_batch: int) -> Tensor:
    """Nested [B, response] like `mask`: 1 for the responses of the first of a rollout's mini-batches, 0 for the others.

    verl gives each rank an equal part of the batch, in its order, and cuts mini-batches from the front of each part.
    """
    share, first = mask.size(0) // ranks, mini_batch // ranks
    rows = mask.unbind()
    marks = [torch.full_like(row, float(i % share < first), dtype=torch.float32) for i, row in enumerate(rows)]
    return torch.nested.as_nested_tensor(marks, layout=torch.jagged)


def token_advantages(objective: Objective, data: TensorDict, groups: Tensor) -> Tensor:
    """[B, T] advantages that are made of the old policy's scores; padded fields of verl's batch; groups [B]."""
    mask, old = data["response_mask"].bool(), data["old_log_probs"]
    rows = torch.nonzero(comparable(objective, groups, mask.any(dim=1))).flatten()
    reference = data.get("ref_log_prob", None)
    batch = TokenBatch.from_padded(
        old[rows], old[rows], mask[rows], rewards=data["rm_scores"].sum(dim=1)[rows], groups=groups[rows],
        old_entropy=data["entropy"][rows], ref_logp=None if reference is None else reference[rows],
    )  # fmt: skip
    kept = torch.zeros_like(mask)
    kept[rows] = mask[rows]
    return torch.zeros_like(old, dtype=torch.float32).masked_scatter(kept, objective.token_advantages(batch).float())
