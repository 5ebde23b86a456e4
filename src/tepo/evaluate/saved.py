"""The folder of an evaluation: its settings, every response as soon as it is judged, and the result at the end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tepo.data.problem import Problem
from tepo.errors import TepoError
from tepo.files import write_json

SETTINGS, SUMMARY, RESPONSES = "settings.json", "eval.json", "responses.jsonl"


class SavedResponses:
    """responses.jsonl, one response a line, in the order in which they are asked for. A context manager.

    Raises TepoError when the folder holds something else than an evaluation with these settings, or another process
    writes there.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        _check_settings(folder, settings)
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / RESPONSES).open("a+b")
        except OSError as error:
            raise TepoError(f"--output {folder}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise TepoError(f"--output {folder}: another evaluation is writing there") from error
        write_json(folder / SETTINGS, settings)
        self._file.seek(0)
        # A line that an interruption cut off has no end; what follows it cannot be there.
        self._lines = [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self.found = len(self._lines)
        self._taken = 0

    def take(
        self, data: str, kind: str, problems: Sequence[Problem], samples: int, chunk: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The saved records of one pass, and of how many problems they are: whole chunks, or all.

        Further lines are dropped from the file: they are of a chunk that was not finished. Raises TepoError when the
        problems are not those of the saved records.
        """
        wanted = len(problems) * samples
        lines = self._lines[self._taken : self._taken + wanted]
        if len(lines) < wanted:
            lines = lines[: len(lines) // (chunk * samples) * chunk * samples]
        records = [json.loads(line) for line in lines]
        for index, row in enumerate(records):
            problem = problems[index // samples]
            if (row["data"], row["kind"], row["id"]) != (data, kind, problem.id) or (
                row["problem"] != problem.text or row["answer"] != problem.answer
            ):
                raise TepoError(
                    f"--output {self.folder}: line {self._taken + index + 1} of {RESPONSES} is an answer to "
                    f"{row['data']} {row['id']}, and {data} {problem.id} is asked now: the data has changed since. "
                    f"Choose another folder"
                )
        self._taken += len(lines)
        if len(lines) < wanted and self._taken < len(self._lines):
            self._lines = self._lines[: self._taken]
        self._file.truncate(sum(map(len, self._lines)))
        return records, len(lines) // samples

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Write records, so that they outlive the process and the machine."""
        lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in records]
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._lines += lines
        self._taken += len(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None and not self._lines:
            # Nothing was measured: a mistyped name leaves no folder behind.
            for name in (RESPONSES, SETTINGS):
                (self.folder / name).unlink()
            for made in self._made:
                if not any(made.iterdir()):
                    made.rmdir()


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        for name in (SUMMARY, RESPONSES):
            if (folder / name).exists():
                raise TepoError(f"--output {folder}: holds {name} of something else; choose another folder")
        return
    before = _read_json(path)
    now = json.loads(json.dumps(settings))
    if before != now:
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        raise TepoError(
            f"--output {folder}: holds an evaluation with other settings ({', '.join(changed)} differ); "
            f"choose another folder"
        )


def _read_json(path: Path, line: int | None = None, text: str | None = None) -> dict[str, Any]:
    """The object in a file, or in a line of it. Raises TepoError for what is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8") if text is None else text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        place = str(path) if line is None else f"{path}, line {line}"
        raise TepoError(f"{place}: not JSON ({error}); it is not what tepo eval wrote there") from error
    if not isinstance(found, dict):
        raise TepoError(f"{path}: holds a {type(found).__name__}; it is not what tepo eval wrote there")
    return found


def read_responses(folder: Path) -> list[dict[str, Any]]:
    """The responses of a finished evaluation. Raises TepoError when there is none in the folder."""
    if not (folder / SUMMARY).is_file() or not (folder / RESPONSES).is_file():
        raise TepoError(f"{folder}: holds no finished evaluation ({SUMMARY} and {RESPONSES} of tepo eval)")
    path = folder / RESPONSES
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [_read_json(path, number, line) for number, line in enumerate(lines, start=1)]
