"""Judging a mathematical answer: our extraction, math-verify's parser and comparison.

Everything here runs in the current process and has no time limit of its own: `tepo.rewards.pool` runs it in a
worker. math-verify's time-outs are signals, which fail off the main thread and turn every reward into 0 (verl
issue 3407); they are off.
"""

import logging
import math
import re
from functools import lru_cache
from typing import Any

from tepo.rewards.extract import FUNCTION_WORDS, find_answer
from tepo.rewards.normalise import as_latex, as_number, as_text, tidy, without_letter_unit
from tepo.rewards.verdict import Status, Verdict, failed

MAX_ANSWER = 2_000
"""Characters of an extracted answer; longer ones are not answers, and cost the parser much."""

MAX_NESTING = 30
"""Brackets in brackets: the parser takes exponential time for deep ones."""
MAX_DIGITS = 10_000
"""Decimal digits of a number that is computed; larger ones are compared by their form."""

_BRACKETS = re.compile(r"\\[{}|]|[][(){}]")
_LARGE_BINOMIAL = re.compile(r"\\[dt]?binom.*?(?:\d{5}|!)")
"""The parser computes binomials while it reads, however large."""
_WORDS = re.compile(r"(?:\d{1,2}:\d{2} )?[^\W\d_][\w\s.,'’()/:-]*")
_ORDERED_NUMBERS = re.compile(r"\d{1,2}:\d{1,3}(?::\d{1,3})?")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


@lru_cache(maxsize=4096)
def _parse(latex: str) -> tuple[Any, ...]:
    """The SymPy readings of an answer; empty when it cannot be read."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # `tidy` takes units away with more care: math-verify reads `3m` as 3.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")

    one_line = " ".join(latex.split())
    if not _nests_well(one_line) or _LARGE_BINOMIAL.search(one_line):
        return ()
    readings = parse(
        f"${one_line}$",
        [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spelling)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return tuple(_infinities_evaluated(_with_imaginary_unit(reading)) for reading in readings)


def _nests_well(latex: str) -> bool:
    """Whether every bracket has a partner, be it of another kind (`[0, 1)`, `]0, 1[`), and none is nested too deep."""
    depth = deepest = braces = balance = 0
    for bracket in _BRACKETS.findall(latex):
        step = 1 if bracket in ("{", "(", "[", "\\{") else -1 if bracket in ("}", ")", "]", "\\}") else 0
        balance += step
        braces += step if bracket in "{}" else 0
        if braces < 0:
            return False
        depth = max(0, depth + step)
        deepest = max(deepest, depth)
    return balance == 0 and braces == 0 and deepest <= MAX_NESTING


def _digits(expression: Any) -> float:
    """An upper bound of the decimal digits of the numbers that computing an expression makes; infinite past 10^6."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return 0.0
    if expression.is_Number:
        return float(len(str(abs(expression.p)))) if expression.is_Rational else 20.0
    inner = [_digits(argument) for argument in expression.args]
    largest = max(inner, default=0.0)
    if isinstance(expression, sympy.Mul):
        return sum(inner)
    if not isinstance(expression, sympy.Pow | sympy.exp | sympy.factorial | sympy.binomial | sympy.Sum | sympy.Product):
        return largest + 1
    driver = expression.args[-1] if isinstance(expression, sympy.Pow) else expression.args[0]
    if not driver.is_number:
        # A polynomial has no digits; a sum runs over its limits, which are among the numbers in it.
        return math.inf if largest > 6 else largest * 10
    if _digits(driver) > 6:
        return math.inf
    value = sympy.N(driver, 15)
    if not value.is_finite:
        return math.inf
    times = abs(complex(value))
    return max(1.0, inner[0]) * max(1.0, times) * (1.0 if isinstance(expression, sympy.Pow) else 6.0)


def _with_imaginary_unit(reading: Any) -> Any:
    """The parser leaves the i of `e^{i\\pi}` a variable: i is the imaginary unit in expressions and sets of them."""
    import sympy

    members = reading.args if isinstance(reading, sympy.FiniteSet) else (reading,)
    if not all(isinstance(member, sympy.Expr) for member in members):
        return reading
    units = {symbol: sympy.I for symbol in reading.free_symbols if symbol.name == "i"}
    return reading.xreplace(units) if units else reading


def _calculates_with_infinity(part: Any) -> bool:
    """Whether infinity is a term, a factor, a base or an exponent here; a limit or the end of an interval is none."""
    import sympy

    calculation = isinstance(part, sympy.Add | sympy.Mul | sympy.Pow)
    return calculation and any(term.is_infinite or term is sympy.nan for term in part.args)


def _infinities_evaluated(reading: Any) -> Any:
    """The parser leaves `\\infty \\cdot 7` a product of two factors: here it is infinity."""
    import sympy

    if not isinstance(reading, sympy.Basic) or not any(
        map(_calculates_with_infinity, sympy.preorder_traversal(reading))
    ):
        return reading
    return reading.replace(_calculates_with_infinity, lambda part: part.func(*part.args))


def _has_no_value(reading: Any) -> bool:
    """Whether there is a calculation with infinity that comes to nothing, such as `x \\cdot \\infty`."""
    import sympy

    return isinstance(reading, sympy.Basic) and any(
        part is sympy.nan or _calculates_with_infinity(part) for part in sympy.preorder_traversal(reading)
    )


def _compare(gold: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    from math_verify import verify
    from sympy.core import random

    if not gold:
        return False  # words that are no LaTeX, and the answer is not the same words
    either = (*gold, *answer)
    # Subtracted from infinity, anything may look like zero: SymPy found 7919 equal to `7 \\cdot \\infty` now and then.
    if any(map(_has_no_value, either)) or max(map(_digits, either)) > MAX_DIGITS:
        return bool(gold[0] == answer[0])
    # SymPy tries expressions at random points: the same answer must get the same verdict in every run.
    random.seed(0)
    equal = verify(list(gold), list(answer), float_rounding=6, strict=True, timeout_seconds=None)
    if not equal:
        return _equal_where_real(gold[0], answer[0])
    return _relatively_close(gold[0], answer[0])


def _equal_where_real(gold: Any, answer: Any) -> bool:
    """Whether two expressions with roots are one real function: sqrt(1/n) and 1/sqrt(n) differ where neither is real.

    Tried at rational points of all signs; where only one of them is real they differ.
    """
    import sympy

    sides = (gold, answer)
    if not all(isinstance(side, sympy.Expr) and not side.is_number and _has_root(side) for side in sides):
        return False
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if len(names) > 3 or any(side.count_ops() > 60 for side in sides):
        return False
    met = 0
    for point in range(16):
        values = [
            sympy.Rational(7 + 5 * point + 3 * k, 11 + k) * (-1 if point >> k & 1 else 1) for k in range(len(names))
        ]
        at = dict(zip(names, values, strict=True))
        left, right = (sympy.N(side.xreplace(at), 20) for side in sides)
        if not (left.is_extended_real or right.is_extended_real):
            continue
        if not (left.is_Float and right.is_Float and abs(left - right) <= 1e-12 * max(1, abs(left), abs(right))):
            return False
        met += 1
    return met >= 2


def _has_root(expression: Any) -> bool:
    import sympy

    return any(power.exp.is_Rational and power.exp.q % 2 == 0 for power in expression.atoms(sympy.Pow))


def _relatively_close(gold: Any, answer: Any) -> bool:
    """False for two numbers that only rounding to six decimals makes equal (2^-98 and 2^-99, math-verify issue 14)."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, answer)):
        return True
    # Twenty digits: a difference that cancels is found without turning huge powers into floats.
    left, right = sympy.N(gold, 20), sympy.N(answer, 20)
    if not (left.is_finite and right.is_finite):
        return bool(left == right)
    if gold == 0 or answer == 0:
        return bool((gold - answer).equals(0))  # nothing is close to zero in proportion
    return bool(abs(left - right) <= 1e-5 * max(abs(left), abs(right)))


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(text)) and any(character.isalpha() for character in text)


def _is_phrase(text: str) -> bool:
    """Words of a language, and not letters that stand for numbers: three letters or more that name no function."""
    runs = re.findall(r"[^\W\d_]{3,}", text)
    return _is_words(text) and bool(runs) and not any(run in FUNCTION_WORDS for run in runs)


@lru_cache(maxsize=16_384)
def readable_gold(gold: str) -> bool:
    """Whether a gold answer can be compared with anything: a number, words, or LaTeX that parses."""
    tidied = tidy(_gold_text(gold))
    if not tidied or len(tidied) > MAX_ANSWER:
        return False
    return as_number(tidied) is not None or _is_words(as_text(tidied)) or bool(_parse(as_latex(tidied)))


def _gold_text(gold: str) -> str:
    if "\\boxed" in gold or "\\fbox" in gold or "####" in gold:
        found = find_answer(gold)
        return found.text if found else ""
    return gold.strip()


def judge_math_here(prediction: str, gold: str) -> Verdict:
    """Judge `prediction` (a response, or an answer alone) against `gold`, in this process and without a time limit.

    Extraction follows `tepo.rewards.extract` (last box, answer tag, `####`, "answer is", the whole when it is a bare
    answer, last maths, last number). Numbers are compared exactly, words without case, everything else by
    math-verify. An unreadable gold pays nothing, even to the same string: its status is `error` (TRL PR 5902).
    """
    if not readable_gold(gold):
        return failed(Status.ERROR, f"the gold answer {gold[:80]!r} cannot be read, so nothing can be correct")
    found = find_answer(prediction)
    if found is None:
        return failed(Status.NO_ANSWER, "no box, no final answer, no formula and no number in the response")
    if len(found.text) > MAX_ANSWER:
        detail = f"an answer of {len(found.text)} characters; at most {MAX_ANSWER} are read"
        return failed(Status.UNPARSABLE, detail, found.text[:80])
    return _judge_answer(found.text, _gold_text(gold), found.rule)


@lru_cache(maxsize=16_384)
def _judge_answer(answer: str, gold: str, rule: str) -> Verdict:
    tidied, tidied_gold = tidy(answer), tidy(gold)
    if not tidied:
        return failed(Status.NO_ANSWER, f"the answer found ({rule}) is empty", answer)
    gold_number = as_number(tidied_gold)
    if gold_number is not None:
        tidied = without_letter_unit(tidied)
    number = as_number(tidied)
    if number is not None and gold_number is not None and _exact_enough(tidied, tidied_gold):
        return _verdict(number == gold_number, answer, f"numbers, by {rule}")
    if _same_spelling(tidied, tidied_gold):
        return _verdict(True, answer, f"the same spelling, by {rule}")
    if _ORDERED_NUMBERS.fullmatch(tidied_gold) and _ORDERED_NUMBERS.fullmatch(tidied):
        return _verdict(False, answer, f"ratios or times, by {rule}")
    if _is_phrase(as_text(tidied_gold)) and _is_phrase(as_text(tidied)):
        return _verdict(False, answer, f"words, by {rule}")
    gold_readings, readings = _parse(as_latex(tidied_gold)), _parse(as_latex(tidied))
    if not readings:
        return failed(Status.UNPARSABLE, f"the answer found ({rule}) cannot be read", answer)
    return _verdict(_compare(gold_readings, readings), answer, f"math-verify, by {rule}")


def _exact_enough(answer: str, gold: str) -> bool:
    """Two decimals or two fractions are compared exactly; a decimal for a fraction may be rounded, so not here."""
    decimal = "." in answer or "." in gold
    fraction = "/" in answer + gold or "frac" in answer + gold
    return not (decimal and fraction)


def _same_spelling(answer: str, gold: str) -> bool:
    return as_text(answer) == as_text(gold) if _is_words(as_text(gold)) else _squeeze(answer) == _squeeze(gold)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _verdict(correct: bool, answer: str, how: str) -> Verdict:
    return Verdict(Status.CORRECT if correct else Status.WRONG, 1.0 if correct else 0.0, answer, f"compared as {how}")
