"""How the seconds and the memory of a step grow with group size, response length, vocabulary and number of prompts.

usage: python benchmarks/growth.py [--plot benchmarks/growth.png] [--json]        needs the extra trl

One size is changed at a time, the others stay at 4 prompts of 96 tokens, 8 responses of 128 tokens and a vocabulary of
32,768, for a random Llama of 8 layers and width 256 in fp32. A step and its memory are those of `step.py`, with
gradient checkpointing off on both sides; each point is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import step
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tepo.config.recipe import ModelConfig
from tepo.data import Problem
from tepo.policy import load_model
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.sample import Sample

SIZES: dict[str, tuple[int, ...]] = {
    "responses": (2, 4, 8, 16, 32),
    "tokens": (32, 64, 128, 256, 512),
    "vocabulary": (8192, 16384, 32768, 65536, 131072),
    "prompts": (1, 2, 4, 8, 16),
}
BASE = {"responses": 8, "tokens": 128, "vocabulary": 32768, "prompts": 4}
NAMES = {
    "responses": "responses in a group",
    "tokens": "tokens of a response",
    "vocabulary": "vocabulary",
    "prompts": "prompts",
}
PROMPT = 96


def make_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip


def make_samples(sizes: dict[str, int]) -> list[Sample]:
    """Random tokens; half of each group is right."""
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(sizes["vocabulary"]) for _ in range(count))

    samples = []
    for group in range(sizes["prompts"]):
        prompt = ids(PROMPT)
        for i in range(sizes["responses"]):
            response = Response(ids(sizes["tokens"]), (0.0,) * sizes["tokens"], True)
            sample = Sample(
                Problem(str(group), "", ""), group, prompt, response, Verdict(Status.CORRECT, 1.0), float(i % 2)
            )
            sample.advantage = 1.0 - 2.0 * (i % 2)
            samples.append(sample)
    return samples


def measure_here(side: str, sizes: dict[str, int], threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    _, tokenizer = load_model(ModelConfig(name="embedded"))
    arguments = argparse.Namespace(
        dtype="fp32", device="cpu", tokens_per_microbatch=1024, rows_per_microbatch=min(8, sizes["responses"]),
        prompts=sizes["prompts"], responses=sizes["responses"], lengths=(sizes["tokens"],) * 2,
        gradient_checkpointing="off",
    )  # fmt: skip
    make = step.our_step if side == "ours" else step.trl_step
    run = make(arguments, make_model(sizes["vocabulary"]), tokenizer, make_samples(sizes))
    memory = step.peak_memory(run, "cpu")
    return {"mib": memory, "seconds": min(step.timed(run, "cpu") for _ in range(2))}


def measure(side: str, sizes: dict[str, int], threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--threads", str(threads), "--one", json.dumps([side, sizes])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw_plot(rows: list[dict[str, Any]], path: Path) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=4, subplot_titles=[NAMES[name] for name in SIZES] + [""] * 4, vertical_spacing=0.08
    )
    colours = {"trl": "#b35806", "ours": "#2166ac"}
    for column, name in enumerate(SIZES, 1):
        for row, quantity in enumerate(("seconds", "mib"), 1):
            for side, colour in colours.items():
                points = [entry for entry in rows if entry["side"] == side and entry["varied"] == name]
                figure.add_scatter(
                    x=[entry[name] for entry in points], y=[entry[quantity] for entry in points], name=side,
                    mode="lines+markers", line={"color": colour}, showlegend=column == row == 1, row=row, col=column,
                )  # fmt: skip
            figure.update_xaxes(type="log", dtick=0.30103, row=row, col=column, tickvals=SIZES[name])
            figure.update_yaxes(type="log", row=row, col=column)
    figure.update_yaxes(title_text="seconds a step", row=1, col=1)
    figure.update_yaxes(title_text="MiB beyond weights and gradients", row=2, col=1)
    figure.update_layout(template="plotly_white", width=1200, height=640, legend={"orientation": "h", "y": -0.08})
    figure.write_image(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="an image file to draw; needs kaleido and a browser")
    parser.add_argument("--from", dest="source", type=Path, help="draw what --json printed before")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        side, sizes = json.loads(arguments.one)
        print(json.dumps(measure_here(side, sizes, arguments.threads)))
        return
    rows: list[dict[str, Any]] = []
    if arguments.source is not None:
        rows = json.loads(arguments.source.read_text())["rows"]
    else:
        for name, values in SIZES.items():
            for value in values:
                for side in ("trl", "ours"):
                    sizes = BASE | {name: value}
                    rows.append({"side": side, "varied": name, **sizes, **measure(side, sizes, arguments.threads)})
                    if not arguments.json:
                        print(rows[-1], flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows}))
    if arguments.plot is not None:
        draw_plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
