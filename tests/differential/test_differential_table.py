"""The tables of the differential tests are complete and up to date; needs neither TRL nor verl."""

import pytest
import torch
from differential_cases import (
    NO_COUNTERPART,
    OWN_ADVANTAGES,
    PENDING,
    TRL_ADVANTAGES,
    TRL_CASES,
    VERL_ADVANTAGES,
    VERL_CASES,
    Case,
    active,
)
from differential_comparison import steps

from tepo.objectives import get_objective, list_objectives
from tepo.objectives.aggregates import AGGREGATES
from tepo.objectives.ratios import RATIOS
from tepo.objectives.terms import KL_ESTIMATORS, ReferenceKL

CASES = {f"trl-{name}": case for name, case in TRL_CASES.items()}
CASES |= {f"verl-{name}": case for name, case in VERL_CASES.items()}
ACTIVE = active(CASES)
CLIPPED = {
    name: case for name, case in ACTIVE.items()
    if hasattr(get_objective(case.ours).surrogate, "low") and case.ours != "cispo"
}  # fmt: skip
SELECTING = {name: case for name, case in ACTIVE.items() if get_objective(case.ours).selection is not None}


def test_no_pending_objective_has_arrived() -> None:
    arrived = PENDING & set(list_objectives())
    assert not arrived, f"take {sorted(arrived)} out of PENDING in differential_cases.py, so that their rows run"


def test_every_pending_name_has_a_row() -> None:
    assert {case.ours for case in CASES.values()} >= PENDING


def test_every_objective_has_a_row_or_a_reason() -> None:
    compared = {case.ours for case in ACTIVE.values()}
    without = set(list_objectives()) - compared - NO_COUNTERPART
    assert not without, f"add a row for {sorted(without)}, or name them in NO_COUNTERPART"
    assert not compared & NO_COUNTERPART
    assert set(list_objectives()) >= NO_COUNTERPART


def test_every_kind_of_advantages_has_a_row() -> None:
    kinds = {get_objective(name).advantage.name for name in set(list_objectives()) - NO_COUNTERPART} - OWN_ADVANTAGES
    rows = [*active(TRL_ADVANTAGES).values(), *active(VERL_ADVANTAGES).values()]
    assert {get_objective(case.ours).advantage.name for case in rows} == kinds


def test_every_ratio_aggregate_and_estimator_has_a_row() -> None:
    objectives = [get_objective(case.ours, **case.overrides) for case in ACTIVE.values()]
    terms = [term for objective in objectives for term in objective.terms if isinstance(term, ReferenceKL)]
    assert {objective.ratio.name for objective in objectives} >= RATIOS.keys()
    assert {objective.aggregate.name for objective in objectives} >= AGGREGATES.keys()
    assert {term.estimator for term in terms} == KL_ESTIMATORS.keys()


@pytest.mark.parametrize("case", CLIPPED.values(), ids=CLIPPED)
def test_a_row_sees_tokens_inside_and_outside_of_the_clip(case: Case) -> None:
    objective = get_objective(case.ours, **case.overrides)
    found = set()
    for step in steps(case):
        tokens = objective(step.batch()).tokens
        found |= set(zip((tokens["advantage"] > 0).tolist(), tokens["clipped"].tolist(), strict=True))
    assert found == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("case", SELECTING.values(), ids=SELECTING)
def test_a_row_sees_selected_tokens_and_others(case: Case) -> None:
    objective = get_objective(case.ours, **case.overrides)
    prepared = [objective.prepare(step.batch()).selected for step in steps(case)]
    selected = torch.cat([mask for mask in prepared if mask is not None])
    assert 0 < int(selected.sum()) < len(selected)
