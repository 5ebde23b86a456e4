"""The objectives by name: each a row of parts. To add one, add a row."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tepo.objectives.advantages import GroupAdvantage
from tepo.objectives.aggregates import AGGREGATES, ConstantLength, SequenceMean, TokenMean
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import RATIOS, SequenceRatio, SequenceTokenRatio, TokenRatio
from tepo.objectives.surrogates import Clip
from tepo.objectives.terms import EntropyBonus, KLMask, ReferenceKL, Term

STANDARDISED = GroupAdvantage(normalize=True)
CENTRED = GroupAdvantage(normalize=False)

TABLE = (
    Objective(
        "tepo", "TEPO: sequence ratio, token mean, KL mask", "2604.12736 (revision of 2510.09369)",
        STANDARDISED, SequenceRatio(), Clip(2e-3, 2.5e-3), TokenMean(), (KLMask(beta=0.01),),
    ),
    Objective(
        "tepo_v1", "TEPO, first version: no KL mask", "2510.09369",
        STANDARDISED, SequenceRatio(), Clip(2e-3, 2.5e-3), TokenMean(),
    ),
    Objective(
        "grpo", "GRPO", "2402.03300",
        STANDARDISED, TokenRatio(), Clip(0.2, 0.2), SequenceMean(), (ReferenceKL(beta=0.04, estimator="k3"),),
    ),
    Objective(
        "dr_grpo", "Dr.GRPO", "2503.20783",
        CENTRED, TokenRatio(), Clip(0.2, 0.2), ConstantLength(3000),
    ),
    Objective(
        "dapo", "DAPO", "2503.14476",
        STANDARDISED, TokenRatio(), Clip(0.2, 0.28), TokenMean(),
    ),
    Objective(
        "gspo", "GSPO", "2507.18071",
        STANDARDISED, SequenceRatio(), Clip(3e-4, 4e-4), SequenceMean(),
    ),
    Objective(
        "gspo_token", "GSPO-token: advantages may vary inside a response", "2507.18071",
        STANDARDISED, SequenceTokenRatio(), Clip(3e-4, 4e-4), SequenceMean(),
    ),
)  # fmt: skip

_BY_NAME = {row.name: row for row in TABLE}


def list_objectives() -> list[str]:
    """The names that `get_objective` takes, in the order of the table."""
    return list(_BY_NAME)


def get_objective(name: str, **overrides: Any) -> Objective:
    """The objective of that name, with some of its settings replaced.

    name: a name from `list_objectives()`; hyphens and case do not matter.
    overrides: `clip_low`, `clip_high`, `dual_clip` (numbers), `ratio` (token, sequence, sequence_token), `aggregate`
        (token_mean, sequence_mean, constant_length), `length_normalizer` (tokens), `kl_mask` (None, beta, or a mapping
        with the fields of KLMask), `ref_kl` (None, beta, or the fields of ReferenceKL), `entropy_bonus` (None or a
        coefficient), `normalize_advantage` (bool), `advantage_epsilon`.
    Raises ValueError for an unknown name or override, a value that is not allowed, and an override that the objective
    has no use for.
    """
    key = name.lower().replace("-", "_")
    if key not in _BY_NAME:
        raise ValueError(f"unknown objective {name!r}{_nearest(key, _BY_NAME)}; known: {', '.join(_BY_NAME)}")
    objective = _BY_NAME[key]
    # Parts are exchanged before their fields are set, so that the order in which overrides are given is of no account.
    for override in sorted(overrides, key=lambda override: override not in ("ratio", "aggregate")):
        if override not in _OVERRIDES:
            raise ValueError(f"objective {key} has no option {override!r}{_nearest(override, _OVERRIDES)}; options: "
                             f"{', '.join(_OVERRIDES)}")  # fmt: skip
        objective = _OVERRIDES[override](objective, overrides[override])
    return objective


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


Override = Callable[[Objective, Any], Objective]


def _field(option: str, part: str, field: str) -> Override:
    """An override that sets one field of one part, where the part has such a field."""

    def override(objective: Objective, value: Any) -> Objective:
        current = getattr(objective, part)
        if not any(f.name == field for f in dataclasses.fields(current)):
            raise ValueError(
                f"objective {objective.name} does not use {option}: its {part} is {type(current).__name__}"
            )
        is_number = isinstance(value, int | float) and (isinstance(value, bool) == (field == "normalize"))
        if not is_number and not (value is None and field == "dual"):
            raise ValueError(
                f"{option} is {value!r}; a {'truth value' if field == 'normalize' else 'number'} is allowed"
            )
        return dataclasses.replace(objective, **{part: dataclasses.replace(current, **{field: value})})

    return override


def _part(option: str, kinds: Mapping[str, Callable[[], Any]]) -> Override:
    """An override that exchanges one part by name."""

    def override(objective: Objective, value: Any) -> Objective:
        if not isinstance(value, str) or value not in kinds:
            raise ValueError(f"{option} is {value!r}; allowed: {', '.join(kinds)}")
        return dataclasses.replace(objective, **{option: kinds[value]()})

    return override


def _term(option: str, kind: type[Term], number: str) -> Override:
    """An override that adds, changes (None: drops) the term of one kind; a bare number is its coefficient."""

    def override(objective: Objective, value: Any) -> Objective:
        current = next((term for term in objective.terms if isinstance(term, kind)), None)
        others = tuple(term for term in objective.terms if not isinstance(term, kind))
        if value is None:
            return dataclasses.replace(objective, terms=others)
        if isinstance(value, kind):
            return dataclasses.replace(objective, terms=(*others, value))
        fields = dict(value) if isinstance(value, Mapping) else {number: value}
        known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                raise ValueError(
                    f"{option} has no field {name!r}{_nearest(name, dict.fromkeys(known))}; fields: {', '.join(known)}"
                )
        if current is None and required - fields.keys():
            raise ValueError(f"{option} needs its field {', '.join(required - fields.keys())}")
        term = dataclasses.replace(current, **fields) if current else kind(**fields)  # type: ignore[type-var]
        return dataclasses.replace(objective, terms=(*others, term))

    return override


_OVERRIDES: dict[str, Override] = {
    "ratio": _part("ratio", RATIOS),
    "aggregate": _part("aggregate", AGGREGATES),
    "clip_low": _field("clip_low", "surrogate", "low"),
    "clip_high": _field("clip_high", "surrogate", "high"),
    "dual_clip": _field("dual_clip", "surrogate", "dual"),
    "length_normalizer": _field("length_normalizer", "aggregate", "length_normalizer"),
    "normalize_advantage": _field("normalize_advantage", "advantage", "normalize"),
    "advantage_epsilon": _field("advantage_epsilon", "advantage", "epsilon"),
    "kl_mask": _term("kl_mask", KLMask, "beta"),
    "ref_kl": _term("ref_kl", ReferenceKL, "beta"),
    "entropy_bonus": _term("entropy_bonus", EntropyBonus, "coefficient"),
}
