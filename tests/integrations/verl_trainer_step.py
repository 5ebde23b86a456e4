"""A rollout's part of a step of ObjectivePPOTrainer, from the old scores to the update, on a CPU.

    python verl_trainer_step.py INPUT OUTPUT

The data lie in a real TransferQueue on a local Ray; the actor worker of verl_cpu.py takes them from there. Not here:
vLLM, which samples, and Ray's worker groups, in whose place the one worker is called directly.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch
import transfer_queue
import verl_cpu
from omegaconf import open_dict
from tensordict import NonTensorStack
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from tepo.integrations.verl.trainer import ObjectivePPOTrainer


class OneWorker:
    """What the trainer calls of a worker group, on one worker; keeps the metrics of the update."""

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self._dispatch_info = {"actor": [0]}
        self.worker = worker
        self.set_loss_fn = worker.set_loss_fn
        self.compute_log_prob = worker.compute_log_prob

    def update_actor(self, batch: Any) -> Any:
        output = self.worker.update_actor(batch)
        self.metrics = {name: value for name, value in tu.get(output, "metrics").items() if isinstance(value, list)}
        return output


def step(case: dict[str, Any]) -> dict[str, Any]:
    config = verl_cpu.compose(*case["overrides"])
    with open_dict(config):
        config.transfer_queue.enable = True
        config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    transfer_queue.init(config.transfer_queue)
    trainer = ObjectivePPOTrainer(config)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    trainer.actor_rollout_wg = OneWorker(worker)
    trainer.actor_rollout_wg.set_loss_fn(trainer.loss)
    trainer.global_steps = 1
    rows = case["rows"]
    data = verl_cpu.batch_of(rows)
    del data["advantages"]
    data["rm_scores"] = verl_cpu.nested([row["scores"] for row in rows])
    data["rollout_log_probs"] = verl_cpu.nested([torch.zeros(len(row["response"])) for row in rows])
    data["uid"] = NonTensorStack(*[f"prompt{row['group']}" for row in rows])
    keys = [f"prompt{row['group']}_{number}_0" for number, row in enumerate(rows)]
    tags = [{"seq_len": 20, "is_padding": False} for _ in rows]
    batch = transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
    metrics: dict[str, Any] = {}
    recorded = verl_cpu.Recorded(worker.actor.engine)
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    stored = transfer_queue.kv_batch_get(
        keys=keys, partition_id="train", select_fields=["old_log_probs", "entropy", "advantages"]
    )
    kept = {name: [row.clone() for row in stored[name].unbind()] for name in stored.keys()}  # noqa: SIM118
    trainer._update_actor(batch, metrics)
    transfer_queue.close()
    return {
        "metrics": {name: [float(x) for x in values] for name, values in trainer.actor_rollout_wg.metrics.items()},
        "weights": recorded.weights, "gradients": recorded.gradients, "kept": kept, "mode": trainer.trainer_mode,
        "buffer": type(trainer.replay_buffer).__name__,
    }  # fmt: skip


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    torch.save({name: step(case) for name, case in torch.load(sys.argv[1], weights_only=False).items()}, sys.argv[2])
