"""Tokens per second of the embedded engine and of transformers' `generate`, and of vLLM where it is installed.

usage: python benchmarks/rollout.py [--model smollm2] [--prompts 4] [--responses 8] [--max-tokens 256] [--rounds 2]
           [--threads 2] [--cpu-time] [--skip-greedy] [--json]
One model in bf16, the same word problems (made here), sampled at temperature 1 over the whole vocabulary; only real
tokens count. The engines take turns, and the best round of each counts. Greedy answers are compared in fp32: in bf16
rounding decides between two likely tokens, and another order of additions rounds otherwise.
--cpu-time counts this process's seconds on the cores instead of those on the clock: for a machine that does other work,
with one thread. `--json` prints one line with `speedup` and `greedy_equal` (all tokens of all answers).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tepo.config.recipe import ModelConfig
from tepo.policy import Policy, load_model
from tepo.rollout import Sampling, TransformersEngine

NAMES = ["Lily", "Tom", "Aisha", "Marco", "Wei", "Nora"]
THINGS = ["pencils", "apples", "stickers", "marbles", "books", "shells"]


def word_problem(number: int) -> str:
    """A problem of the kind that GSM8K has, the same one for the same number."""
    draw = random.Random(number)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    boxes, each, given, more = (draw.randint(3, 40) for _ in range(4))
    return (
        f"{name} has {boxes} boxes with {each} {thing} each, gives {given} {thing} to a friend, and then buys {more} "
        f"more boxes of the same size and shares everything equally among {draw.randint(2, 6)} children. How many "
        f"{thing} does each child get, and how many are left? Think step by step and explain every step."
    )


def render(policy: Policy, count: int) -> list[list[int]]:
    """Prompts as token ids, in the model's chat template if it has one."""
    tokenizer: Any = policy.tokenizer
    texts = [word_problem(number) for number in range(count)]
    if tokenizer.chat_template is None:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]


def plain_generate(
    model: PreTrainedModel, policy: Policy, prompts: list[list[int]], count: int, limit: int, *, greedy: bool
) -> list[list[int]]:
    """What transformers gives: token ids of `count` responses to each prompt, cut behind their end tokens."""
    width = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(count)]
    ids = torch.tensor([[policy.pad_token] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    generate: Any = model.generate
    with torch.no_grad():
        whole = generate(
            ids,
            attention_mask=mask,
            max_new_tokens=limit,
            eos_token_id=sorted(policy.end_tokens),
            pad_token_id=policy.pad_token,
            **how,
        )
    return [_cut(row, policy.end_tokens) for row in whole[:, width:].tolist()]


def _cut(ids: list[int], ends: frozenset[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:end]


def timed(sample: Callable[[int], list[list[int]]], seed: int, clock: Callable[[], float]) -> tuple[float, list[int]]:
    """Tokens per second and the lengths of the responses."""
    began = clock()
    lengths = [len(ids) for ids in sample(seed)]
    return sum(lengths) / (clock() - began), lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as model.name in a recipe")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--responses", type=int, default=8, help="to each prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--skip-greedy", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts_count, count, limit = arguments.prompts, arguments.responses, arguments.max_tokens

    model, tokenizer = load_model(ModelConfig(name=arguments.model))
    policy = Policy(model, tokenizer, autocast=torch.bfloat16)
    prompts = render(policy, prompts_count)
    engine = TransformersEngine(policy)
    result: dict[str, Any] = {"model": arguments.model, "threads": arguments.threads}

    if not arguments.skip_greedy:
        exact = Policy(model, tokenizer)
        ours = [list(group[0].ids) for group in TransformersEngine(exact).generate(prompts, 1, Sampling(0.0, limit), 0)]
        theirs = plain_generate(model, exact, prompts, 1, limit, greedy=True)
        result["greedy_equal"] = ours == theirs
        result["greedy_tokens"] = sum(map(len, ours))

    half, _ = load_model(ModelConfig(name=arguments.model))
    half.to(torch.bfloat16)  # type: ignore[call-arg]
    half.eval()
    contestants: dict[str, Callable[[int], list[list[int]]]] = {
        "generate": lambda seed: (
            torch.manual_seed(seed),
            plain_generate(half, policy, prompts, count, limit, greedy=False),
        )[1],
        "tepo": lambda seed: [
            list(response.ids)
            for group in engine.generate(prompts, count, Sampling(1.0, limit), seed)
            for response in group
        ],
    }
    if importlib.util.find_spec("vllm") is not None:
        contestants |= vllm_contestants(policy, prompts, count, limit)
    engine.generate(prompts, 1, Sampling(1.0, 2), 0)  # what the first call alone does
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for seed in range(arguments.rounds):
        for name, sample in contestants.items():
            rate, lengths = timed(sample, seed, time.process_time if arguments.cpu_time else time.perf_counter)
            rates[name].append(rate)
            result[f"{name}_lengths"] = [min(lengths), sum(lengths) / len(lengths), max(lengths)]
    for name, seen in rates.items():
        result[f"{name}_tokens_per_second"] = round(max(seen), 1)
    result["speedup"] = round(max(rates["tepo"]) / max(rates["generate"]), 3)
    if "vllm" in rates:
        result["vllm_engine_share"] = round(max(rates["tepo_vllm"]) / max(rates["vllm"]), 3)
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:28} {value}")


def vllm_contestants(
    policy: Policy, prompts: list[list[int]], count: int, limit: int
) -> dict[str, Callable[[int], list[list[int]]]]:
    """vLLM by itself, and our engine around it; they share one instance."""
    from tepo.rollout.vllm import VllmEngine

    engine = VllmEngine(policy, "bf16", max(map(len, prompts)) + limit, 0.2)
    from vllm import SamplingParams

    def bare(seed: int) -> list[list[int]]:
        parameters = SamplingParams(n=count, temperature=1.0, max_tokens=limit, seed=seed, detokenize=False)
        outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        return [list(completion.token_ids) for output in outputs for completion in output.outputs]

    def ours(seed: int) -> list[list[int]]:
        groups = engine.generate(prompts, count, Sampling(1.0, limit), seed)
        return [list(response.ids) for group in groups for response in group]

    return {"vllm": bare, "tepo_vllm": ours}


if __name__ == "__main__":
    main()
