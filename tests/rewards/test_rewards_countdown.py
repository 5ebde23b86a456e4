"""Countdown: expressions are computed exactly by a parser of our own, and numbers are used once."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.data.problem import Problem
from tepo.rewards.countdown import MAX_EXPRESSION, ExpressionError, evaluate_expression, judge_countdown
from tepo.rewards.integer import judge_integer
from tepo.rewards.verdict import Status

PROBLEM = Problem("p", "", "24", {"nums": [2, 3, 4, 1]})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7), ("(1+2)*3", 9), ("8/4/2", 1), ("1/3+1/6", Fraction(1, 2)), ("-3--2", -1), ("2 - 3 - 4", -5),
        ("((7))", 7), ("10-(2-(3-4))", 7), ("-(2+3)*2", -10),
    ],
)  # fmt: skip
def test_values(text: str, value: Fraction) -> None:
    assert evaluate_expression(text)[0] == value


Tree = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(Tree)
def test_values_are_pythons(text: str) -> None:
    """Against Python's own arithmetic on fractions; the texts are ours, so that `eval` sees nothing hostile."""
    spelled = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
    try:
        expected = eval(spelled, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="divides by zero"):
            evaluate_expression(text)
        return
    assert evaluate_expression(text)[0] == expected


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return parts


@pytest.mark.parametrize(
    "text",
    ["", "1+", "(1", "1)", "1 2", "2**3", "1.5*2", "x", "__import__('os')", "1e3", "9^9", "1//2", "()", "1" * 13,
     "1+" * MAX_EXPRESSION, "1/0", "1/(2-2)"],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate_expression(text)


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("<answer>2*3*4*1</answer>", Status.CORRECT),
        ("<answer>2*3*4*1 = 24</answer>", Status.CORRECT),
        ("<answer>24 = (2*3)*4*1</answer>", Status.CORRECT),
        (r"so \boxed{2 \times 3 \times 4 \div 1}", Status.CORRECT),
        (r"$\frac{2 \cdot 3 \cdot 4}{1}$ is it: \boxed{\frac{2 \cdot 3 \cdot 4}{1}}", Status.CORRECT),
        ("first 2+3 = 5, no: 2 × 3 × 4 × 1 = 24", Status.CORRECT),
        ("<answer>1*1</answer> no, <answer>4*3*2/1</answer>", Status.CORRECT),
        ("<answer>2*3*4</answer>", Status.WRONG),  # leaves out 1
        ("<answer>2*3*4*1*1</answer>", Status.WRONG),  # 1 twice
        ("<answer>24</answer>", Status.WRONG),
        ("<answer>2+3+4+1</answer>", Status.WRONG),
        ("<answer>2*3*4*</answer>", Status.UNPARSABLE),
        ("<answer>__import__('os').system('x')</answer>", Status.UNPARSABLE),
        ("<answer></answer>", Status.NO_ANSWER),
        ("I do not know how", Status.NO_ANSWER),
    ],
)
def test_judging(response: str, status: Status) -> None:
    verdict = judge_countdown(response, PROBLEM, every_number=True)
    assert verdict.status is status
    assert verdict.detail


def test_some_numbers_may_be_left_out_where_the_rules_say_so() -> None:
    assert judge_countdown("<answer>2*3*4</answer>", PROBLEM, every_number=False).correct
    assert not judge_countdown("<answer>4*3*2*2/2</answer>", PROBLEM, every_number=False).correct


def test_a_problem_without_numbers_or_target_never_pays() -> None:
    for problem in (
        Problem("p", "", "24"),
        Problem("p", "", "x", {"nums": [24]}),
        Problem("p", "", "24", {"nums": "24"}),
    ):
        assert judge_countdown("<answer>24</answer>", problem, every_number=True).status is Status.ERROR


def test_solutions_of_the_shared_problems_are_correct(shared_data: Path) -> None:
    """Those with three numbers, solved by search with Python's fractions."""
    rows = [json.loads(line) for line in (shared_data / "countdown_test.jsonl").open(encoding="utf-8")]
    three = [row for row in rows if len(row["nums"]) == 3][:100]
    for row in three:
        problem = Problem(row["id"], row["problem"], row["answer"], {"nums": row["nums"]})
        verdict = judge_countdown(
            f"<answer>{_solve(row['nums'], int(row['answer']))}</answer>", problem, every_number=True
        )
        assert verdict.correct, verdict
        assert not judge_countdown(f"<answer>{row['answer']}</answer>", problem, every_number=True).correct


def _solve(numbers: list[int], target: int) -> str:
    for a, b, c in permutations(numbers):
        for first in "+-*/":
            for second in "+-*/":
                for text in (f"({a}{first}{b}){second}{c}", f"{a}{first}({b}{second}{c})"):
                    try:
                        if eval("".join(f"Fraction({p})" if p.isdigit() else p for p in _parts(text))) == target:
                            return text
                    except ZeroDivisionError:
                        continue
    raise AssertionError(f"{numbers} do not reach {target}")


@pytest.mark.parametrize(
    ("response", "gold", "status"),
    [
        (r"\boxed{25}", "025", Status.CORRECT),
        (r"\boxed{025}", "25", Status.CORRECT),
        (r"\boxed{25.0}", "25", Status.CORRECT),
        (r"\boxed{336^\circ}", "336^\\circ", Status.CORRECT),
        (r"\boxed{m + n = 205}", "205", Status.CORRECT),
        ("#### 1,080", "1080", Status.CORRECT),
        (r"\boxed{\frac{50}{2}}", "25", Status.CORRECT),
        ("27", "27.0", Status.CORRECT),
        (r"\boxed{24}", "25", Status.WRONG),
        (r"\boxed{25.5}", "25", Status.WRONG),
        (r"\boxed{-25}", "25", Status.WRONG),
        (r"\boxed{2^5}", "32", Status.UNPARSABLE),
        (r"\boxed{x}", "32", Status.UNPARSABLE),
        ("", "32", Status.NO_ANSWER),
        (r"\boxed{32}", r"\frac{1}{2}", Status.ERROR),
        (r"\boxed{32}", "", Status.ERROR),
    ],
)
def test_whole_numbers(response: str, gold: str, status: Status) -> None:
    verdict = judge_integer(response, gold)
    assert verdict.status is status
    assert verdict.score == float(status is Status.CORRECT)
    assert verdict.detail
