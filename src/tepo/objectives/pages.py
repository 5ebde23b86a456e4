"""The generated parts of docs/objectives.md and docs/relatives.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tepo.objectives.describe import COLUMNS, EVIDENCE, describe
from tepo.objectives.equalities import equalities
from tepo.objectives.relatives import CONDITIONS, FACTORS
from tepo.objectives.table import TABLE

PARTS = ("advantage", "ratio", "surrogate", "aggregate", "terms", "selection", "shaping")


def objectives_page() -> str:
    """The complete table, what its words mean and what the checks are: the generated part of docs/objectives.md."""
    rows = [describe(objective) for objective in TABLE]
    lines = ["## Objectives", "", *markdown_table(COLUMNS, [_marked(row) for row in rows]), "", "## Parts", ""]
    lines += [f"- **{name}**: {meaning}" for name, meaning in _parts_used().items()]
    lines += ["", "## How they were checked", ""]
    lines += [f"- **{name}**: {meaning}." for name, meaning in EVIDENCE.items()]
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _marked(row: dict[str, str]) -> list[str]:
    """The cells of a row, its name as code and its papers as links."""
    linked = re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", row["what it is"])
    return [f"`{row['name']}`", linked, *(row[column] for column in COLUMNS[2:])]


def _parts_used() -> dict[str, str]:
    """The parts of the table's objectives and the first line of what their docstrings say."""
    found: dict[str, str] = {}
    for column in ("advantage", "ratio", "surrogate", "aggregate", "selection", "shaping", "terms"):
        for objective in TABLE:
            held = getattr(objective, column)
            for part in held if isinstance(held, tuple) else (held,):
                if part is not None:
                    label = part.name if column in ("ratio", "aggregate") else type(part).__name__
                    found[label] = (type(part).__doc__ or "").strip().splitlines()[0]
    return found


def one_part_apart() -> list[tuple[str, str, str]]:
    """Pairs of the table's objectives that differ in one part alone, and in which: derived from the rows."""
    found = []
    for i, one in enumerate(TABLE):
        for other in TABLE[i + 1 :]:
            differing = [part for part in PARTS if getattr(one, part) != getattr(other, part)]
            if len(differing) == 1:
                found.append((one.name, other.name, differing[0]))
    return found


def relatives_page() -> str:
    """Both tables: the generated part of docs/relatives.md."""
    rows = [
        [
            f"`{e.left}`", f"`{e.right}`" + (f", {FACTORS[e.factor]}" if FACTORS[e.factor] else ""), e.condition, e.of,
            e.meaning,
        ]
        for e in equalities()
    ]  # fmt: skip
    lines = ["## Equalities", "", *markdown_table(("this", "is this", "when", "in", "because"), rows), ""]
    lines += [f"- **{condition}**: {meaning}." for condition, meaning in CONDITIONS.items()]
    pairs = [[f"`{one}`", f"`{other}`", part] for one, other, part in one_part_apart()]
    lines += ["", "## One part apart", "", *markdown_table(("objective", "objective", "differ in"), pairs)]
    return "\n".join(lines) + "\n"
