"""From verdicts to rewards: scales, shaping, and accuracy kept apart from both."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo.config.data import DataConfig, FormatReward, OverlongPunishment, RewardConfig
from tepo.data.load import load_task
from tepo.data.problem import Problem, TaskData
from tepo.errors import TepoError
from tepo.rewards import Response, RewardFunction, Status, Verdict, soft_overlong, status_shares
from tepo.rewards.reward import reward_metrics

PROBLEM = Problem("p", "What is 1 + 1?", "2")
TASK = TaskData("sums", [PROBLEM], [PROBLEM], verifier="math")
RIGHT, WRONG = r"so \boxed{2}", "it is 3"


def reward(
    config: RewardConfig, *responses: tuple[str, int, bool], task: TaskData = TASK, problem: Problem = PROBLEM
) -> Any:
    with RewardFunction(config, task) as function:
        return function([Response(problem, *response) for response in responses])


@pytest.mark.parametrize(
    ("tokens", "punishment"),
    [(0, 0.0), (16384, 0.0), (16385, -0.000244), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**6, -1.0)],
)
def test_soft_overlong_has_the_numbers_of_the_paper(tokens: int, punishment: float) -> None:
    assert soft_overlong(tokens, max_length=20480, cache=4096) == pytest.approx(punishment, abs=5e-7)


@given(st.integers(0, 5000), st.integers(1, 2000), st.integers(0, 2000))
def test_soft_overlong_falls_from_0_to_minus_1(tokens: int, cache: int, more: int) -> None:
    value = soft_overlong(tokens, cache + more, cache)
    assert -1.0 <= soft_overlong(tokens + 1, cache + more, cache) <= value <= 0.0


def test_scores_of_tulu_and_dapo() -> None:
    answers = ((RIGHT, 5, True), (WRONG, 5, True), (RIGHT, 5, False), (WRONG, 5, False))
    assert reward(RewardConfig(workers=1), *answers).rewards == [1, 0, 1, 0]
    assert reward(RewardConfig(workers=1, wrong=-1), *answers).rewards == [1, -1, 1, -1]
    tulu = reward(RewardConfig(workers=1, correct=10, missing_end=-10), *answers)
    assert tulu.rewards == [10, 0, -10, -10]
    assert tulu.correct == [True, False, True, False]


def test_shaping_is_added_and_leaves_accuracy_alone() -> None:
    config = RewardConfig(
        workers=1, wrong=-1, format=FormatReward(score=0.25), overlong=OverlongPunishment(max_length=100, cache=50)
    )
    judged = reward(config, (RIGHT, 10, True), (RIGHT, 75, True), (WRONG, 100, True), (r"\boxed{3}", 10, True))
    assert judged.rewards == [1.25, 0.75, -2.0, -0.75]
    assert judged.correct == [True, True, False, False]
    assert judged.formatted == [True, True, False, True]
    assert judged.overlong == [0, -0.5, -1, 0]
    metrics = reward_metrics(judged.verdicts, judged.rewards, judged.formatted, judged.overlong)
    assert metrics["accuracy"] == 0.5
    assert metrics["reward"] == pytest.approx(-0.1875)
    assert metrics["verdict/correct"] == metrics["verdict/wrong"] == 0.5
    assert metrics["verdict/timeout"] == 0
    assert metrics["formatted"] == 0.75
    assert metrics["overlong"] == -0.375


def test_a_missing_end_takes_the_place_of_score_and_format_and_not_of_overlong() -> None:
    config = RewardConfig(
        workers=1, missing_end=-10, format=FormatReward(), overlong=OverlongPunishment(max_length=100, cache=50)
    )
    assert reward(config, (RIGHT, 100, False)).rewards == [-11]


def test_the_built_in_task_end_to_end() -> None:
    task = load_task(DataConfig(max_problems=4, test_problems=4, options={"digits": 2}), seed=0)
    with RewardFunction(RewardConfig(workers=1), task) as function:
        right = [Response(problem, f"1+1=2 ####{problem.answer}", 9, True) for problem in task.train]
        wrong = [Response(problem, f"####{problem.answer}1", 9, True) for problem in task.train]
        assert function(right + wrong).rewards == [1.0] * 4 + [0.0] * 4
        assert function([]).rewards == []


def test_gym_scores_by_its_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(DataConfig(name="gym:countdown", max_problems=3, test_problems=1), seed=0)
    problem = task.train[0]
    texts = [f"thus <answer>{problem.answer}</answer>", "<answer>1 + 1</answer>", "<answer></answer>"]
    answers = [(text, 5, True) for text in texts]
    judged = reward(RewardConfig(workers=1, partial=True), *answers, task=task, problem=problem)
    assert [verdict.status for verdict in judged.verdicts] == [Status.CORRECT, Status.WRONG, Status.NO_ANSWER]
    assert judged.rewards[0] == 1.0
    assert 0 < judged.rewards[1] < 1
    assert judged.rewards[2] == 0
    whole = reward(RewardConfig(workers=1), *answers, task=task, problem=problem)
    assert whole.rewards == [1.0, 0.0, 0.0]


def test_gym_entries_with_tuples_reach_the_scorer_as_they_were() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(DataConfig(name="gym:arc_agi", max_problems=2, test_problems=1), seed=0)
    problem = task.train[0]
    assert reward(
        RewardConfig(workers=1), (f"<answer>{problem.answer}</answer>", 5, True), task=task, problem=problem
    ).correct == [True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(verifier="mathe"), r"reward\.verifier=mathe: there is no such verifier"),
        (RewardConfig(verifier="gym"), r"reward\.verifier=gym: only gym:TASK problems"),
        (RewardConfig(format=FormatReward(pattern="(")), r"reward\.format\.pattern='\(': not a regular expression"),
        (
            RewardConfig(overlong=OverlongPunishment(max_length=10, cache=20)),
            r"reward\.overlong\.cache=20: allowed is at most",
        ),
    ],
)
def test_mistakes_are_told_before_training(config: RewardConfig, message: str) -> None:
    with pytest.raises(TepoError, match=message):
        RewardFunction(config, TASK)


def test_status_shares_name_every_status() -> None:
    shares = status_shares([Verdict(Status.CORRECT, 1.0), Verdict(Status.TIMEOUT, 0.0)])
    assert shares == {"correct": 0.5, "wrong": 0, "unparsable": 0, "no_answer": 0, "timeout": 0.5, "error": 0}
    assert sum(status_shares([]).values()) == 0
