"""Isolation: what hangs, dies or eats memory costs its own answer and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tepo
from tepo.data.problem import Problem
from tepo.errors import TepoError
from tepo.rewards import judge_math
from tepo.rewards.pool import JudgePool, Request
from tepo.rewards.process import WorkerProcess
from tepo.rewards.verdict import Status
from tepo.rewards.wire import HEADER, decode, encode

SOURCE = str(Path(tepo.__file__).resolve().parents[1])
HOSTILE = """
import os, sys, time
from tepo.rewards import Verdict, Status

def judge(response, problem):
    if response == "hang": time.sleep(1000)
    if response == "spin":
        while True: pass
    if response == "die": os._exit(3)
    if response == "exit": sys.exit(3)
    if response == "crash": os.kill(os.getpid(), 11)
    if response == "eat": return len(bytearray(10**12)) > 0
    if response == "eat slowly":
        kept = []
        while True: kept.append(bytearray(10**8))
    if response == "raise": raise KeyError("no such thing")
    if response == "print": print("noise " * 10000); os.write(1, b"more noise"); sys.stdout.flush()
    if response == "half": return 0.5
    if response == "verdict": return Verdict(Status.UNPARSABLE, 0.0, "x", "mine")
    if response == "text": return "yes"
    if response == "two": return 2.0
    if response == "input": input()
    if response == "info": return problem.info["pair"] == (1, 2) and problem.id == "p" and problem.prompt == "q"
    return True

def slow(response, problem):
    time.sleep(0.5)
    return True

value = 5
"""
PROBLEM = Problem("p", "q", "1", {"pair": (1, 2)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "hostile.py").write_text(HOSTILE)
    (folder / "broken.py").write_text("1/0")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[JudgePool]:
    with JudgePool(workers=2, timeout=1.0, memory_mb=512) as pool:
        yield pool


def ask(pool: JudgePool, *responses: str, verifier: str = "hostile:judge") -> list[tuple[Status, str]]:
    verdicts = pool.judge([Request(verifier, response, PROBLEM) for response in responses])
    return [(verdict.status, verdict.detail) for verdict in verdicts]


def test_a_worker_that_hangs_times_out_and_the_rest_is_judged(pool: JudgePool) -> None:
    began = time.monotonic()
    statuses = [status for status, _ in ask(pool, "a", "hang", "b", "spin", "c", "d")]
    assert statuses == [Status.CORRECT, Status.TIMEOUT, Status.CORRECT, Status.TIMEOUT, Status.CORRECT, Status.CORRECT]
    assert time.monotonic() - began < 10


def test_a_worker_that_dies_is_replaced(pool: JudgePool) -> None:
    first, died, crashed, last = ask(pool, "first", "die", "crash", "last")
    assert first[0] is last[0] is Status.CORRECT
    assert died[0] is Status.ERROR
    assert "exit code 3" in died[1]
    assert crashed[0] is Status.ERROR
    assert "SIGSEGV" in crashed[1]


def test_memory_is_limited(folder: Path) -> None:
    with JudgePool(workers=2, timeout=30, memory_mb=512) as pool:
        at_once, slowly, after = ask(pool, "eat", "eat slowly", "after")
    assert at_once[0] is slowly[0] is Status.ERROR
    assert "512 MiB" in at_once[1]
    assert after[0] is Status.CORRECT


def test_an_exception_and_an_exit_are_errors_with_their_text(pool: JudgePool) -> None:
    raised, left = ask(pool, "raise", "exit")
    assert raised == (Status.ERROR, "KeyError: 'no such thing'")
    assert left[0] is Status.ERROR
    assert "SystemExit" in left[1]


def test_printing_does_not_reach_the_protocol(pool: JudgePool) -> None:
    assert [status for status, _ in ask(pool, "print", "x", "print", "y")] == [Status.CORRECT] * 4
    assert ask(pool, "input")[0] == (Status.ERROR, "EOFError: EOF when reading a line")


def test_what_a_users_function_may_return(pool: JudgePool) -> None:
    verdicts = pool.judge(
        [Request("hostile:judge", text, PROBLEM) for text in ("half", "verdict", "text", "two", "info")]
    )
    assert [(verdict.status.value, verdict.score) for verdict in verdicts] == [
        ("wrong", 0.5), ("unparsable", 0.0), ("error", 0.0), ("error", 0.0), ("correct", 1.0),
    ]  # fmt: skip
    assert "returned 'yes' (str); allowed is a bool" in verdicts[2].detail
    assert verdicts[1].extracted == "x"


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (
            "maths",
            r"reward\.verifier=maths: there is no such verifier; allowed are math, integer, .*gym, or your own",
        ),
        ("nowhere:judge", r"the module 'nowhere' cannot be imported: ModuleNotFoundError"),
        ("broken:judge", r"the module 'broken' cannot be imported: ZeroDivisionError"),
        ("hostile:juge", r"'juge' is not there in .*hostile\.py; it has .*judge"),
        ("hostile:value", r"'value' is not a function in .*hostile\.py"),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_judged(pool: JudgePool, verifier: str, message: str) -> None:
    with pytest.raises(TepoError, match=message):
        pool.check(verifier)


def test_a_pattern_that_backtracks_for_ever_times_out(pool: JudgePool) -> None:
    pattern = Problem("", "", r"(a+)+$")
    hostile, plain = pool.judge([Request("format", "a" * 40 + "b", pattern), Request("format", "aaa", pattern)])
    assert (hostile.status, plain.status) == (Status.TIMEOUT, Status.CORRECT)


def test_hostile_mathematics_ends(pool: JudgePool) -> None:
    bombs = [
        "9^{9^{9^{9}}}",
        "{" * 1000,
        "\\frac{" * 300,
        "((((" * 200 + "1",
        "10^{10^{10}}!",
        "\u202e\ud800",
        "1" * 1900,
    ]
    verdicts = pool.judge([Request("math", f"\\boxed{{{bomb}}}", Problem("", "", "7")) for bomb in bombs])
    assert not any(verdict.correct for verdict in verdicts)
    assert pool.judge([Request("math", r"\boxed{7}", Problem("", "", "7"))])[0].correct


def test_order_is_kept_and_workers_work_at_once(pool: JudgePool) -> None:
    requests = [Request("math", f"\\boxed{{{i}}}", Problem("", "", str(i - i % 2))) for i in range(60)]
    assert [verdict.correct for verdict in pool.judge(requests)] == [i % 2 == 0 for i in range(60)]
    pool.check("hostile:slow")
    ask(pool, "warm 1", "warm 2", verifier="hostile:slow")
    began = time.monotonic()
    ask(pool, "1", "2", "3", "4", verifier="hostile:slow")
    assert 1.0 <= time.monotonic() - began < 1.9


def test_equal_requests_are_judged_once(pool: JudgePool) -> None:
    ask(pool, "again", verifier="hostile:slow")
    began = time.monotonic()
    assert ask(pool, *["again"] * 50, verifier="hostile:slow") == [(Status.CORRECT, "hostile:slow returned True")] * 50
    assert time.monotonic() - began < 0.45


def test_a_worker_killed_from_outside_loses_nothing(folder: Path) -> None:
    with JudgePool(workers=1) as pool:
        pool.check("hostile:slow")
        idle = pool._idle.get()
        assert idle is not None
        os.kill(idle.pid, signal.SIGKILL)
        pool._idle.put(idle)
        assert ask(pool, "k1", "k2", verifier="hostile:slow") == [(Status.CORRECT, "hostile:slow returned True")] * 2
        busy = pool._idle.get()
        assert busy is not None
        pool._idle.put(busy)
        threading.Timer(0.2, os.kill, (busy.pid, signal.SIGKILL)).start()
        assert [status for status, _ in ask(pool, "k3", "k4", verifier="hostile:slow")] == [Status.CORRECT] * 2


def test_threads_share_a_pool(pool: JudgePool) -> None:
    results: list[bool] = []

    def work(number: int) -> None:
        results.append(pool.judge([Request("math", f"\\boxed{{{number}}}", Problem("", "", str(number)))])[0].correct)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_judge_math_is_isolated_and_works_off_the_main_thread() -> None:
    out: list[bool] = []
    thread = threading.Thread(target=lambda: out.append(judge_math(r"\boxed{\frac{10}{9}}", "10/9").correct))
    thread.start()
    thread.join()
    assert out == [True]
    assert judge_math("", "").status is Status.ERROR


def run(*arguments: str, text: str | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_from_a_command_line_and_standard_input_without_a_main_guard() -> None:
    code = "from tepo.rewards import judge_math; print(judge_math('1/2', '0.5').status)"
    assert run("-c", code) == "correct"
    assert run("-", text=code) == "correct"


def test_a_worker_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tepo.rewards import worker, judges; judges.load_judge('math'); judges.load_judge('exact'); "
        "print([m for m in ('torch', 'transformers', 'pydantic', 'numpy', 'datasets') if m in sys.modules])"
    )
    assert run("-c", code) == "[]"


def test_workers_end_with_a_parent_that_is_killed(folder: Path) -> None:
    code = (
        "import os, threading, time; from tepo.rewards import JudgePool, Request; from tepo.data import Problem\n"
        "pool = JudgePool(1, timeout=100); pool.check('hostile:judge')\n"
        "worker = pool._idle.get(); pool._idle.put(worker)\n"
        "spin = [Request('hostile:judge', 'spin', Problem('p', 'q', '1'))]\n"
        "threading.Thread(target=pool.judge, args=(spin,)).start()\n"
        "time.sleep(0.3); print(worker.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    pid, limit = int(done.stdout), time.monotonic() + 10
    while alive(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[-1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_closed_pool_leaves_no_process() -> None:
    pool = JudgePool(1)
    pool.check("exact")
    worker = pool._idle.get()
    assert worker is not None
    pool._idle.put(worker)
    pool.close()
    pool.close()
    assert not alive(worker.pid)


def test_a_worker_that_cannot_start_says_so() -> None:
    worker = WorkerProcess(16)
    try:
        with pytest.raises(TepoError, match=r"reward\.verifier=math"):
            worker.load("math")
    finally:
        worker.close()


def test_the_wire_keeps_tuples_keys_and_lone_surrogates() -> None:
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): None}, "c": "\ud800é", "d": {}}
    assert decode(encode(value)[HEADER:]) == value


def test_a_worker_does_not_count_the_memory_of_its_parent() -> None:
    """On Linux ru_maxrss passes through exec: beside a large model every worker was replaced after every answer."""
    ballast = bytearray(500 * 2**20)
    for page in range(0, len(ballast), 4096):
        ballast[page] = 1
    with JudgePool(workers=1, memory_mb=512) as pool:
        problem = Problem("p", "", "7")
        pool.judge([Request("exact", "7", problem)])
        before = _idle_pids(pool)
        assert len(before) == 1
        pool.judge([Request("exact", f"{i}", problem) for i in range(20)])
        assert _idle_pids(pool) == before
    assert len(ballast)


def _idle_pids(pool: JudgePool) -> list[int]:
    return [worker.pid for worker in pool._idle.queue if worker is not None]
