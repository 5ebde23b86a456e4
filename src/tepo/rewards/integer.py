"""Judging by a whole number: AIME, DAPO-Math, and other tasks whose every answer is one."""

from fractions import Fraction

from tepo.rewards.extract import find_answer
from tepo.rewards.normalise import as_number, tidy, without_letter_unit
from tepo.rewards.verdict import Status, Verdict, failed

MAX_SHOWN = 80


def whole_number(text: str) -> Fraction | None:
    """The value of an answer written as a number: `025`, `1,080`, `27.0`, `336^\\circ`, `2 + 3 = 5`; else None."""
    return as_number(without_letter_unit(tidy(text.rsplit("=", 1)[-1])))


def gold_integer(gold: str) -> int | None:
    """The whole number that a gold answer is, leading zeros or not; None when it is none."""
    value = whole_number(gold)
    return None if value is None or value.denominator != 1 else value.numerator


def judge_integer(response: str, gold: str) -> Verdict:
    """Correct when the answer found (`tepo.rewards.extract`) is the gold's whole number.

    Numbers alone are read, no algebra: `2^5` is unparsable, not 32. A gold that is no whole number never pays.
    """
    wanted = gold_integer(gold)
    if wanted is None:
        return failed(Status.ERROR, f"the gold answer {gold[:MAX_SHOWN]!r} is not a whole number")
    found = find_answer(response)
    if found is None:
        return failed(Status.NO_ANSWER, "no box, no final answer, no formula and no number in the response")
    value = whole_number(found.text)
    if value is None:
        return failed(Status.UNPARSABLE, f"the answer found ({found.rule}) is not a number", found.text[:MAX_SHOWN])
    if value == wanted:
        return Verdict(Status.CORRECT, 1.0, found.text, f"the same number, by {found.rule}")
    return failed(Status.WRONG, f"another number, by {found.rule}", found.text)
