"""What judging one response gives."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How judging ended. Only `correct` says that the answer is right; the rest say why it is not known to be."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    """An answer was found, but it could not be read."""
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    """The judging itself failed: an unreadable gold, a crash, memory, an exception in a user's verifier."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    `score` lies in [0, 1]: 1 for a correct answer, what a verifier with partial credit gave otherwise.
    `extracted` is the answer found in the response; `detail` says why, for a person.
    """

    status: Status
    score: float
    extracted: str | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.score) and 0.0 <= self.score <= 1.0):
            raise ValueError(f"score {self.score} of a verdict: it must lie in [0, 1]")

    @property
    def correct(self) -> bool:
        return self.status is Status.CORRECT


def failed(status: Status, detail: str, extracted: str | None = None) -> Verdict:
    """A verdict that pays nothing."""
    return Verdict(status, 0.0, extracted, detail)
