"""Verifiers for tests, in a module that judging processes import at once."""

import os


def odd(response: str, problem: object) -> bool:
    """What a random model gets right about half of the time."""
    return sum(map(ord, response)) % 2 == 1


def fatal(response: str, problem: object) -> bool:
    """Its process ends with some responses."""
    if "99" in response:
        os._exit(3)
    return odd(response, problem)
