"""maj@k of records: which responses vote alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tepo.config.data import RewardConfig
from tepo.data import Problem, TaskData
from tepo.evaluate.accuracy import majorities
from tepo.rewards.reward import Response, RewardFunction

PROBLEM = Problem("p", "What?", r"\frac{1}{2}")


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardFunction]:
    with RewardFunction(RewardConfig(workers=1), TaskData("t", [PROBLEM], [PROBLEM], verifier="math")) as function:
        yield function


def records(judge: RewardFunction, answers: Sequence[str]) -> list[dict[str, Any]]:
    verdicts = judge([Response(PROBLEM, answer, 1, True) for answer in answers]).verdicts
    return [{"status": verdict.status.value, "extracted": verdict.extracted} for verdict in verdicts]


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ([r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{3}"], 1.0),
        ([r"\boxed{1/2}", r"\boxed{0.25}", r"\boxed{\frac{1}{4}}"], 0.0),  # equal wrong answers vote together
        ([r"\boxed{1/2}", r"\boxed{1/4}", r"\boxed{1/3}"], 1 / 3),
        ([r"\boxed{1/2}", "", "nothing at all here to be read"], 1.0),  # no answer, no vote
        ([r"\boxed{1/2}", r"\boxed{x=3}", r"\boxed{3}", r"\boxed{2+1}", r"\boxed{.5}"], 0.0),
        (["", ""], 0.0),
    ],
)
def test_equivalent_answers_vote_together(judge: RewardFunction, answers: list[str], value: float) -> None:
    assert majorities([records(judge, answers)], judge.same_answers) == [pytest.approx(value)]


def test_problems_do_not_mix(judge: RewardFunction) -> None:
    rows = records(judge, [r"\boxed{1/2}", r"\boxed{7}", r"\boxed{7.0}"])
    assert majorities([rows, rows[:1] * 3, rows], judge.same_answers) == [0, 1, 0]
