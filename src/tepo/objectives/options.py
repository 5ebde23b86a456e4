"""Objectives by name, with options: what `objective:` in a recipe can say."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tepo.objectives.adaptive import AdaptiveEntropy, PolicyKL
from tepo.objectives.advantages import (
    Advantage,
    BatchAdvantage,
    CenteredAdvantage,
    InformativeAdvantage,
    LeaveOneOutAdvantage,
    StandardizedAdvantage,
)
from tepo.objectives.aggregates import AGGREGATES
from tepo.objectives.objective import Objective
from tepo.objectives.own import is_own, load_own
from tepo.objectives.ratios import RATIOS, NoRatio
from tepo.objectives.schedule import Linear
from tepo.objectives.selections import RandomCovariance
from tepo.objectives.table import TABLE
from tepo.objectives.terms import CovarianceKL, EntropyBonus, KLMask, ReferenceKL, Term
from tepo.objectives.values import ValueLoss

ADVANTAGES: dict[str, Callable[[], Advantage]] = {
    kind.name: kind
    for kind in (StandardizedAdvantage, CenteredAdvantage, LeaveOneOutAdvantage, InformativeAdvantage, BatchAdvantage)
}
_BY_NAME = {row.name: row for row in TABLE}


def list_objectives() -> list[str]:
    """The names that `get_objective` takes, in the order of the table."""
    return list(_BY_NAME)


def get_objective(name: str, **overrides: Any) -> Objective:
    """The objective of that name, with some of its settings replaced.

    name: a name from `list_objectives()`, where hyphens and case do not matter; or `module:attribute`, an Objective of
        your own or a function that returns one from those of the options that it has parameters for (`load_own`).
    overrides: parts by name: `advantage` (standardized, centered, leave_one_out, informative, batch), `ratio` (token,
        sequence, sequence_token, hoelder), `aggregate` (token_mean, sequence_mean, sequence_sum, constant_length).
        Terms: `kl_mask`, `ref_kl`, `entropy_bonus`, `cov_kl`, `adaptive_entropy`, `policy_kl`, `value_loss` (None, the
        coefficient, or a mapping with the fields of KLMask, ReferenceKL, ...). Numbers that parts have: `clip_low`,
        `clip_high`, `dual_clip`, `p`, `tau`, `tau_negative`, `beta`, `prefix_clip_low`, `prefix_clip_high` of
        surrogates; `length_normalizer` (tokens), `prefix_share` of aggregates; `share`, `cov_low`, `cov_high` of
        selections; `alpha`, `kappa` of the shaping; `advantage_epsilon`, `a1`, `a2`, `gamma`, `lam`, `reward_kl`,
        `cuts`, `gap` of advantages.
    A term whose coefficient is 0 is left out. A number may be a schedule over rollouts, as a `Linear` or a mapping:
        {"from": 2, "to": -2, "over": 500}.
    Raises ValueError for an unknown name or override, a value that is not allowed, and an override that the objective
    has no use for.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of an objective is {name!r}; known: {', '.join(_BY_NAME)}")
    if is_own(name):
        key, (objective, overrides) = name, load_own(name, overrides, _OVERRIDES)
    else:
        key = name.lower().replace("-", "_")
        if key not in _BY_NAME:
            raise ValueError(
                f"unknown objective {name!r}{_nearest(key, _BY_NAME)}; known: {', '.join(_BY_NAME)}; or your own "
                "module:attribute"
            )
        objective = _BY_NAME[key]
    # Parts are exchanged before their fields are set, so that the order in which overrides are given is of no account.
    for override in _ordered(objective, overrides):
        if override not in _OVERRIDES:
            raise ValueError(f"objective {key} has no option {override!r}{_nearest(override, _OVERRIDES)}; options: "
                             f"{', '.join(_OVERRIDES)}")  # fmt: skip
        value = overrides[override]
        if isinstance(value, Mapping) and value.keys() == {"from", "to", "over"}:
            value = Linear(value["from"], value["to"], value["over"])
        if isinstance(value, Linear):
            if override in _TERMS and value.at(1) == 0:
                raise ValueError(
                    f"{override} runs from 0 to {value.end}; a term with the coefficient 0 is left out, and what it "
                    "needs with it: start at a small number"
                )
            _OVERRIDES[override](objective, value.end)  # refused now, and not in the middle of a run
            schedules = (*objective.schedules, (override, value))
            objective = dataclasses.replace(_OVERRIDES[override](objective, value.at(1)), schedules=schedules)
        else:
            objective = _OVERRIDES[override](objective, value)
    if "old_values" in objective.advantage.needs and "values" not in objective.needs:
        raise ValueError(f"objective {key} needs value_loss: nothing else trains the values that its advantage reads")
    if "returns" in objective.needs and "old_values" not in objective.advantage.needs:
        raise ValueError(
            f"objective {key} does not use value_loss: its advantage, {objective.advantage.name}, gives no returns"
        )
    if not overrides:
        return objective
    # Equal whatever the order in which terms were added.
    return dataclasses.replace(objective, terms=tuple(sorted(objective.terms, key=lambda term: term.name)))


def _ordered(objective: Objective, overrides: Mapping[str, Any]) -> list[str]:
    """Parts, then fields; of two bounds, the one that widens the range first: it must not be empty on the way."""
    low = overrides.get("cov_low")
    rises = (
        isinstance(low, int | float)
        and isinstance(objective.selection, RandomCovariance)
        and low >= objective.selection.cov_high
    )
    return sorted(overrides, key=lambda o: (o not in _PARTS, o == "cov_low" and rises, o != "cov_low"))


def at_rollout(objective: Objective, rollout: int) -> Objective:
    """The objective with its scheduled options as they are in a rollout; the first is 1."""
    for option, schedule in objective.schedules:
        objective = _OVERRIDES[option](objective, schedule.at(rollout))
    return objective


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


Override = Callable[[Objective, Any], Objective]


def _field(option: str, field: str, *parts: str) -> Override:
    """An override that sets one field of the first of some parts that has such a field."""

    def override(objective: Objective, value: Any) -> Objective:
        having = [part for part in parts if field in getattr(getattr(objective, part), "__dataclass_fields__", {})]
        if not having:
            kinds = ((part, getattr(objective, part)) for part in parts)
            used = " and ".join(f"its {part} is {type(kind).__name__ if kind else kind}" for part, kind in kinds)
            raise ValueError(f"objective {objective.name} does not use {option}: {used}")
        part, current = having[0], getattr(objective, having[0])
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and not (value is None and field == "dual"):
            raise ValueError(f"{option} is {value!r}; a number is allowed")
        return dataclasses.replace(objective, **{part: dataclasses.replace(current, **{field: value})})

    return override


def _part(option: str, kinds: Mapping[str, Callable[[], Any]]) -> Override:
    """An override that exchanges one part by name."""

    def override(objective: Objective, value: Any) -> Objective:
        if option == "ratio" and isinstance(objective.ratio, NoRatio):
            used = f"its surrogate is {type(objective.surrogate).__name__}"
            raise ValueError(f"objective {objective.name} does not use ratio: {used}")
        if option == "advantage" and not objective.advantage.exchangeable:
            used = f"its other parts read what its advantage, {objective.advantage.name}, gives them"
            raise ValueError(f"objective {objective.name} does not use advantage: {used}")
        if option == "aggregate" and objective.surrogate.pairs:
            used = f"its surrogate {type(objective.surrogate).__name__} is made of pairs"
            raise ValueError(f"objective {objective.name} does not use aggregate: {used}")
        if not isinstance(value, str) or value not in kinds:
            raise ValueError(f"{option} is {value!r}; allowed: {', '.join(kinds)}")
        return dataclasses.replace(objective, **{option: kinds[value]()})

    return override


def _term(kind: type[Term]) -> Override:
    """An override that adds, changes (None: drops) the term of one kind; a bare number is its coefficient."""
    option = kind.name

    def override(objective: Objective, value: Any) -> Objective:
        current = next((term for term in objective.terms if isinstance(term, kind)), None)
        others = tuple(term for term in objective.terms if not isinstance(term, kind))
        if value is None:
            return dataclasses.replace(objective, terms=others)
        if isinstance(value, kind):
            value = dataclasses.asdict(value)
        fields = dict(value) if isinstance(value, Mapping) else {kind.strength: value}
        known = [field.name for field in dataclasses.fields(kind)]
        required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        for name in fields:
            if name not in known:
                raise ValueError(
                    f"{option} has no field {name!r}{_nearest(name, dict.fromkeys(known))}; fields: {', '.join(known)}"
                )
        if current is None and required - fields.keys():
            raise ValueError(f"{option} needs its field {', '.join(required - fields.keys())}")
        term = dataclasses.replace(current, **fields) if current else kind(**fields)
        return dataclasses.replace(objective, terms=(*others, term) if getattr(term, kind.strength) else others)

    return override


_PARTS: dict[str, Override] = {
    "advantage": _part("advantage", ADVANTAGES),
    "ratio": _part("ratio", RATIOS),
    "aggregate": _part("aggregate", AGGREGATES),
}
_TERMS: dict[str, Override] = {
    kind.name: _term(kind)
    for kind in (KLMask, ReferenceKL, EntropyBonus, CovarianceKL, AdaptiveEntropy, PolicyKL, ValueLoss)
}
_OVERRIDES: dict[str, Override] = (
    _PARTS
    | _TERMS
    | {
        "clip_low": _field("clip_low", "low", "surrogate"),
        "clip_high": _field("clip_high", "high", "surrogate"),
        "dual_clip": _field("dual_clip", "dual", "surrogate"),
        "p": _field("p", "p", "ratio", "surrogate"),
        "tau": _field("tau", "tau", "surrogate"),
        "tau_negative": _field("tau_negative", "tau_negative", "surrogate"),
        "share": _field("share", "share", "selection"),
        "cov_low": _field("cov_low", "cov_low", "selection"),
        "cov_high": _field("cov_high", "cov_high", "selection"),
        "alpha": _field("alpha", "alpha", "shaping"),
        "kappa": _field("kappa", "kappa", "shaping"),
        "a1": _field("a1", "a1", "advantage"),
        "a2": _field("a2", "a2", "advantage"),
        "gamma": _field("gamma", "gamma", "advantage"),
        "lam": _field("lam", "lam", "advantage"),
        "reward_kl": _field("reward_kl", "kl", "advantage"),
        "cuts": _field("cuts", "cuts", "advantage"),
        "gap": _field("gap", "gap", "advantage"),
        "prefix_clip_low": _field("prefix_clip_low", "prefix_low", "surrogate"),
        "prefix_clip_high": _field("prefix_clip_high", "prefix_high", "surrogate"),
        "prefix_share": _field("prefix_share", "share", "aggregate"),
        "beta": _field("beta", "beta", "surrogate"),
        "length_normalizer": _field("length_normalizer", "length_normalizer", "aggregate"),
        "advantage_epsilon": _field("advantage_epsilon", "epsilon", "advantage"),
    }
)
