"""Writing files so that they are there whole or not at all, also after a crash of the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tepo.errors import TepoError


def fsync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file aside, wait until it is on the disk, and put it in its place."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """The same of text; a lone surrogate is kept as it is."""
    replace_bytes(path, text.encode("utf-8", errors="surrogatepass"))


def write_json(path: Path, value: Any) -> None:
    """Plain values as indented JSON."""
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def told_to_the_user(path: Path) -> Iterator[None]:
    """A file of the run folder that cannot be written is the user's to mend: TepoError, with the reason."""
    try:
        yield
    except OSError as error:
        raise TepoError(
            f"{path} cannot be written: {error.strerror or error}; make room or mend it, then go on with --resume"
        ) from error
