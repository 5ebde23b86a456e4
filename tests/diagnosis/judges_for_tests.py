"""Verifiers with faults, for runs that have to be diagnosed."""

from tepo.data import Problem
from tepo.rewards import Status, Verdict


def anything(response: str, problem: Problem) -> bool:
    """Accepts whatever it is given."""
    return True


def boxed(response: str, problem: Problem) -> Verdict:
    """Wants a form that nobody asked for."""
    if "boxed" not in response:
        return Verdict(Status.NO_ANSWER, 0.0)
    return Verdict(Status.CORRECT, 1.0)


def by_problem(response: str, problem: Problem) -> bool:
    """Looks at the problem alone."""
    return int(problem.answer) % 2 == 0


def broken(response: str, problem: Problem) -> bool:
    """Takes for granted what the problem does not bring."""
    return response.endswith(problem.info["solution"])


def long(response: str, problem: Problem) -> float:
    """Pays for length."""
    return min(len(response) / 150, 1.0)
