"""verl's actor worker on a CPU: `update_actor` of its FSDP engine with gloo, in processes of its own.

    python verl_cpu.py INPUT OUTPUT      as rank RANK of WORLD_SIZE

What is not verl's here: a platform for the CPU (verl takes platforms as plugins and brings none for it) and the
engine's entry for that device in verl's registry. Worker, engine, FSDP2, nested tensors and micro-batches are verl's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
sys.modules["trl"] = None  # type: ignore[assignment]  # verl 0.9.1's engine fails where a TRL newer than it knows is there

import torch  # noqa: E402
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402

CPU_MODULE: Any = ModuleType("torch_cpu_as_a_device")
CPU_MODULE.__dict__.update(torch.cpu.__dict__)
for no_memory in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    setattr(CPU_MODULE, no_memory, lambda *_: 0)
CPU_MODULE.mem_get_info = lambda *_: (1, 1)
CPU_MODULE.get_device_name = lambda *_: "CPU"
CPU_MODULE.empty_cache = lambda: None
CPU_MODULE.set_device = lambda *_: None
CPU_MODULE.is_available = lambda: False


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device without an index."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CPU_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

from tepo.integrations.verl.losses import ObjectiveLoss  # noqa: E402
from tepo.integrations.verl.settings import objective_of  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def compose(*overrides: str) -> Any:
    """verl's own configuration, composed by hydra."""
    from hydra import compose as composed
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return composed("ppo_trainer", overrides=list(overrides))


class Recorded:
    """The weights before, and the gradient in, each optimizer step of an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        step = engine.optimizer.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.weights.append(self.whole(lambda parameter: parameter))
            self.gradients.append(self.whole(lambda parameter: parameter.grad))
            return step(*args, **kwargs)

        engine.optimizer.step = stepped

    def whole(self, part: Any) -> dict[str, torch.Tensor]:
        named = self.engine.module.named_parameters()
        return {name: part(parameter).detach().full_tensor().clone() for name, parameter in named}


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of(rows: list[dict[str, torch.Tensor]]) -> TensorDict:
    """As verl's trainer hands it to a worker: nested over prompt and response, or over the response."""
    ids = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    fields = {
        "prompts": nested([row["prompt"] for row in rows]),
        "responses": nested([row["response"] for row in rows]),
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(len(row)) for row in ids]),
        "response_mask": nested([row["mask"] for row in rows]),
        "loss_mask": nested([torch.cat([torch.zeros_like(row["prompt"]), row["mask"]]) for row in rows]),
        "advantages": nested([row["advantages"] for row in rows]),
    }
    if "ref_log_prob" in rows[0]:
        fields["ref_log_prob"] = nested([row["ref_log_prob"] for row in rows])
    return TensorDict(fields, batch_size=len(rows))


def run(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """One rollout through the worker: old scores by its own pass, then `update_actor` on its mini-batches."""
    config = compose(*case["overrides"])
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    if case["whole_batch"]:
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        worker.set_loss_fn(ObjectiveLoss(objective_of(actor.policy_loss), actor))
    size = len(case["rows"]) // world
    data = batch_of(case["rows"][rank * size : (rank + 1) * size])
    scored = data.clone()
    temperature = config.actor_rollout_ref.rollout.temperature
    tu.assign_non_tensor(scored, calculate_entropy=True, compute_loss=False, temperature=temperature)
    scores = worker.compute_log_prob(scored)
    data["old_log_probs"] = response_from_nested(scores["log_probs"], data["response_mask"])
    data["entropy"] = response_from_nested(scores["entropy"], data["response_mask"])
    old = {name: [row.clone() for row in data[name].unbind()] for name in ("old_log_probs", "entropy")}
    if case["on_policy"] is not None:
        marked = torch.tensor(case["on_policy"][rank * size : (rank + 1) * size])
        data["on_policy"] = nested([torch.full_like(row, m) for row, m in zip(old["entropy"], marked, strict=True)])
    recorded = Recorded(worker.actor.engine)
    mini = case["mini_batch"]
    actor = config.actor_rollout_ref.actor
    tu.assign_non_tensor(
        data, calculate_entropy=actor.calculate_entropy, global_batch_size=mini, mini_batch_size=mini, epochs=1,
        seed=42, dataloader_kwargs={"shuffle": False}, temperature=temperature, distillation_use_topk=False,
        distillation_only=False,
    )  # fmt: skip
    output = worker.update_actor(data)
    metrics = tu.get(output, "metrics")
    metrics = {name: [float(x) for x in value] if isinstance(value, list) else value for name, value in metrics.items()}
    return {"weights": recorded.weights, "gradients": recorded.gradients, "metrics": metrics, "old": old}


def main(given: str, wanted: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")  # verl's worker takes the group that is there
    cases = torch.load(given, weights_only=False)
    results = {name: run(case, rank, world) for name, case in cases.items()}
    torch.save(results, f"{wanted}.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
