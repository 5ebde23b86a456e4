"""One process of test_two_processes_train_as_one: argv is the file for the weights and the rows of a process.

The responses are the same however many processes there are: drawn from a seed made of the prompt and the row.
"""

import random
import sys
import tempfile
from typing import Any

import torch
from test_trl import problems
from trl import GRPOConfig

from tepo.config.recipe import ModelConfig
from tepo.integrations.trl import ObjectiveTrainer
from tepo.policy import load_model


def rollout(prompts: list[str], trainer: ObjectiveTrainer) -> dict[str, Any]:
    first = trainer.accelerator.process_index * len(prompts)
    completions = []
    for row, prompt in enumerate(prompts, start=first):
        draw = random.Random(f"{prompt} {row}")
        completions.append([draw.randrange(16) for _ in range(draw.randint(1, 12))])
    given = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": given, "completion_ids": completions, "logprobs": [[0.0] * len(ids) for ids in completions]}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def main() -> None:
    target, rows = sys.argv[1], int(sys.argv[2])
    model, tokenizer = load_model(ModelConfig())
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=rows, num_generations=8, max_completion_length=12,
        learning_rate=0.003, lr_scheduler_type="constant", max_grad_norm=1e9, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", gradient_checkpointing=False, disable_tqdm=True, num_iterations=2,
        steps_per_generation=1, max_steps=4, gradient_accumulation_steps=1, optim="sgd",
    )  # fmt: skip
    trainer = ObjectiveTrainer(
        model, reward, config, train_dataset=problems(), processing_class=tokenizer, rollout_func=rollout,
        objective="tepo", options={"kl_mask": {"beta": 0.5}},
    )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), target)


main()
