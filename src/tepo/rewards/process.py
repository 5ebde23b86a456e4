"""The parent's side of one judging process."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tepo.errors import TepoError
from tepo.rewards.wire import HEADER, body_length, decode, encode

START_TIMEOUT = 120.0
"""Seconds that a worker may take to start and to import a verifier: a loaded machine is slow, not hung."""


class WorkerTimedOut(Exception):
    """No reply came in time."""


class WorkerSpent(WorkerTimedOut):
    """The process had used up its processor time: it would again, on a machine that is less busy too."""


class WorkerDied(Exception):
    """The process ended, or sent what is not a reply."""


class WorkerKilled(WorkerDied):
    """The process was ended by SIGKILL, which comes from outside: its operator, or the system short of memory."""


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    environment = dict(os.environ)
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    # One thread and few arenas: both reserve address space, which is what the memory limit counts. One seed of hashes:
    # the order of SymPy's sets must not decide a verdict.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return environment | threads | {"PYTHONHASHSEED": "0"}


class WorkerProcess:
    """A running worker. Not thread-safe: one caller at a time."""

    def __init__(self, memory_mb: int) -> None:
        # A command of its own and not multiprocessing: that imports the caller's __main__ again, which scripts
        # without a guard, notebooks and standard input do not survive. An own session: Ctrl-C is the parent's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tepo.rewards.worker", str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self.loaded: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, verifier: str) -> None:
        """Import a verifier in the worker.

        Raises:
            TepoError: there is no such verifier, or the worker does not start.
        """
        if verifier in self.loaded:
            return
        paths = [os.getcwd(), *(path for path in sys.path if path)]
        try:
            reply = self.ask(encode({"kind": "load", "verifier": verifier, "paths": paths}), START_TIMEOUT)
        except WorkerDied as error:
            raise TepoError(
                f"reward.verifier={verifier}: its judging process ended while loading it ({error})"
            ) from error
        except WorkerTimedOut as error:
            raise TepoError(f"reward.verifier={verifier}: not loaded after {START_TIMEOUT:g} s") from error
        if "error" in reply:
            raise TepoError(f"reward.verifier={verifier}: {reply['error']}")
        self.loaded.add(verifier)

    def ask(self, frame: bytes, timeout: float) -> dict[str, Any]:
        """Send a request and wait for its reply, `timeout` seconds at most.

        Raises:
            WorkerTimedOut, WorkerSpent, WorkerDied, WorkerKilled: the worker must be closed; its pipes are out of step.
        """
        deadline = time.monotonic() + timeout
        try:
            self._send(frame, deadline)
            reply = decode(self._receive(body_length(self._receive(HEADER, deadline)), deadline))
        except (BrokenPipeError, ValueError) as error:
            raise self._death() from error
        if not isinstance(reply, dict):
            raise WorkerDied("its reply is not an object")
        return reply

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            self._wait(self._in, selectors.EVENT_WRITE, deadline)
            view = view[os.write(self._in, view) :]

    def _receive(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._wait(self._out, selectors.EVENT_READ, deadline)
            part = os.read(self._out, count - len(parts))
            if not part:
                raise self._death()
            parts += part
        return bytes(parts)

    @staticmethod
    def _wait(descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerTimedOut

    def _death(self) -> WorkerDied | WorkerTimedOut:
        """How the process ended, waiting a moment for it: a closed pipe comes just before the exit status."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return WorkerDied("it closed its pipe, or sent what is not a reply")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return WorkerSpent("processor time")
        if code == -signal.SIGKILL:
            return WorkerKilled("signal SIGKILL")
        return WorkerDied(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
