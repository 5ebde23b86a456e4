"""Process reward models: what the steps of a response are worth, one by one.

A process reward model is a function of your own, named `module:function` in `reward.process`. It is given the
responses of a rollout, each a problem and the texts of its steps in order, and returns for each response one score a
step, from 0 (wrong) to 1 (right); 0.5 is no opinion. It runs in the trainer's process, so that a model can stay on the
accelerator; like every text of a policy, the steps are hostile input: never evaluate them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo.data.arithmetic import worked_response
from tepo.data.problem import Problem
from tepo.errors import TepoError
from tepo.rewards.judges import VerifierError, import_function

ARITHMETIC = "arithmetic"
NO_OPINION = 0.5


@dataclass(frozen=True)
class Steps:
    """A response in steps: their texts, joined, are the text of the response."""

    problem: Problem
    steps: tuple[str, ...]


ProcessRewardModel = Callable[[Sequence[Steps]], Sequence[Sequence[float]]]


def load_process_reward(name: str) -> ProcessRewardModel:
    """The process reward model of that name: `arithmetic`, or a function `module:function`, also of the working folder.

    Raises TepoError when there is none.
    """
    if name == ARITHMETIC:
        return arithmetic_columns
    try:
        return import_function(name, (str(Path.cwd()),), "process reward model", (ARITHMETIC,))
    except VerifierError as error:
        raise TepoError(f"reward.process = {name!r}: {error}") from error


def score_steps(name: str, model: ProcessRewardModel, responses: Sequence[Steps]) -> list[list[float]]:
    """One score from 0 to 1 for each step of each response. Raises TepoError for whatever else the model returns."""
    scores = [[float(score) for score in row] for row in model(responses)]
    if len(scores) != len(responses):
        raise TepoError(f"reward.process = {name!r} returned scores of {len(scores)} responses for {len(responses)}")
    for response, row in zip(responses, scores, strict=True):
        if len(row) != len(response.steps) or not all(math.isfinite(score) and 0 <= score <= 1 for score in row):
            raise TepoError(
                f"reward.process = {name!r} returned {row} for a response to {response.problem.id} with "
                f"{len(response.steps)} steps; one number from 0 to 1 a step is wanted"
            )
    return scores


def arithmetic_columns(responses: Sequence[Steps]) -> list[list[float]]:
    """Checks worked additions (tepo.data.arithmetic) column by column.

    The score of a step is the share of the words in it, columns and answer, that stand right in the place where they
    stand; a word that a step only touches counts too, and a step without one is no opinion.
    """
    return [_columns(response) for response in responses]


def _columns(response: Steps) -> list[float]:
    expected = worked_response(response.problem.info["a"], response.problem.info["b"]).split()
    text = "".join(response.steps)
    words = text.split()
    right = [i < len(expected) and word == expected[i] for i, word in enumerate(words)]
    scores, before = [], 0
    for step in response.steps:
        after = before + len(step)
        # Words that have begun by the end of the step, less those that had ended before it.
        begun = len(text[:after].split())
        ended = len(text[:before].split()) - (0 < before < len(text) and not _between_words(text, before))
        touched = right[ended:begun]
        scores.append(sum(touched) / len(touched) if touched else NO_OPINION)
        before = after
    return scores


def _between_words(text: str, place: int) -> bool:
    """Whether no word goes on across a place."""
    return text[place - 1].isspace() or text[place].isspace()
