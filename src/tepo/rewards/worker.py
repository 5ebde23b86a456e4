"""A judging process: `python -m tepo.rewards.worker MEMORY_MB`. `tepo.rewards.pool` starts and watches it.

It limits its own memory and, for each answer, its processor time: a timer of the kernel ends the process, whatever it
is doing. The wall clock is the parent's. It ends when
its standard input does, also in the middle of an answer, so no worker outlives its parent.
"""

import os
import queue
import resource
import signal
import sys
import threading
from typing import Any

from tepo.data.problem import Problem
from tepo.rewards.judges import Judge, VerifierError, load_judge
from tepo.rewards.verdict import Status, Verdict, failed
from tepo.rewards.wire import HEADER, body_length, decode, encode

_CPU_GRACE = 2
"""Seconds of processor time beyond the time-out, should a verifier stop the timer."""


def _private_pipes() -> tuple[int, int]:
    """Take the protocol's pipes away from fd 0 and 1: judged code reads nothing and prints to standard error."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _read(descriptor: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            os._exit(0)  # the parent is gone; whatever the main thread is doing is of no use any more
        parts += part
    return parts


def _feed(descriptor: int, requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    while True:
        requests.put(decode(_read(descriptor, body_length(_read(descriptor, HEADER)))))


def _write(descriptor: int, frame: bytes) -> None:
    view = memoryview(frame)
    while view:
        view = view[os.write(descriptor, view) :]


def _limit_cpu(seconds: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1 + _CPU_GRACE
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_memory(mebibytes: int) -> None:
    size = mebibytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_memory() -> int:
    """Bytes that this process had in memory at most.

    On Linux `ru_maxrss` will not do: it is inherited through exec, so that a worker would count its parent's memory,
    which holds the model that is trained.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)


def _grown(mebibytes: int) -> bool:
    return _peak_memory() > 0.75 * mebibytes * 2**20


def _judged(judge: Judge, request: dict[str, Any], mebibytes: int) -> Verdict:
    problem = Problem(request["id"], request["prompt"], request["answer"], request["info"])
    _limit_cpu(request["timeout"])
    signal.setitimer(signal.ITIMER_PROF, request["timeout"])
    try:
        return judge(request["response"], problem)
    except MemoryError:
        return failed(Status.ERROR, f"judging took more than {mebibytes} MiB (reward.memory_mb)")
    except BaseException as error:  # a verifier may raise anything, SystemExit too: it becomes the verdict
        return failed(Status.ERROR, f"{type(error).__name__}: {error!s:.300}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serve until standard input ends."""
    mebibytes = int(sys.argv[1])
    requests_pipe, replies_pipe = _private_pipes()
    _limit_memory(mebibytes)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_feed, args=(requests_pipe, requests), daemon=True).start()
    judges: dict[str, Judge] = {}
    while True:
        request = requests.get()
        name = request["verifier"]
        if request["kind"] == "load":
            try:
                judges[name] = load_judge(name, request["paths"])
                reply: dict[str, Any] = {"loaded": name}
            except (VerifierError, MemoryError) as error:
                reply = {"error": str(error) or f"more than {mebibytes} MiB (reward.memory_mb)"}
        else:
            verdict = _judged(judges[name], request, mebibytes)
            reply = {
                "status": verdict.status.value,
                "score": verdict.score,
                "extracted": verdict.extracted,
                "detail": verdict.detail,
                "retire": _grown(mebibytes),
            }
        _write(replies_pipe, encode(reply))


if __name__ == "__main__":
    main()
