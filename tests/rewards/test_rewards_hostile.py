"""Ten thousand hostile responses: no crash, no hang beyond the limit, no memory growth, nothing paid for nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile_texts import hostile_texts

from tepo.data.problem import Problem
from tepo.rewards.countdown import judge_countdown
from tepo.rewards.extract import find_answer
from tepo.rewards.maths import judge_math_here
from tepo.rewards.pool import JudgePool, Request
from tepo.rewards.verdict import Status

GOLD = "7919"
COUNT = 10_000


def memory(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_ten_thousand_hostile_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = Problem("p", "", GOLD)
    limit = 1024 * 2**20
    with JudgePool(workers=2, timeout=1.0, memory_mb=1024) as pool:
        pool.check("math")
        before, peak = memory(os.getpid()), 0
        statuses: Counter[Status] = Counter()
        for start in range(0, COUNT, 500):
            texts = list(hostile_texts(500, seed=start))
            verdicts = pool.judge([Request("math", text, problem) for text in texts])
            statuses.update(verdict.status for verdict in verdicts)
            assert not any(verdict.correct for verdict in verdicts)
            workers = [worker.pid for worker in pool._idle.queue if worker is not None]
            peak = max([peak, *map(memory, workers)])
            control = pool.judge([Request("math", f"\\boxed{{{GOLD}.0}} {start}", problem)])
            assert control[0].status is Status.CORRECT
        grown = memory(os.getpid()) - before
    assert sum(statuses.values()) == COUNT
    assert statuses[Status.TIMEOUT] < COUNT // 50
    assert statuses[Status.ERROR] < COUNT // 50
    assert grown < 100 * 2**20
    assert peak < limit
    assert list(tmp_path.iterdir()) == []


def test_extraction_and_countdown_take_every_hostile_text_in_little_time() -> None:
    problem = Problem("p", "", "55", {"nums": [96, 7, 37, 74]})
    slowest = 0.0
    for text in hostile_texts(1000, seed=1):
        began = time.process_time()
        find_answer(text)
        assert not judge_countdown(text, problem, every_number=True).correct
        slowest = max(slowest, time.process_time() - began)
    assert slowest < 2


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", "(((816566)!)!)!", "10^{99999999999}", "(" * 500 + "1" + ")" * 500, r"\pi^{99999999}"]
)
def test_what_cannot_be_computed_is_not_tried(answer: str) -> None:
    """In this process, without any limit: these took all of an answer's time each."""
    assert not judge_math_here(f"\\boxed{{{answer}}}", "7").correct
    assert not judge_math_here(r"\boxed{7}", answer).correct


def test_a_huge_number_is_compared_by_its_form() -> None:
    assert judge_math_here(r"\boxed{9^{9^{9}} + 1}", "9^{9^9}+1").correct
    assert not judge_math_here(r"\boxed{9^{9^{8}}}", "9^{9^9}").correct


def test_workers_killed_in_the_middle_lose_nothing() -> None:
    """SIGKILL to whichever worker there is, again and again, while 300 answers are judged."""
    stop = threading.Event()
    killed = 0
    with JudgePool(workers=2, timeout=20) as pool:
        pool.check("math")

        def kill() -> None:
            nonlocal killed
            # As often as an answer may be tried again, and only workers that have begun.
            for _ in range(6):
                if stop.wait(0.4):
                    return
                with pool._idle.mutex:
                    workers = [worker for worker in pool._idle.queue if worker is not None]
                if workers:
                    os.kill(workers[0].pid, signal.SIGKILL)
                    killed += 1

        killer = threading.Thread(target=kill)
        killer.start()
        wrong = []
        for start in range(0, 300, 20):
            requests = [
                Request(
                    "math", f"\\boxed{{{n}x + \\sqrt{{{n}}}}}", Problem("", "", f"\\sqrt{{{n - n % 2}}} + {n - n % 2}x")
                )
                for n in range(start + 2, start + 22)
            ]
            verdicts = pool.judge(requests)
            wrong += [(v, n) for n, v in enumerate(verdicts, start + 2) if v.correct is not (n % 2 == 0)]
            time.sleep(0.05)
        stop.set()
        killer.join()
    assert killed
    assert wrong == []
