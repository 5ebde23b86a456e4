"""Judging in isolation. Model output is hostile text: it makes parsers hang, recurse, crash and eat memory.

Each answer is judged in one of several worker processes, with limits on processor time and memory there and on the wall
clock here. A worker that hangs or dies is killed and replaced; its answer gets the status `timeout` or
`error`, and the others go on meanwhile. There are no signals and no shared state: it works from any thread.
"""

import hashlib
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tepo.data.problem import Problem
from tepo.rewards.extract import MAX_REGION
from tepo.rewards.gym import MAX_GYM_REGION
from tepo.rewards.judges import BUILT_IN, FORMAT, GOLD
from tepo.rewards.process import WorkerDied, WorkerKilled, WorkerProcess, WorkerSpent, WorkerTimedOut
from tepo.rewards.verdict import Status, Verdict, failed
from tepo.rewards.wire import encode

MAX_CACHED = 20_000
WALL_CLOCK = 4.0
"""Times the time-out that an answer may take by the wall clock. Processor time is what is limited: on a busy machine,
or while a model computes on all cores, an answer takes longer and is not worse for it."""
_MAX_TEXT = 1_000_000
_KEPT = {"gym": MAX_GYM_REGION} | dict.fromkeys(("math", "integer", "countdown", "countdown_any", "exact"), MAX_REGION)
_BY_GOLD_ALONE = ("math", "integer", "exact", FORMAT, *(GOLD + name for name in ("math", "integer", "exact")))
"""These read nothing else of a problem, and what they do not read must not part equal answers in the cache."""
_REPEATABLE = (Status.CORRECT, Status.WRONG, Status.UNPARSABLE, Status.NO_ANSWER)


@dataclass(frozen=True)
class Request:
    """An answer to judge. `verifier`: of `judges.BUILT_IN`, `module:function`, `format` (a pattern), `gold:` + name."""

    verifier: str
    response: str
    problem: Problem


def auto_workers() -> int:
    """One worker a core that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))


class JudgePool:
    """Worker processes that judge answers. A context manager; workers start when they are first needed.

    Args:
        workers: how many processes, or None for one a core (at most 8).
        timeout: seconds of processor time for one answer; `WALL_CLOCK` times as much by the clock.
        memory_mb: MiB that a worker may take.
    """

    def __init__(self, workers: int | None = None, timeout: float = 5.0, memory_mb: int = 2048) -> None:
        self.workers = auto_workers() if workers is None else workers
        self.timeout, self.memory_mb = timeout, memory_mb
        self._spent = failed(Status.TIMEOUT, f"not judged after {timeout:g} s of processor time (reward.timeout)")
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="tepo-judge")
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; answers that wait are dropped. May be called twice."""
        if os.getpid() != self._owner:
            return  # a forked copy: the workers are the parent's
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get_nowait()
            if worker is not None:
                worker.close()

    def check(self, verifier: str) -> None:
        """Load a verifier in a worker now, so that a wrong name is told before anything is trained.

        Raises:
            TepoError: there is no such verifier, module or function.
        """
        self._threads.submit(self._with_worker, verifier, None).result()

    def judge(self, requests: Sequence[Request]) -> list[Verdict]:
        """Judge all requests; verdicts come in their order. Equal requests are judged once, also across calls.

        Raises:
            TepoError: a verifier that cannot be loaded.
        """
        frames = [self._frame(request) for request in requests]
        keys = [hashlib.sha256(frame).digest() for frame in frames]
        known: dict[bytes, Verdict] = {}
        waiting: dict[bytes, Future[Verdict]] = {}
        with self._lock:
            for key in keys:
                if key in self._cache:
                    self._cache.move_to_end(key)
                    known[key] = self._cache[key]
        try:
            for key, frame, request in zip(keys, frames, requests, strict=True):
                if key not in known and key not in waiting:
                    waiting[key] = self._threads.submit(self._with_worker, request.verifier, frame)
            for key, future in waiting.items():
                known[key] = future.result()
        finally:
            for future in waiting.values():
                future.cancel()
        self._remember({key: known[key] for key in waiting})
        return [known[key] for key in keys]

    def unreadable_golds(self, verifier: str, problems: Sequence[Problem]) -> dict[str, str]:
        """Why the gold of a problem can be compared with nothing, by the problem's id; readable golds are left out."""
        if verifier not in BUILT_IN or verifier == "gym":
            return {}
        verdicts = self.judge([Request(GOLD + verifier, "", problem) for problem in problems])
        return {
            problem.id: verdict.detail
            for problem, verdict in zip(problems, verdicts, strict=True)
            if not verdict.correct
        }

    def _frame(self, request: Request) -> bytes:
        problem = request.problem
        response = request.response[-_KEPT.get(request.verifier, _MAX_TEXT) :]
        whole = request.verifier not in _BY_GOLD_ALONE
        message: dict[str, Any] = {
            "kind": "judge",
            "verifier": request.verifier,
            "response": response,
            "id": problem.id if whole else "",
            "prompt": problem.prompt if whole else "",
            "answer": problem.answer,
            "info": problem.info if whole else {},
            "timeout": self.timeout,
        }
        return encode(message)

    def _with_worker(self, verifier: str, frame: bytes | None) -> Verdict:
        """Judge one answer, or only load without a frame. A worker killed from outside is not the answer's fault."""
        try:
            return self._attempt(verifier, frame)
        except WorkerKilled:
            pass
        try:
            return self._attempt(verifier, frame)
        except WorkerKilled:
            return failed(Status.ERROR, "the judging process was killed twice (is the machine out of memory?)")

    def _attempt(self, verifier: str, frame: bytes | None) -> Verdict:
        """Use an idle worker, and replace it when it fails. Raises WorkerKilled."""
        worker = self._idle.get()
        usable = False
        try:
            if worker is None:
                worker = WorkerProcess(self.memory_mb)
            worker.load(verifier)
            if frame is None:
                usable = True
                return failed(Status.NO_ANSWER, "loaded")
            reply = worker.ask(frame, WALL_CLOCK * self.timeout)
            usable = not reply["retire"]
            return Verdict(Status(reply["status"]), float(reply["score"]), reply["extracted"], reply["detail"])
        except WorkerSpent:
            return self._spent
        except WorkerTimedOut:
            return failed(Status.TIMEOUT, f"not judged after {WALL_CLOCK * self.timeout:g} s by the clock")
        except WorkerKilled:
            raise
        except (WorkerDied, KeyError, ValueError, TypeError) as error:
            return failed(Status.ERROR, f"the judging process failed: {error}")
        finally:
            if worker is not None and not usable:
                worker.close()
            self._idle.put(worker if usable else None)

    def _remember(self, verdicts: dict[bytes, Verdict]) -> None:
        with self._lock:
            for key, verdict in verdicts.items():
                if verdict.status in _REPEATABLE or verdict is self._spent:
                    self._cache[key] = verdict
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
