"""Runs of the real trainer on however many processes a launcher starts: python -m torch.distributed.run ... FOLDER."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tepo.config import load_recipe
from tepo.train import train

SETTINGS = [
    "trainer.steps=5", "trainer.prompts_per_rollout=6", "trainer.responses_per_prompt=4",
    "trainer.updates_per_rollout=2", "trainer.learning_rate=2e-5", "trainer.warmup_steps=0",
    "trainer.tokens_per_microbatch=400", "data.test_problems=9", "evaluation.every=null", "evaluation.greedy=false",
    "evaluation.before=false", "evaluation.after=false", "checkpoint.every=null",
]  # fmt: skip
SHORT = "trainer.steps=2"
RUNS: dict[str, list[str]] = {
    "tepo": ["objective=tepo", "evaluation.before=true", "evaluation.after=true"],
    "grpo": ["objective=grpo"],
    "dapo": ["objective=dapo", "trainer.dynamic_sampling=true", "trainer.max_sampling_rounds=2"],
    "kl_cov": ["objective=kl_cov", "objective.share=0.05"],
    "clip_cov": ["objective=clip_cov", "objective.share=0.05", "objective.cov_low=0.01", SHORT],
    "ppo": ["objective=ppo", SHORT],
    "lora": ["objective=policy_kl", "model.lora.rank=4", SHORT],
    # One group a step: the second process has nothing to score; and each problem comes twice in a rollout.
    "one_group": ["objective=tepo", "trainer.prompts_per_rollout=2", "data.max_problems=1"],
}
"""Three groups a step are two for one process and one for the other."""


def record(folder: Path, name: str) -> list[torch.Tensor]:
    """A run; -> the gradients that its optimizers take, at every step."""
    gradients: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients.append(torch.cat([torch.zeros(0), *grads]))

    handle = register_optimizer_step_pre_hook(keep)
    try:
        recipe = load_recipe("arithmetic", [*SETTINGS, *RUNS[name], f"output={folder / name}"])
        train(recipe, console=Console(file=io.StringIO()))
    finally:
        handle.remove()
    return gradients


def main(folder: Path) -> None:
    """All runs, below `folder`; each process leaves its gradients in NAME.RANK.pt."""
    for name in RUNS:
        gradients = record(folder, name)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(gradients, folder / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
