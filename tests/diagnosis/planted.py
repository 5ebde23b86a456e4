"""Short real runs of the embedded model: with a fault, by the rule that says so, and healthy ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from tepo.config import load_recipe
from tepo.data.arithmetic import generate
from tepo.train import train

SHORT = [
    "trainer.steps=12",
    "trainer.prompts_per_rollout=8",
    "trainer.responses_per_prompt=4",
    "trainer.updates_per_rollout=4",
    "trainer.warmup_steps=0",
    "data.test_problems=20",
    "evaluation.every=null",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=null",
    "reward.workers=1",
]

PLANTED = {
    "unreadable_golds": ["data={half_gold}", "data.template=plain", "reward.verifier=integer"],
    "kl_explodes": ["trainer.learning_rate=0.05"],
    "too_few_updates": ["trainer.updates_per_rollout=1", "trainer.steps=3"],
    "nothing_moves": ["trainer.learning_rate=1e-12"],
    "truncated": ["rollout.max_response_tokens=12"],
    "format_never_learned": ["reward.format.pattern=therefore", "seed=1"],
    "unreadable_answers": ["reward.verifier=judges_for_tests:boxed"],
    "data_repeated": ["data.max_problems=1", "trainer.steps=16"],
    "all_wrong": ["data={wrong_gold}", "data.template=plain", "reward.verifier=integer"],
    "everything_clipped": ["objective=gspo", "objective.clip_low=1e-5", "objective.clip_high=1e-5"],
    "entropy_explodes": ["objective.entropy_bonus=3", "trainer.learning_rate=3e-4", "trainer.steps=24"],
    "reward_constant": ["reward.correct=0"],
    "all_right": ["reward.verifier=judges_for_tests:anything"],
    "no_difference": ["reward.verifier=judges_for_tests:by_problem"],
    "judging_fails": ["reward.verifier=judges_for_tests:broken"],
    "length_runs_away": [
        "reward.verifier=judges_for_tests:long", "reward.partial=true", "rollout.max_response_tokens=80",
        "trainer.learning_rate=1e-3", "trainer.steps=32",
    ],
    "reward_hacked": [
        "reward.format.pattern=^.{{0,12}}$", "reward.format.score=3", "trainer.learning_rate=1e-3",
        "trainer.steps=40", "evaluation.every=10", "evaluation.before=true", "evaluation.after=true",
        "evaluation.greedy=false", "data.test_problems=60",
    ],
}  # fmt: skip
"""Rule, and the settings that bring it about."""

HEALTHY = [
    ["seed=0"],
    ["seed=1", "objective=grpo"],
    ["seed=2", "objective=dapo"],
    ["seed=3", "objective=gspo"],
    ["seed=4", "objective.kl_mask=null"],
]


def write_data(folder: Path) -> dict[str, Path]:
    """Additions with golds that are off by a thousand, and with golds of which half are no numbers."""
    problems, _ = generate(0, train=200, test=0)
    rows = {
        "wrong_gold": [{"problem": p.text, "answer": str(int(p.answer) + 1000)} for p in problems],
        "half_gold": [{"problem": p.text, "answer": p.answer if i % 2 else "many"} for i, p in enumerate(problems)],
    }
    files = {name: folder / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return files


def short_run(folder: Path, settings: list[str]) -> tuple[Path, str]:
    """-> the run folder, and what was printed."""
    console = Console(file=(text := io.StringIO()), width=200)
    recipe = load_recipe("arithmetic", [*SHORT, *settings, f"output={folder}"])
    return train(recipe, console=console), text.getvalue()
