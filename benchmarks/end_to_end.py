"""Seconds of an optimizer step, with its rollout: our trainer and TRL's GRPOTrainer at equal settings, in one run.

usage: python benchmarks/end_to_end.py [--model smollm2] [--steps 4] [--max-tokens 128] [--threads 2] [--json]
Needs trl==1.16.0 beside tepo. Both train the same model with DAPO's loss in bf16 on the same word problems: rollouts of
8 prompts x 8 responses, 2 updates from each, micro-batches of 8 responses. The verdict is the parity of a checksum of
the text: every group has both, so that neither trainer can leave groups out, and a pass over all responses is needed.
`--json` prints one line with `speedup`, the ratio of the seconds, and the split of each trainer's step.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rollout import word_problem

PROMPTS, RESPONSES, UPDATES, MICROBATCH = 8, 8, 2, 8


def judge(response: str, problem: object) -> bool:
    """Right or wrong by chance, the same for the same text."""
    return zlib.crc32(response.encode()) % 2 == 0


def problems(steps: int) -> list[str]:
    return [word_problem(number) for number in range(PROMPTS * steps // UPDATES)]


def run_tepo(model: str, steps: int, limit: int, folder: Path) -> dict[str, float]:
    """Seconds a step, in all and by part, and tokens a response."""
    from rich.console import Console

    from tepo.config import load_recipe
    from tepo.train import train

    data = folder / "problems.jsonl"
    texts = [*problems(steps), "one held out"]
    data.write_text("".join(json.dumps({"problem": text, "answer": "0"}) + "\n" for text in texts))
    recipe = load_recipe(
        None,
        [
            f"output={folder / 'run'}", f"model.name={model}", "model.dtype=bf16", f"data={data}",
            "data.template=chat", "data.test_problems=1", "reward.verifier=end_to_end:judge", "objective=dapo",
            f"rollout.max_response_tokens={limit}", f"trainer.steps={steps}", f"trainer.prompts_per_rollout={PROMPTS}",
            f"trainer.responses_per_prompt={RESPONSES}", f"trainer.updates_per_rollout={UPDATES}",
            f"trainer.tokens_per_microbatch={MICROBATCH * (limit + 96)}", "evaluation.before=false",
            "evaluation.after=false",
        ],
    )  # fmt: skip
    train(recipe, console=Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def mean(*names: str) -> float:
        return sum(line.get(f"seconds/{name}", 0.0) for line in lines for name in names) / steps

    split = {
        "sampling": mean("sampling", "weights"),
        "verdicts": mean("verdicts"),
        "old_logps": mean("old_scores"),
        "update": mean("update"),
    }
    return {"step": sum(split.values()), **split, "tokens": sum(line["response/tokens"] for line in lines) / steps}


class Clock:
    """Adds up the seconds spent in methods of an object."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str) -> None:
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[method] = self.seconds.get(method, 0.0) + time.perf_counter() - began

        setattr(owner, method, timed)


def run_trl(model: str, steps: int, limit: int, folder: Path) -> dict[str, float]:
    """The same of TRL."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tepo.config.recipe import ModelConfig
    from tepo.policy import load_model

    loaded, tokenizer = load_model(ModelConfig(name=model))
    tokenizer.padding_side = "left"
    accumulation = PROMPTS * RESPONSES // UPDATES // MICROBATCH
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=MICROBATCH, gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * UPDATES, num_generations=RESPONSES, max_completion_length=limit,
        temperature=1.0, top_k=0, top_p=1.0, loss_type="dapo", beta=0.0, epsilon=0.2, epsilon_high=0.28,
        learning_rate=1e-6, lr_scheduler_type="constant", max_steps=steps, gradient_checkpointing=False, seed=0,
        dataloader_pin_memory=False,
    )  # fmt: skip

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(judge(messages[0]["content"], None)) for messages in completions]

    trainer = GRPOTrainer(
        model=loaded,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in problems(steps)]),
        processing_class=tokenizer,
    )
    clock = Clock()
    for method in ("_generate", "_calculate_rewards", "_generate_and_score_completions", "training_step"):
        clock.watch(trainer, method)
    clock.watch(trainer, "_inner_training_loop")
    trainer.train()
    seconds = {name: value / steps for name, value in clock.seconds.items()}
    rollout, total = seconds["_generate_and_score_completions"], seconds["_inner_training_loop"]
    key = "completions/mean_length"
    lengths = [entry[key] for entry in trainer.state.log_history if key in entry]
    return {
        "step": total,
        "sampling": seconds["_generate"],
        "verdicts": seconds["_calculate_rewards"],
        "old_logps": rollout - seconds["_generate"] - seconds["_calculate_rewards"],
        "update": total - rollout,
        "tokens": sum(lengths) / max(len(lengths), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as model.name in a recipe")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps, a multiple of 2")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {"model": arguments.model, "threads": arguments.threads, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in (("tepo", run_tepo), ("trl", run_trl)):
            result[name] = run(arguments.model, arguments.steps, arguments.max_tokens, Path(folder))
            gc.collect()
    result["speedup"] = round(result["trl"]["step"] / result["tepo"]["step"], 3)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'seconds a step':14} {'tepo':>8} {'TRL':>8}")
    for key in result["tepo"]:
        print(f"{key:14} {result['tepo'][key]:8.2f} {result['trl'][key]:8.2f}")
    print(f"{'speedup':14} {result['speedup']:8.2f}")


if __name__ == "__main__":
    main()
