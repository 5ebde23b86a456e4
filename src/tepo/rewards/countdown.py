"""Judging countdown: an expression over given numbers that reaches a target. A parser of its own, and no `eval`."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from tepo.data.problem import Problem
from tepo.rewards.extract import answer_region, find_answer, has_box, last_boxed, last_tagged
from tepo.rewards.integer import gold_integer
from tepo.rewards.verdict import Status, Verdict, failed

MAX_EXPRESSION = 300
"""Characters of an expression; with six numbers an honest one has about fifty."""

_TOKEN = re.compile(r"\s*(?:(\d{1,12})(?![\d.])|([-+*/()]))")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_LATEX = (
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\$|\\[(),;! ]"), " "),
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]{2}")
_LAST_EQUATION = re.compile(r"[-+*/()\d\s]*\d[-+*/()\d\s]*(?==\s*-?\d)")


class ExpressionError(ValueError):
    """A text is not an expression of whole numbers, signs and brackets, or divides by zero."""


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of `+ - * / ( )` and the whole numbers in it, in their order.

    Raises:
        ExpressionError: anything else, an expression of more than 300 characters, a division by zero.
    """
    if len(text) > MAX_EXPRESSION:
        raise ExpressionError(f"an expression of {len(text)} characters; at most {MAX_EXPRESSION} are read")
    parser = _Parser(text)
    value = parser.sum()
    if parser.position < len(parser.tokens):
        raise ExpressionError(f"{parser.tokens[parser.position]!r} is out of place")
    return value, parser.numbers


class _Parser:
    """Recursive descent; the length of a text bounds its depth."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.numbers: list[int] = []
        self.position = 0
        end, text = 0, text.rstrip()
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise ExpressionError(f"{text[end : end + 12].strip()!r} is not a whole number, + - * / or a bracket")
            self.tokens.append(match.group(1) or match.group(2))
            end = match.end()

    def _take(self, allowed: str) -> str | None:
        if self.position < len(self.tokens) and self.tokens[self.position] in tuple(allowed):
            self.position += 1
            return self.tokens[self.position - 1]
        return None

    def sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*/"):
            factor = self._factor()
            if sign == "/" and factor == 0:
                raise ExpressionError("it divides by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        if sign := self._take("+-"):
            return -self._factor() if sign == "-" else self._factor()
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise ExpressionError("a bracket is not closed")
            return value
        if self.position == len(self.tokens) or not self.tokens[self.position].isdigit():
            raise ExpressionError("a number is missing")
        self.numbers.append(int(self.tokens[self.position]))
        self.position += 1
        return Fraction(self.numbers[-1])


def given_numbers(problem: Problem) -> list[int] | None:
    """The numbers of a countdown problem (column `nums` or `numbers`); None when there are none."""
    numbers = problem.info.get("nums", problem.info.get("numbers"))
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
        return None
    return list(numbers) if all(isinstance(number, int) for number in numbers) else None


def find_expression(response: str) -> str | None:
    """The expression in `<answer>`, a box, after `####` or "answer is", or left of the last `= number`; else None."""
    text = answer_region(response)
    tagged = last_tagged(text)
    if tagged is None and has_box(text):
        tagged = last_boxed(text) or ""
    if tagged is None:
        found = find_answer(response)
        tagged = found.text if found is not None and found.rule in ("hashes", "phrase") else None
    if tagged is None:
        text = _plain(text[-MAX_EXPRESSION:])
        equations = _LAST_EQUATION.findall(text)
        # Without an equation a text may be the expression itself; words make it none.
        tagged = equations[-1] if equations else "" if _WORD.search(text) else text
    return _plain(tagged) or None


def _plain(text: str) -> str:
    """An expression in the signs of the parser, from LaTeX and Unicode."""
    text = text.translate(_SIGNS)
    for _ in range(8):  # a fraction of fractions, inside out
        text, changed = _FRACTION.subn(r"((\1)/(\2))", text)
        if not changed:
            break
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text.strip().rstrip(".")


def judge_countdown(response: str, problem: Problem, *, every_number: bool) -> Verdict:
    """Correct when the expression found is worth `problem.answer` and uses the problem's numbers once each.

    every_number: all of them have to be used (TinyZero's rule); otherwise some may be left out (the television game's).
    Of an equation the longer side is the expression; the other is not read.
    """
    numbers, target = given_numbers(problem), gold_integer(problem.answer)
    if numbers is None or target is None:
        return failed(Status.ERROR, "the problem has no list of numbers (nums), or its target is not a whole number")
    expression = find_expression(response)
    if expression is None:
        return failed(Status.NO_ANSWER, "no expression in <answer>, in a box, or before a = at the end")
    expression = max(expression.split("="), key=len).strip()
    try:
        value, used = evaluate_expression(expression)
    except ExpressionError as error:
        return failed(Status.UNPARSABLE, str(error), expression[:80])
    if Counter(used) - Counter(numbers):
        return failed(Status.WRONG, f"it uses {_listed(used)}; given are {_listed(numbers)}, once each", expression)
    if every_number and Counter(used) != Counter(numbers):
        return failed(
            Status.WRONG, f"it leaves out {_listed((Counter(numbers) - Counter(used)).elements())}", expression
        )
    if value != target:
        return failed(Status.WRONG, f"it is worth {value}, not {target}", expression)
    return Verdict(Status.CORRECT, 1.0, expression, f"it is worth {target}")


def _listed(numbers: object) -> str:
    return ", ".join(map(str, numbers))  # type: ignore[call-overload]
