"""Our verdicts as the reward functions of other trainers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tepo.data.problem import Problem
from tepo.rewards import JudgePool, Request, Verdict

RewardFunction = Callable[..., list[float]]


def verdict_reward(
    verifier: str = "math",
    answer: str = "answer",
    *,
    correct: float = 1.0,
    wrong: float = 0.0,
    workers: int | None = None,
    timeout: float = 5.0,
) -> RewardFunction:
    """A reward function for TRL: judged in isolated worker processes, as in our own trainer.

    verifier: a name of ours, or your own `module:function`. answer: the data set's column with the gold answer.
    correct, wrong: what a verdict pays. workers: judging processes, one a core when not given; timeout: seconds.
    """
    pool = functools.cache(lambda: JudgePool(workers, timeout))

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        if answer not in columns:
            known = ", ".join(name for name in columns if isinstance(columns[name], list)) or "none"
            raise ValueError(f"the data set has no column {answer!r} with the gold answers; columns: {known}")
        golds = [str(gold) for gold in columns[answer]]
        return [correct if v.correct else wrong for v in judged(pool(), verifier, completions, golds)]

    reward.__name__ = f"verdict_{verifier.rpartition(':')[2]}"  # the name under which TRL logs it
    return reward


def judged(pool: JudgePool, verifier: str, completions: Sequence[Any], golds: Sequence[str]) -> list[Verdict]:
    """Verdicts on completions, texts or lists of chat messages."""
    texts = [text_of(completion) for completion in completions]
    requests = [Request(verifier, text, Problem("", "", gold)) for text, gold in zip(texts, golds, strict=True)]
    return pool.judge(requests)


def text_of(completion: Any) -> str:
    """The text of a completion: what it is, or what its messages say."""
    if isinstance(completion, str):
        return completion
    parts = [message["content"] for message in completion]
    return "".join(part if isinstance(part, str) else "".join(p.get("text", "") for p in part) for part in parts)
