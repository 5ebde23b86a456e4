"""verl's custom reward function from our verdicts, judged in isolated worker processes.

reward.custom_reward_function.path=pkg://tepo.integrations.verl.score
+reward.custom_reward_function.reward_kwargs.wrong=-1
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from tepo.data.problem import Problem
from tepo.rewards import JudgePool, Request
from tepo.rewards.judges import FORMAT


@functools.cache
def _pool(workers: int, timeout: float, memory_mb: int) -> JudgePool:
    return JudgePool(workers, timeout, memory_mb)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    verifier: str = "auto",
    correct: float = 1.0,
    wrong: float = 0.0,
    partial: bool = False,
    pattern: str | None = None,
    pattern_score: float = 0.1,
    timeout: float = 5.0,
    memory_mb: int = 2048,
    workers: int = 1,
    **_: Any,
) -> dict[str, Any]:
    """`score`, what the objective sees; `acc`, raw accuracy, by which verl may filter groups; the verdict's `status`.

    verifier: a name of ours, or your own `module:function`; `auto` is that of the task, which `write_parquet` wrote.
    correct, wrong, partial, pattern, pattern_score: as in the section `reward` of a recipe. timeout: seconds an answer
    may take. workers: judging processes of each of verl's reward workers (`reward.num_workers`).
    """
    info = dict(extra_info or {})
    problem = Problem(
        str(info.get("id", "")), str(info.get("problem", "")), str(ground_truth), json.loads(info.get("info") or "{}")
    )
    judge = str(info.get("verifier") or "math") if verifier == "auto" else verifier
    requests = [Request(judge, solution_str, problem)]
    if pattern is not None:
        requests.append(Request(FORMAT, solution_str, Problem("", "", pattern)))
    verdict, *found = _pool(workers, timeout, memory_mb).judge(requests)
    share = verdict.score if partial else float(verdict.correct)
    bonus = pattern_score if any(form.correct for form in found) else 0.0
    return {
        "score": wrong + share * (correct - wrong) + bonus,
        "acc": float(verdict.correct),
        "status": verdict.status.value,
    }
