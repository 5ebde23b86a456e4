"""The verifiers by name. This runs in a worker; nothing here limits time or memory."""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from tepo.data.problem import Problem
from tepo.rewards.countdown import given_numbers, judge_countdown
from tepo.rewards.exact import judge_exact
from tepo.rewards.gym import FULL, judge_gym
from tepo.rewards.integer import gold_integer, judge_integer
from tepo.rewards.verdict import Status, Verdict, failed

Judge = Callable[[str, Problem], Verdict]

BUILT_IN = ("math", "integer", "countdown", "countdown_any", "exact", "gym")
FORMAT = "format"
"""Not a verifier of answers: is the regular expression in `problem.answer` found in the response?"""
GOLD = "gold:"
"""Before a verifier's name: is the gold answer of `problem` one that it can compare with? The response is not read."""


class VerifierError(Exception):
    """A verifier's name leads to nothing that can be called."""


def load_judge(name: str, paths: Sequence[str] = ()) -> Judge:
    """The judge of this name; a user's `module:function` is imported, with `paths` searched too.

    Raises:
        VerifierError: no such verifier, module or function.
    """
    if name.startswith(GOLD):
        return _gold_judge(name.removeprefix(GOLD))
    if name == "math":
        from tepo.rewards.maths import judge_math_here

        # Loads SymPy and the grammar now, and not within the first answer's time.
        for answer, gold in (("1", r"\frac{1}{2}"), (r"\sqrt{2} x^2 - 1", r"(x-1)(x+1)"), ("(0, 1]", r"x < \pi")):
            judge_math_here(answer, gold)
        return lambda response, problem: judge_math_here(response, problem.answer)
    if name == "integer":
        return lambda response, problem: judge_integer(response, problem.answer)
    if name in ("countdown", "countdown_any"):
        return lambda response, problem: judge_countdown(response, problem, every_number=name == "countdown")
    if name == "exact":
        return lambda response, problem: judge_exact(response, problem.answer)
    if name == "gym":
        try:
            importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise VerifierError("it needs reasoning-gym, which is not installed: pip install 'tepo[gym]'") from error
        return judge_gym
    if name == FORMAT:
        return _search
    function = import_function(name, paths, "verifier", BUILT_IN)
    return lambda response, problem: _as_verdict(function(response, problem), name)


def _gold_judge(name: str) -> Judge:
    """Whether a gold can be compared with, in words when not. Scorers that bring their own golds take any."""

    def unreadable(problem: Problem) -> str:
        gold = problem.answer
        if name == "math":
            from tepo.rewards.maths import readable_gold

            return "" if readable_gold(gold) else f"{gold[:80]!r} is neither a number, nor words, nor LaTeX that parses"
        if name in ("integer", "countdown", "countdown_any") and gold_integer(gold) is None:
            return f"{gold[:80]!r} is not a whole number"
        if name.startswith("countdown") and given_numbers(problem) is None:
            return "there is no list of whole numbers (column nums)"
        return "" if name != "exact" or gold.strip() else "it is empty"

    def judge(response: str, problem: Problem) -> Verdict:
        reason = unreadable(problem)
        return failed(Status.ERROR, reason) if reason else Verdict(Status.CORRECT, 1.0, None, "the gold can be read")

    return judge


def _search(response: str, problem: Problem) -> Verdict:
    if re.search(problem.answer, response, re.DOTALL):
        return Verdict(Status.CORRECT, 1.0, None, "the pattern is found")
    return failed(Status.WRONG, "the pattern is not found")


def import_function(name: str, paths: Sequence[str], what: str, built_in: Sequence[str]) -> Callable[..., Any]:
    """The function `module:function` of a user, with `paths` searched too.

    Raises VerifierError, which calls it `what` and names those that are built in.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise VerifierError(
            f"there is no such {what}; allowed are {', '.join(built_in)}, or your own `module:function`"
        )
    sys.path[:0] = [path for path in paths[:1] if path not in sys.path]
    sys.path.extend(path for path in paths[1:] if path not in sys.path)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does wrong is told to the user
        raise VerifierError(
            f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        found = "is not a function" if function is not None else "is not there"
        raise VerifierError(f"{function_name!r} {found} in {module.__file__}; it has {', '.join(there[:8]) or 'none'}")
    return function  # type: ignore[no-any-return]


def _as_verdict(result: Any, name: str) -> Verdict:
    """What a user's function may return: a Verdict, a bool, or a score from 0 to 1."""
    if isinstance(result, Verdict):
        return result
    if hasattr(result, "item") and not isinstance(result, Real):
        result = result.item()  # a NumPy or torch scalar
    if isinstance(result, bool):
        return Verdict(Status.CORRECT if result else Status.WRONG, float(result), None, f"{name} returned {result}")
    if isinstance(result, Real) and 0.0 <= float(result) <= 1.0:
        status = Status.CORRECT if float(result) >= FULL else Status.WRONG
        return Verdict(status, float(result), None, f"{name} returned {float(result):g}")
    allowed = "a bool, a number from 0 to 1, or a Verdict"
    return failed(Status.ERROR, f"{name} returned {result!r:.80} ({type(result).__name__}); allowed is {allowed}")
