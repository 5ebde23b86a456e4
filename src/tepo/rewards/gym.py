"""Judging by a reasoning-gym task's own scorer."""

import json
import math
from functools import lru_cache
from typing import Any

from tepo.data.problem import Problem
from tepo.rewards.extract import answer_region, find_answer, last_tagged
from tepo.rewards.verdict import Status, Verdict, failed

MAX_GYM_REGION = 100_000
"""Characters at the end of a response that are searched: some tasks are answered with a grid or a plan."""

FULL = 1.0 - 1e-9
"""A score from here on is a correct answer."""


@lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> Any:
    import reasoning_gym

    # A scorer may read its task's configuration, so it gets the options that made the problem.
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(options))


def gym_answer(response: str) -> str | None:
    """What stands between the last `<answer>` and `</answer>`, line breaks kept; else a box, `####`, "answer is", or a
    bare short answer."""
    tagged = last_tagged(response[-MAX_GYM_REGION:])
    if tagged is not None:
        return tagged.strip() or None
    found = find_answer(response)
    if found is None or found.rule in ("maths", "number"):
        whole = answer_region(response).strip()
        return whole if whole and len(whole) <= 300 else None
    return found.text


def judge_gym(response: str, problem: Problem) -> Verdict:
    """Score with the task that made `problem` (its entry is in `problem.info["gym"]`); correct at a full score.

    Raises:
        KeyError: the problem was not made by reasoning-gym.
    """
    gym = problem.info["gym"]
    answer = gym_answer(response)
    if answer is None:
        return failed(Status.NO_ANSWER, "nothing between <answer> and </answer>, and no other final answer")
    scorer = _scorer(gym["task"], json.dumps(gym["options"], sort_keys=True))
    score = float(scorer.score_answer(answer, gym["entry"]))
    if not math.isfinite(score):
        return failed(Status.ERROR, f"{gym['task']} scored {score}", answer[:200])
    score = min(max(score, 0.0), 1.0)
    status = Status.CORRECT if score >= FULL else Status.WRONG
    return Verdict(status, score, answer[:200], f"{gym['task']} scored {score:g}")
