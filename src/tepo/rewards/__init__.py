"""Verdicts on responses and the rewards made from them.

    from tepo.rewards import judge_math
    judge_math(r"so it is \\boxed{\\frac{10}{9}}", "10/9").correct      # True

Judging runs in separate processes: see `tepo.rewards.pool`.
"""

import atexit
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tepo.rewards.verdict import Status, Verdict

if TYPE_CHECKING:
    from tepo.rewards.pool import JudgePool, Request
    from tepo.rewards.reward import Judged, Response, RewardFunction, soft_overlong, status_shares

__all__ = [
    "JudgePool",
    "Judged",
    "Request",
    "Response",
    "RewardFunction",
    "Status",
    "Verdict",
    "judge_math",
    "soft_overlong",
    "status_shares",
]

# The worker imports this package too, and must not import what it does not need (torch, through the recipes).
_HOMES = {
    "JudgePool": "pool",
    "Request": "pool",
    "Judged": "reward",
    "Response": "reward",
    "RewardFunction": "reward",
    "soft_overlong": "reward",
    "status_shares": "reward",
}
_shared: "tuple[int, JudgePool] | None" = None
_shared_lock = threading.Lock()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tepo.rewards.{_HOMES[name]}"), name)


def judge_math(prediction: str, gold: str) -> Verdict:
    """Judge a response (or an answer alone) against a gold answer, isolated: 5 seconds, 2 GiB, any thread.

    For what counts as the answer see `tepo.rewards.extract`. A gold answer that cannot be read never pays: status
    `error`. The worker processes start with the first call and end with the program.
    """
    from tepo.data.problem import Problem
    from tepo.rewards.pool import Request

    return _shared_pool().judge([Request("math", prediction, Problem("", "", gold))])[0]


def _shared_pool() -> "JudgePool":
    global _shared
    from tepo.rewards.pool import JudgePool

    with _shared_lock:
        # A forked child has the parent's pipes and none of its threads: it needs a pool of its own.
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), JudgePool())
            atexit.register(_shared[1].close)
        return _shared[1]
