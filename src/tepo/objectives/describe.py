"""The table of objectives in words, derived from their parts."""

from __future__ import annotations

import dataclasses

from tepo.objectives.objective import Objective
from tepo.objectives.table import TABLE

COLUMNS = ("name", "paper", "advantage", "ratio", "surrogate", "aggregate", "terms", "needs")


def describe(objective: Objective) -> dict[str, str]:
    """One row of the table: column -> text, settings included."""
    return {
        "name": objective.name,
        "paper": f"{objective.title} ({objective.paper})",
        "advantage": _settings(objective.advantage),
        "ratio": " ".join([objective.ratio.name, *_fields(objective.ratio)]),
        "surrogate": _settings(objective.surrogate),
        "aggregate": " ".join([objective.aggregate.name, *_fields(objective.aggregate)]),
        "terms": "; ".join(_settings(term) for term in objective.terms) or "none",
        "needs": ", ".join(sorted(objective.needs)) or "nothing more",
    }


def describe_all() -> list[dict[str, str]]:
    """A row for each objective, in the order of the table."""
    return [describe(objective) for objective in TABLE]


def _settings(part: object) -> str:
    return " ".join([type(part).__name__, *_fields(part)])


def _fields(part: object) -> list[str]:
    values = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))  # type: ignore[arg-type]
    return [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values
        if value is not None
    ]
