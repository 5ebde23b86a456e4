"""One optimizer step's loss and backward pass: TRL's own and ours, on the same model, tokens and advantages.

usage: python benchmarks/step.py [--dtype fp32|bf16] [--json] [...]        needs the extras smollm2 and trl

Both compute GRPO (standardized advantages, no KL term) of the same rows, in one process and in turn. TRL's side is
GRPOTrainer._compute_loss on micro-batches as its own collation pads them; ours is Updater.step without the optimizer.
TRL recomputes every layer in its backward pass unless told not to, and ours does not: `--gradient-checkpointing`
says whether each goes as it comes, or both one way.
Memory is measured in a process of its own for each side: the most that was resident during the step (VmHWM, which is
reset before) less what is resident before it, that is weights and gradients; no optimizer has state yet.
Utilization is the time that the step's matrix products would take at the speed of a large one, measured here, over the
time of the step. Products are counted as they are run (2mnk), with what is computed again in the backward pass of the
output layer; those inside attention are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from tepo.config.recipe import ModelConfig, TrainerConfig
from tepo.data import Problem
from tepo.objectives import get_objective
from tepo.policy import Policy, load_model
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.sample import Sample
from tepo.train.update import Updater

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
OBJECTIVE = get_objective("grpo", ref_kl=None)
Step = Callable[[], list[Tensor]]
"""Computes the gradients of all parameters anew."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as model.name in a recipe")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--responses", type=int, default=8, help="to each prompt")
    parser.add_argument("--lengths", type=int, nargs=2, default=(40, 160), help="shortest and longest response")
    parser.add_argument("--zero-variance", type=float, default=0.0, help="share of the groups without a signal")
    parser.add_argument("--problems", type=Path, help=".jsonl with `problem`; without it, problems made here")
    parser.add_argument(
        "--gradient-checkpointing",
        choices=("defaults", "on", "off"),
        default="defaults",
        help="defaults: on in TRL and off in ours, as each comes; otherwise on both sides",
    )
    parser.add_argument("--tokens-per-microbatch", type=int, default=1024, help="ours")
    parser.add_argument("--rows-per-microbatch", type=int, default=8, help="TRL's; 8 is its default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--memory-of", choices=("ours", "trl"), help=argparse.SUPPRESS)
    return parser.parse_args()


def problems(arguments: argparse.Namespace) -> list[str]:
    """Texts of the length of GSM8K's, or those of a file."""
    if arguments.problems is not None:
        lines = arguments.problems.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
        return [json.loads(line)["problem"] for line in lines]
    draw = random.Random(arguments.seed)
    names, things = (
        ["Maya", "Tom", "Priya", "Jonas", "Lena", "Omar"],
        ["pencils", "apples", "stamps", "cards", "shells"],
    )
    texts = []
    for _ in range(arguments.prompts):
        name, thing = draw.choice(names), draw.choice(things)
        sentences = [
            f"On day {day} {name} buys {draw.randint(2, 40)} {thing} and gives {draw.randint(1, 9)} of them away."
            for day in range(1, draw.randint(3, 5))
        ]
        texts.append(" ".join([*sentences, f"How many {thing} does {name} have at the end?"]))
    return texts


def make_samples(arguments: argparse.Namespace, tokenizer: Any) -> list[Sample]:
    """Groups of responses of random tokens; rewards 0 and 1 in turn, in the groups without a signal 1."""
    draw = random.Random(arguments.seed)
    samples = []
    silent = round(arguments.zero_variance * arguments.prompts)
    for group, text in enumerate(problems(arguments)):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        for i in range(arguments.responses):
            ids = tuple(draw.randrange(100, 10_000) for _ in range(draw.randint(*arguments.lengths)))
            reward = 1.0 if group < silent else float(i % 2)
            samples.append(
                Sample(
                    Problem(str(group), text, ""), group, tuple(rendered["input_ids"]),
                    Response(ids, (0.0,) * len(ids), True), Verdict(Status.CORRECT, 1.0), reward,
                )
            )  # fmt: skip
    rewards, groups = (torch.tensor([getattr(sample, name) for sample in samples]) for name in ("reward", "group"))
    for sample, advantage in zip(samples, OBJECTIVE.advantages(rewards.double(), groups).tolist(), strict=True):
        sample.advantage = advantage
    return samples


def our_step(arguments: argparse.Namespace, model: Any, tokenizer: Any, samples: list[Sample]) -> Step:
    policy = Policy(model, tokenizer, autocast=DTYPES[arguments.dtype])
    assert policy.unpacked_because is None, policy.unpacked_because
    config = TrainerConfig(tokens_per_microbatch=arguments.tokens_per_microbatch, max_grad_norm=1e9)
    updater = Updater(policy, OBJECTIVE, config)
    updater.prepare(samples, [samples])
    updater.optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]
    updater.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]

    def step() -> list[Tensor]:
        _zero(updater.parameters)
        updater.step(samples, 1e-6)
        return [parameter.grad for parameter in updater.parameters]  # type: ignore[misc]

    _zero(updater.parameters)
    return step


def trl_step(arguments: argparse.Namespace, model: Any, tokenizer: Any, samples: list[Sample]) -> Step:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = arguments.rows_per_microbatch
    parts = len(samples) // rows
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=arguments.device == "cpu", bf16=arguments.dtype == "bf16",
        per_device_train_batch_size=rows, gradient_accumulation_steps=parts, num_generations=arguments.responses,
        loss_type="grpo", beta=0.0, report_to="none", gradient_checkpointing=arguments.gradient_checkpointing != "off",
        max_completion_length=arguments.lengths[1],
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["unused"] * arguments.prompts})
    trainer = GRPOTrainer(model, lambda **_: [], config, data, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = parts
    if config.gradient_checkpointing:  # as Trainer.train does
        model.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    inputs = padded(samples, tokenizer.pad_token_id, arguments.device)
    _zero(model.parameters())

    def step() -> list[Tensor]:
        _zero(model.parameters())
        model.train()
        for start in range(0, len(samples), rows):
            part = {name: values[start : start + rows] for name, values in inputs.items()}
            trainer.compute_loss(model, part).backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


def padded(samples: Sequence[Sample], pad: int, device: str) -> dict[str, Tensor]:
    """As TRL pads a generation batch: prompts on the left, completions on the right, all rows to the same width."""

    def side(rows: list[tuple[int, ...]], name: str, *, left: bool) -> dict[str, Tensor]:
        options: Any = {"batch_first": True, "padding_side": "left" if left else "right"}
        ids = pad_sequence([torch.tensor(row) for row in rows], padding_value=pad, **options)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], **options)
        return {f"{name}_ids": ids.to(device), f"{name}_mask": mask.to(device)}

    advantages = torch.tensor([sample.advantage for sample in samples], device=device)
    return {
        **side([sample.prompt for sample in samples], "prompt", left=True),
        **side([sample.response.ids for sample in samples], "completion", left=False),
        "advantages": advantages,
    }


def _zero(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_()


class MatrixProducts(TorchDispatchMode):
    """Counts the operations of matrix products, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.flops[out.dtype] += 2 * out.numel() * args[-2].shape[-1]
        return out


def product_rate(dtype: torch.dtype, device: str, size: int = 2048) -> float:
    """Operations per second of a square matrix product, the best of some."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = min(timed(lambda: a @ b, device) for _ in range(8))
    return 2 * size**3 / seconds


def timed(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_memory(step: Step, device: str) -> float:
    """MiB that a step needs beyond weights and gradients."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def memory_in_own_process(side: str) -> float:
    command = [sys.executable, *sys.argv, "--memory-of", side]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def load(arguments: argparse.Namespace, *, ours: bool) -> tuple[Any, Any, list[Sample]]:
    """Model, tokenizer, samples. TRL turns gradient checkpointing on by itself."""
    config = ModelConfig(name=arguments.model, gradient_checkpointing=ours and arguments.gradient_checkpointing == "on")
    model, tokenizer = load_model(config)
    return model.to(arguments.device), tokenizer, make_samples(arguments, tokenizer)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer, samples = load(arguments, ours=True)
    ours, device = our_step(arguments, model, tokenizer, samples), arguments.device
    trl = trl_step(arguments, *load(arguments, ours=False))
    with MatrixProducts() as products:
        mine = torch.cat([gradient.flatten() for gradient in ours()])
    theirs = torch.cat([gradient.flatten() for gradient in trl()])
    error = float((mine - theirs).norm() / theirs.norm())
    del mine, theirs
    times: dict[str, list[float]] = {"trl": [], "ours": []}
    for _ in range(arguments.repetitions):
        times["trl"].append(timed(trl, device))
        times["ours"].append(timed(ours, device))
    rates = {dtype: product_rate(dtype, device) for dtype in products.flops}
    seconds = {side: statistics.median(values) for side, values in times.items()}
    memory = {side: memory_in_own_process(side) for side in times}
    return {
        "dtype": arguments.dtype,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "zero_variance": arguments.zero_variance,
        "speedup": seconds["trl"] / seconds["ours"],
        "memory_ratio": memory["ours"] / memory["trl"],
        "gradient_error": error,
        "utilization": sum(flops / rates[dtype] for dtype, flops in products.flops.items()) / seconds["ours"],
        "seconds": times,
        "memory_mib": memory,
        "matrix_products": {
            str(dtype).removeprefix("torch."): {"teraflop": flops / 1e12, "teraflop_per_second": rates[dtype] / 1e12}
            for dtype, flops in products.flops.items()
        },
        "prompt_tokens": [len(sample.prompt) for sample in samples[:: arguments.responses]],
        "response_tokens": sum(sample.num_tokens for sample in samples),
    }


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of is not None:
        make = {"ours": our_step, "trl": trl_step}[arguments.memory_of]
        step = make(arguments, *load(arguments, ours=arguments.memory_of == "ours"))
        print(peak_memory(step, arguments.device))
        return
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<16}{value if not isinstance(value, float) else f'{value:.3g}'}")


if __name__ == "__main__":
    main()
