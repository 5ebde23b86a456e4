"""The options of objectives: what each changes, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import definition_settings
import pytest
import torch
from objective_cases import prepared, ragged_batch

from tepo.objectives import (
    EntropyBonus,
    KLMask,
    ReferenceKL,
    get_objective,
    list_objectives,
)


def loss_of(name: str, **overrides: Any) -> float:
    """The loss on one fixed batch that every option has something to do in."""
    objective = get_objective(name, **overrides)
    return objective(prepared(objective, ragged_batch(20).batch())).loss.item()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dapo", {"clip_low": 0.05}),
        ("dapo", {"clip_high": 0.05}),
        ("dapo", {"dual_clip": 1.05}),
        ("dapo", {"ratio": "sequence"}),
        ("dapo", {"aggregate": "sequence_mean"}),
        ("dr_grpo", {"length_normalizer": 10}),
        ("tepo", {"kl_mask": None}),
        ("tepo", {"kl_mask": 0.5}),
        ("tepo", {"kl_mask": {"target": "reference"}}),
        *(("tepo", {"kl_mask": {"estimator": estimator}}) for estimator in ("k1", "k2", "k3", "exact")),
        ("tepo", {"kl_mask": {"entropy_test": "first_order"}}),
        ("tepo", {"kl_mask": {"normalizer": "masked"}}),
        ("dapo", {"kl_mask": 0.5}),
        ("grpo", {"ref_kl": None}),
        ("grpo", {"ref_kl": 0.5}),
        *(("grpo", {"ref_kl": {"estimator": estimator}}) for estimator in ("abs", "k1", "k2", "exact")),
        ("dapo", {"ref_kl": 0.5}),
        ("dapo", {"entropy_bonus": 0.1}),
        *((name, {"clip_low": 0.01}) for name in ("luspo", "gmpo", "hoelder", "hoelder_token", "cispo")),
        *((name, {"clip_high": 0.01}) for name in ("luspo", "gmpo", "hoelder", "hoelder_token", "cispo")),
        ("reinforce_pp", {"dual_clip": 1.05}),
        *((name, {"p": p}) for name in ("hoelder", "hoelder_token") for p in (-1, 1e-3, 2.0)),
        *(("dapo", {"ratio": "hoelder", "p": p}) for p in (0, 1)),
        ("sapo", {"tau": 2.0}),
        ("sapo", {"tau_negative": 2.0}),
        *((name, {"aggregate": "sequence_sum"}) for name in ("dapo", "gspo", "gpg")),
        ("rloo", {"aggregate": "sequence_mean"}),
        ("clip_cov", {"cov_low": -5.0, "share": 0.5}),
        ("clip_cov", {"cov_low": -5.0}),
        ("clip_cov", {"cov_low": -5.0, "cov_high": 1.5, "share": 1.0}),
        *((name, {"share": 0.5}) for name in ("kl_cov", "forking_tokens")),
        ("entropy_advantage", {"alpha": 0.1}),
        ("entropy_advantage", {"kappa": 8.0}),
        ("aent", {"adaptive_entropy": 0.5}),
        ("policy_kl", {"policy_kl": 0.5}),
        ("kl_cov", {"cov_kl": 5.0}),
        ("dapo", {"adaptive_entropy": {"coefficient": 0.5}}),
        ("dapo", {"policy_kl": {}}),
        *(("skpo", {option: 1e-5}) for option in ("clip_high", "prefix_clip_low", "prefix_clip_high", "prefix_share")),
        *(("ppo", {"value_loss": value}) for value in (0.5, {"clip": None}, {"clip": 0.01})),
    ],
    ids=str,
)
def test_each_option_changes_the_loss(name: str, overrides: dict[str, Any]) -> None:
    assert loss_of(name, **overrides) != pytest.approx(loss_of(name), rel=1e-9)


@pytest.mark.parametrize(
    "option",
    [
        *({"advantage": kind} for kind in ("centered", "leave_one_out", "informative", "batch")),
        {"advantage_epsilon": 0.5},
    ],
    ids=str,
)
def test_each_advantage_option_changes_the_advantages(option: dict[str, Any]) -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.75, 0.5, 0.5]), torch.tensor([0, 0, 0, 1, 1])
    plain, changed = get_objective("grpo"), get_objective("grpo", **option)
    assert not torch.allclose(plain.advantages(rewards, groups), changed.advantages(rewards, groups))


def test_the_row_itself_never_changes() -> None:
    before = get_objective("tepo")
    get_objective("tepo", clip_low=0.5, kl_mask=None, aggregate="sequence_mean")
    assert get_objective("tepo") is before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("value", [0.3, {"beta": 0.3}, KLMask(beta=0.3)], ids=str)
def test_kl_mask_takes_a_number_a_mapping_or_the_term(value: Any) -> None:
    assert get_objective("tepo", kl_mask=value).terms == (KLMask(beta=0.3),)
    assert get_objective("dapo", kl_mask=value).terms == (KLMask(beta=0.3),)


def test_kl_mask_mapping_keeps_the_fields_that_it_does_not_name() -> None:
    assert get_objective("tepo", kl_mask={"estimator": "k2"}).terms == (KLMask(beta=0.01, estimator="k2"),)
    assert get_objective("tepo", kl_mask={}).terms == get_objective("tepo").terms
    assert get_objective("dapo", kl_mask={}).terms == (KLMask(),)


def test_none_drops_a_term() -> None:
    assert get_objective("tepo", kl_mask=None).terms == ()
    assert get_objective("grpo", ref_kl=None).terms == ()
    assert get_objective("dapo", entropy_bonus=None, ref_kl=None, kl_mask=None).terms == ()
    assert get_objective("dapo", dual_clip=None) == get_objective("dapo")


def test_ref_kl_and_entropy_bonus_forms() -> None:
    assert get_objective("dapo", ref_kl={"beta": 0.1, "estimator": "k1"}).terms == (ReferenceKL(0.1, "k1"),)
    assert get_objective("grpo", ref_kl={"estimator": "k1"}).terms == (ReferenceKL(0.04, "k1"),)
    assert get_objective("dapo", entropy_bonus=0.1).terms == (EntropyBonus(0.1),)
    assert get_objective("dapo", entropy_bonus={"coefficient": 0.1}).terms == (EntropyBonus(0.1),)
    with pytest.raises(ValueError, match="entropy_bonus needs its field coefficient"):
        get_objective("dapo", entropy_bonus={})


def test_order_of_overrides_is_of_no_account() -> None:
    one = get_objective("grpo", length_normalizer=9, aggregate="constant_length", clip_low=0.1, ratio="sequence")
    other = get_objective("grpo", ratio="sequence", clip_low=0.1, aggregate="constant_length", length_normalizer=9)
    assert one == other


@pytest.mark.parametrize("name", [name for name in list_objectives() if name != "dr_grpo"])
def test_length_normalizer_without_constant_length_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"objective {name} does not use length_normalizer"):
        get_objective(name, length_normalizer=100)


VALUES = {
    "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0, "p": 0.5, "tau": 2.0, "tau_negative": 2.0, "ratio": "token",
    "length_normalizer": 100, "share": 0.5, "cov_low": 0.5, "cov_high": 3.0, "alpha": 0.2, "kappa": 3.0, "a1": 2.0,
    "a2": 0.5, "gamma": 0.9, "lam": 1.0, "reward_kl": 0.1, "cuts": 2, "gap": 3, "prefix_clip_low": 0.1,
    "prefix_clip_high": 0.1, "prefix_share": 0.2, "beta": 0.2, "advantage": "centered", "aggregate": "token_mean",
    "value_loss": 0.5,
}  # fmt: skip
"""A value that is allowed wherever the option is used, for each option that not every objective has."""

PARTS = {
    "ratio": "surrogate", "length_normalizer": "aggregate", "share": "selection", "cov_low": "selection",
    "cov_high": "selection", "alpha": "shaping", "kappa": "shaping", "a1": "advantage", "a2": "advantage",
    "gamma": "advantage", "lam": "advantage", "reward_kl": "advantage", "cuts": "advantage", "gap": "advantage",
    "prefix_share": "aggregate",
}  # fmt: skip
"""The part of an objective that makes an option useful, where that is not the surrogate alone."""


REASONS = {
    "advantage": "its other parts read what its advantage, ",
    "aggregate": "is made of pairs",
    "value_loss": "gives no returns",
}
"""Why an option is of no use, where that is not for want of a field."""


@pytest.mark.parametrize("name", definition_settings.SETTINGS)
@pytest.mark.parametrize("option", VALUES)
def test_option_without_use_is_an_error_that_names_the_part(name: str, option: str) -> None:
    """And one with a use is taken: the list of definition.py, exhausted."""
    assert VALUES.keys() == definition_settings.OPTIONS_OF_SOME
    override = {option: VALUES[option]}
    if not definition_settings.unused(name, override):
        get_objective(name, **override)
        return
    part = PARTS.get(option, "surrogate")
    present = getattr(get_objective(name), part)
    kind = type(present).__name__ if present else None
    reason = REASONS.get(option, f"its {part} is {kind}")
    with pytest.raises(ValueError, match=f"objective {name} does not use {option}: .*{reason}"):
        get_objective(name, **override)


def test_p_goes_with_the_hoelder_ratio_wherever_it_stands() -> None:
    """To the ratio where that is a power mean, and no longer once it is exchanged."""
    assert get_objective("dapo", p=2.0, ratio="hoelder") == get_objective("dapo", ratio="hoelder", p=2.0)
    with pytest.raises(ValueError, match="objective hoelder does not use p: its ratio is SequenceRatio and its surrog"):
        get_objective("hoelder", p=2.0, ratio="sequence")


@pytest.mark.parametrize("name", ["dapo", "gpg"])
def test_no_ratio_cannot_be_chosen(name: str) -> None:
    """A clip of a ratio that is always 1 has no gradient; and a score function has no other."""
    with pytest.raises(ValueError, match="ratio"):
        get_objective(name, ratio="none")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, "p", value) for name in ("hoelder", "hoelder_token") for value in (math.inf, -math.inf, math.nan)),
        *((name, "p", value) for name in ("hoelder", "hoelder_token") for value in (None, "1", True)),
        *(("sapo", tau, value) for tau in ("tau", "tau_negative") for value in (0, 0.0, -1, math.nan, math.inf)),
        *(("sapo", tau, value) for tau in ("tau", "tau_negative") for value in (None, "1", True)),
        *((name, "clip_low", value) for name in ("cispo", "hoelder_token", "hoelder") for value in (-0.1, 1.1)),
        *((name, "clip_high", -0.1) for name in ("cispo", "hoelder_token", "hoelder", "gmpo")),
        *((name, "clip_low", math.nan) for name in ("cispo", "hoelder_token", "gmpo", "luspo")),
        *((name, "clip_high", math.nan) for name in ("cispo", "hoelder_token", "gmpo", "luspo")),
        *((name, "clip_low", None) for name in ("cispo", "hoelder_token", "gmpo")),
        ("gmpo", "clip_low", -0.1),
    ],
)
def test_value_out_of_range_is_an_error_where_the_option_is_used(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {re.escape(repr(value))}"):
        get_objective(name, **{option: value})


def test_bounds_in_log_space_may_be_above_1() -> None:
    """GMPO's clip is of log-ratios, where 1 is no limit."""
    assert get_objective("gmpo", clip_low=1.5, clip_high=math.inf) != get_objective("gmpo")


def test_length_normalizer_is_unused_once_the_aggregate_is_exchanged() -> None:
    with pytest.raises(ValueError, match="does not use length_normalizer"):
        get_objective("dr_grpo", aggregate="token_mean", length_normalizer=100)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("clip_low", -0.1), ("clip_low", 1.1), ("clip_low", math.nan), ("clip_low", None), ("clip_low", "0.2"),
        ("clip_high", -0.1), ("clip_high", math.nan), ("clip_high", None),
        ("dual_clip", 1.0), ("dual_clip", 0.5), ("dual_clip", -3), ("dual_clip", math.nan),
        ("ratio", "sentence"), ("ratio", None), ("ratio", ["token"]), ("aggregate", "mean"), ("aggregate", None),
        ("kl_mask", -0.1), ("kl_mask", math.nan), ("kl_mask", math.inf),
        ("kl_mask", "0.1"), ("kl_mask", {"beta": None}),
        ("kl_mask", {"target": "sampling"}), ("kl_mask", {"estimator": "k4"}),
        ("kl_mask", {"entropy_test": "guess"}), ("kl_mask", {"normalizer": "groups"}),
        ("ref_kl", -0.1), ("ref_kl", {"estimator": "k4"}), ("entropy_bonus", -0.1), ("entropy_bonus", "much"),
        ("clip_low", True), ("clip_high", False), ("dual_clip", True), ("kl_mask", True), ("ref_kl", False),
        ("entropy_bonus", True), ("advantage_epsilon", True), ("advantage", "ranked"), ("advantage", None),
    ],
)  # fmt: skip
def test_value_that_is_not_allowed_is_an_error_that_names_option_and_value(option: str, value: Any) -> None:
    """Out of range, of another kind, and truth values where numbers are wanted (and the reverse)."""
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=f"(?s){option}.*{re.escape(repr(shown))}"):
        get_objective("grpo", **{option: value})


@pytest.mark.parametrize("value", [0, -5, math.nan, math.inf, True, None])
def test_length_normalizer_out_of_range_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="length_normalizer"):
        get_objective("dr_grpo", length_normalizer=value)


def test_exact_kl_to_two_targets_is_an_error() -> None:
    with pytest.raises(ValueError, match="two different targets"):
        get_objective("tepo", kl_mask={"estimator": "exact"}, ref_kl={"estimator": "exact"})


def test_two_terms_of_one_kind_are_an_error() -> None:
    """They share a name in the metrics, and one of them would be lost."""
    with pytest.raises(ValueError, match="two terms of one kind"):
        dataclasses.replace(get_objective("tepo"), terms=(KLMask(), KLMask(estimator="k3")))
