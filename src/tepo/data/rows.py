"""From rows to problems: columns, types, answers, names. Every fault is one TepoError that names the row."""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tepo.config.data import Columns
from tepo.data.problem import ChatMessage, Problem, normalised
from tepo.data.read import Row, RowPlace, reach
from tepo.errors import TepoError

ROLES = ("system", "user", "assistant", "tool", "developer")


def problems_from(
    rows: Iterable[Row],
    choices: Sequence[Columns],
    source: str,
    *,
    boxed: bool = False,
    wrapping: tuple[str, str] = ("", ""),
    deduplicate: bool = False,
    skip_unanswered: bool = False,
    question: Callable[[Mapping[str, Any]], str] | None = None,
) -> tuple[list[Problem], dict[str, int]]:
    """Read rows as problems; the first of `choices` whose columns the first row has is used for all.

    A worked solution that ends in `#### answer` (GSM8K) stands for its answer; a list of answers is joined by commas.
    `question` makes the text of a problem whose row has the first of `choices`. With `deduplicate` only the first row
    of each question is kept, with `skip_unanswered` rows without an answer are left out. Returns the problems and the
    numbers of rows left out, by reason.

    Raises:
        TepoError: no rows, a column that is missing, a value of the wrong type, no answer, a repeated id.
    """
    problems: list[Problem] = []
    places: dict[str, RowPlace] = {}
    seen: set[str] = set()
    columns: Columns | None = None
    dropped: Counter[str] = Counter()
    for place, row in rows:
        columns = columns or _fitting(choices, row)
        if skip_unanswered and _has(row, columns.answer) and _is_empty(reach(row, columns.answer)):
            dropped["no answer"] += 1
            continue
        if question is not None and columns is choices[0]:
            row = {**row, "problem": question(row)}
            problem = _problem(place, row, columns.model_copy(update={"problem": "problem"}), boxed=boxed)
        else:
            problem = _problem(place, row, columns, boxed=boxed, wrapping=wrapping)
        if deduplicate:
            asked = normalised(problem)
            if asked in seen:
                dropped["repeated questions"] += 1
                continue
            seen.add(asked)
        if problem.id in places:
            raise TepoError(
                f"{place}: the id {problem.id!r} is that of {places[problem.id]} too; ids must differ "
                f"(leave data.columns.id out to number the rows)"
            )
        places[problem.id] = place
        problems.append(problem)
    if not problems:
        raise TepoError(f"{source}: there are no rows in it; at least one problem is needed")
    return problems, dict(dropped)


def _fitting(choices: Sequence[Columns], row: Mapping[str, Any]) -> Columns:
    for columns in choices:
        if all(_has(row, column) for column in (columns.problem, columns.answer, columns.id) if column is not None):
            return columns
    return choices[0]


def _has(row: Mapping[str, Any], column: str) -> bool:
    try:
        reach(row, column)
    except KeyError:
        return False
    return True


def _value(place: RowPlace, row: Mapping[str, Any], column: str, key: str) -> Any:
    try:
        return reach(row, column)
    except KeyError:
        near = difflib.get_close_matches(column, _all_columns(row), n=2, cutoff=0.5)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise TepoError(
            f"{place}: there is no column {column!r} (data.columns.{key}); "
            f"found {', '.join(map(str, row)) or 'none'}{hint}"
        ) from None


def _all_columns(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, value in row.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            names += _all_columns(value, f"{prefix}{name}.")
    return names


def _problem(
    place: RowPlace,
    row: Mapping[str, Any],
    columns: Columns,
    *,
    boxed: bool,
    wrapping: tuple[str, str] = ("", ""),
) -> Problem:
    prompt = _prompt(place, _value(place, row, columns.problem, "problem"), columns.problem)
    answer = _answer(place, _value(place, row, columns.answer, "answer"), columns.answer, boxed=boxed)
    name = _name(place, row, columns)
    used = {columns.problem, columns.answer, columns.id}
    info = {key: value for key, value in row.items() if key not in used}
    return Problem(name, _unwrapped(prompt, wrapping), answer, info)


def _name(place: RowPlace, row: Mapping[str, Any], columns: Columns) -> str:
    if columns.id is None:
        # A file may hold several named sources; its own `id` is the better name, where it is there.
        name = row.get("id")
        return str(name) if isinstance(name, str | int) and str(name) else f"row-{place.number}"
    name = _value(place, row, columns.id, "id")
    if isinstance(name, bool) or not isinstance(name, str | int) or str(name) == "":
        raise TepoError(f"{place}: column {columns.id!r} holds {_shown(name)}; an id must be a text or a whole number")
    _check_text(place, str(name), columns.id)
    return str(name)


def _prompt(place: RowPlace, value: Any, column: str) -> str | tuple[ChatMessage, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise TepoError(f"{place}: column {column!r} is empty; a problem must have a text")
        _check_text(place, value, column)
        return value
    if isinstance(value, list | tuple) and value:
        return tuple(_message(place, message, column) for message in value)
    raise TepoError(
        f"{place}: column {column!r} holds {_shown(value)}; a problem must be a text or a list of chat messages"
    )


def _message(place: RowPlace, message: Any, column: str) -> ChatMessage:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        raise TepoError(
            f"{place}: column {column!r} has the message {_shown(message)}; a message must have a `role` "
            f"({', '.join(ROLES)}) and a `content` that is a text"
        )
    _check_text(place, content, column)
    return {"role": str(role), "content": content}


def _check_text(place: RowPlace, text: str, column: str) -> None:
    """Raise TepoError for half a character (JSON can name one): no tokenizer takes it, and no file."""
    half = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
    if half is not None:
        raise TepoError(
            f"{place}: column {column!r} holds {half!r}, half of a character (a lone surrogate); a text is wanted"
        )


def _answer(place: RowPlace, value: Any, column: str, *, boxed: bool) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(part, str) for part in value):
        value = ", ".join(value)
    if _is_empty(value):
        raise TepoError(
            f"{place}: no answer (column {column!r} is {'null' if value is None else 'empty'}); each row needs one"
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TepoError(f"{place}: column {column!r} holds {_shown(value)}; an answer must be a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise TepoError(f"{place}: column {column!r} holds {value}, which is not a number that can be an answer")
    text = str(value)
    _check_text(place, text, column)
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip()
        if not text:
            raise TepoError(
                f"{place}: no answer (nothing follows the last #### in column {column!r}); each row needs one"
            )
    elif boxed:
        inside = boxed_answer(text)
        if not inside:
            raise TepoError(
                f"{place}: no answer (no \\boxed{{...}} in the solution in column {column!r}); each row needs one"
            )
        text = inside
    return text


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def boxed_answer(solution: str) -> str | None:
    """Content of the last `\\boxed{...}` (or `\\fbox`) of a worked solution, braces nested; None when there is none."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    rest = solution[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        bare = rest.split("$")[0].split()
        return bare[0].rstrip(".,") if bare else None
    depth, escaped = 0, False
    for index, character in enumerate(rest):
        depth += 0 if escaped else (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return rest[1:index].strip()
    return None


def _unwrapped(prompt: str | tuple[ChatMessage, ...], wrapping: tuple[str, str]) -> str | tuple[ChatMessage, ...]:
    before, after = wrapping
    if not (before or after):
        return prompt
    if not isinstance(prompt, str):
        if len(prompt) != 1 or prompt[0]["role"] != "user":
            return prompt
        prompt = prompt[0]["content"]
    return prompt.removeprefix(before).removesuffix(after)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
