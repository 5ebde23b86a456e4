"""SIGINT and SIGTERM: the optimizer step that has begun is finished and the run saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BrokenOff(BaseException):
    """A signal came while nothing was changed. As KeyboardInterrupt it is no Exception: no handler is to keep it."""


class StopSignals:
    """A context manager that catches the signals; the second one acts as it would have without.

    breaks: whether BrokenOff is raised at all: of several processes that exchange results, none can break off alone.

    Signals reach the main thread alone: elsewhere nothing is caught, and `requested` stays false.
    """

    def __init__(self, breaks: bool = True) -> None:
        self.breaks = breaks
        self.requested = False
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self.requested = True
        name = signal.Signals(number).name
        # Not by way of a stream: this may have interrupted one that is being written to.
        os.write(2, f"\n{name}: finishing the step and saving; once more to stop at once\n".encode())
        if self._breakable:
            raise BrokenOff

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Within, a signal raises BrokenOff at once; one that came before does so here."""
        self._breakable = self.breaks
        try:
            if self.requested and self.breaks:
                raise BrokenOff
            yield
        finally:
            self._breakable = False
