"""Reading rows from a local file or the hub. Every fault is one TepoError that names the place."""

import glob
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tepo.errors import TepoError

SUFFIXES = (".jsonl", ".json", ".parquet")


class RowPlace:
    """Names a row for a person: file and line, or data set and row."""

    def __init__(self, source: str, unit: str, number: int) -> None:
        self.source, self.unit, self.number = source, unit, number

    def __str__(self) -> str:
        return f"{self.source}, {self.unit} {self.number}"


Row = tuple[RowPlace, dict[str, Any]]


def is_file_name(name: str) -> bool:
    return name.endswith(SUFFIXES)


def read_files(pattern: str, key: str) -> Iterator[Row]:
    """Rows of a file, or of all files that a pattern with `*` matches, in the order of their names.

    Raises:
        TepoError: no such file, another suffix than .jsonl, .json or .parquet, a line that is not a JSON object.
    """
    paths = sorted(glob.glob(pattern)) if any(sign in pattern for sign in "*?") else [pattern]
    if not paths:
        raise TepoError(f"{key}={pattern}: no file has such a name")
    for name in paths:
        path = Path(name)
        if not is_file_name(name):
            raise TepoError(f"{key}={name}: found a file ending in {path.suffix!r}; allowed are {', '.join(SUFFIXES)}")
        if path.is_dir():
            raise TepoError(
                f"{key}={name}: is a folder; a file is wanted (a pattern such as {name}/*.jsonl takes several)"
            )
        if not path.is_file():
            raise TepoError(
                f"{key}={name}: no such file (looked in {Path.cwd() if not path.is_absolute() else path.parent})"
            )
        reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[path.suffix]
        yield from reader(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = RowPlace(str(path), "line", number)
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise TepoError(f"{place}: byte {error.start + 1} is not UTF-8; the file must be UTF-8") from error
            except RecursionError:
                raise TepoError(
                    f"{place}: nested too deeply; each line must be one object with named columns"
                ) from None
            except json.JSONDecodeError as error:
                shown = line.decode("utf-8", "replace").strip()[:60]
                raise TepoError(
                    f"{place}: not JSON ({error.msg}, column {error.colno}): {shown!r}; each line must be one object"
                ) from error
            yield place, _as_object(row, place)


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TepoError(f"{path}: byte {error.start + 1} is not UTF-8; the file must be UTF-8") from error
    except RecursionError:
        raise TepoError(f"{path}: nested too deeply; the file must be a list of objects") from None
    except json.JSONDecodeError as error:
        raise TepoError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); the file must be a list of objects"
        ) from error
    if not isinstance(rows, list):
        raise TepoError(f"{path}: found a {type(rows).__name__}; the file must be a list of objects (or .jsonl)")
    for number, row in enumerate(rows, start=1):
        place = RowPlace(str(path), "row", number)
        yield place, _as_object(row, place)


def _as_object(row: Any, place: RowPlace) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TepoError(f"{place}: found a {type(row).__name__}; a row must be an object with named columns")
    return row


def _read_parquet(path: Path) -> Iterator[Row]:
    import datasets
    import pyarrow

    try:
        # The loader keys its cache by the file's path and time, so a changed file is read again.
        rows = datasets.Dataset.from_parquet(str(path))
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowInvalid, ValueError) as error:
        raise TepoError(f"{path}: not a parquet file that can be read ({error})") from error
    yield from _numbered(str(path), rows)


def _numbered(source: str, rows: Iterable[Any]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield RowPlace(source, "row", number), dict(row)


def read_hub(name: str, subset: str | None, split: str) -> Iterator[Row]:
    """Rows of one split of a data set on the Hugging Face hub (or in its local cache).

    Raises:
        TepoError: the data set cannot be had; the message names it and the remedy, a local file.
    """
    import datasets
    import httpx

    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()
        raise TepoError(
            f"data.name: the data set {name!r} (subset {subset or 'default'}, split {split!r}) cannot be had from the "
            f"Hugging Face hub: {reason[0] if reason else type(error).__name__}. "
            f"Check the id, or give local files with data.file=TRAIN.jsonl (and data.test_file=TEST.jsonl)"
        ) from error
    yield from _numbered(f"{name} ({split})", rows)


def reach(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; a dot reaches into a record. Raises KeyError when it is not there."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(column)
        value = value[part]
    return value
