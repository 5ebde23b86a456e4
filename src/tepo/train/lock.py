"""One run at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from tepo.errors import TepoError

LOCK = ".lock"


class FolderLock:
    """Held from `acquire` to `release`, or to the end of the process however it ends: nothing of it can go stale.

    It is a lock of the operating system (flock) on a file that stays; what the file says is for people to read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises TepoError when another process holds it."""
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise TepoError(
                f"output = {str(self.folder)!r} is in use by another run ({holder or 'which has just started'}): wait "
                "for it to end, or choose another folder with output=FOLDER"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """May be called when it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
