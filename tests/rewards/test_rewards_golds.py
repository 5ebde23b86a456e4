"""Gold answers: those of all benchmarks are judged correct against themselves; those that cannot be read are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo.config.data import RewardConfig
from tepo.data.problem import Problem, TaskData
from tepo.rewards import JudgePool, Request, RewardFunction, Status

EXCEPTIONS = json.loads(Path(__file__).with_name("gold_exceptions.json").read_text("utf-8"))
"""File, id and reason: written by scripts/check_golds.py."""
FILES = [
    "aime24", "aime25", "aime_1983_2023_train", "amc23", "college_math_ccby", "dapo_math_train", "deepscaler_sub_train",
    "gaokao2023en", "gsm8k_test", "gsm8k_train_part1", "gsm8k_train_part2", "math12k_train", "math500", "math_train",
    "minerva_math", "olympiadbench",
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[JudgePool]:
    with JudgePool(workers=2, timeout=20) as pool:
        yield pool


@pytest.mark.parametrize("name", FILES)
def test_every_gold_is_correct_against_itself(pool: JudgePool, shared_data: Path, name: str) -> None:
    """Without a warning a gold that cannot be read is a problem that always earns nothing."""
    rows = [json.loads(line) for line in (shared_data / f"{name}.jsonl").open(encoding="utf-8")]
    requests = [Request("math", f"\\boxed{{{row['answer']}}}", Problem("", "", row["answer"])) for row in rows]
    verdicts = pool.judge(requests)
    failed = {row["id"]: verdict for row, verdict in zip(rows, verdicts, strict=True) if not verdict.correct}
    assert failed.keys() == EXCEPTIONS.get(f"{name}.jsonl", {}).keys()
    # An exception is a gold that cannot be read, and never one that is read and found wrong.
    assert {verdict.status for verdict in failed.values()} <= {Status.ERROR}


def test_exceptions_are_few() -> None:
    assert sum(map(len, EXCEPTIONS.values())) < 100
    assert all(reason for reasons in EXCEPTIONS.values() for reason in reasons.values())
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text("utf-8")
    assert f"those are {sum(map(len, EXCEPTIONS.values()))} of" in page
    assert all(f"`{name}`" in page for name in EXCEPTIONS)


@pytest.mark.parametrize("name", ["aime24", "aime25", "dapo_math_train"])
def test_golds_of_contests_are_whole_numbers(pool: JudgePool, shared_data: Path, name: str) -> None:
    rows = [json.loads(line) for line in (shared_data / f"{name}.jsonl").open(encoding="utf-8")]
    verdicts = pool.judge([Request("integer", f"\\boxed{{{r['answer']}}}", Problem("", "", r["answer"])) for r in rows])
    assert all(verdict.correct for verdict in verdicts)


def test_golds_are_checked_by_the_verifier_that_reads_them(pool: JudgePool) -> None:
    problems = [
        Problem("a", "", "5"), Problem("b", "", r"\frac{1}{2}"), Problem("c", "", r"\frac{1}{"), Problem("d", "", " "),
    ]  # fmt: skip
    found = {name: [*pool.unreadable_golds(name, problems)] for name in ("math", "integer", "exact", "gym", "my:own")}
    assert found == {"math": ["c", "d"], "integer": ["b", "c", "d"], "exact": ["d"], "gym": [], "my:own": []}
    assert "is not a whole number" in pool.unreadable_golds("integer", problems)["b"]
    countdown = [Problem("e", "", "5", {"nums": [2, 3]}), Problem("f", "", "5"), Problem("g", "", "x", {"nums": [1]})]
    assert [*pool.unreadable_golds("countdown", countdown)] == ["f", "g"]


def test_a_reward_function_tells_them() -> None:
    problems = [Problem("a", "", "5"), Problem("b", "", r"\frac{1}{")]
    with RewardFunction(RewardConfig(workers=1), TaskData("t", problems, [], verifier="math")) as function:
        assert [*function.unreadable_golds(problems)] == ["b"]
