"""What changes during a run: coefficients that adapt from step to step, and options on a schedule of rollouts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from objective_cases import LENGTHS, VARIANTS, loss_and_gradients, ragged_batch

from tepo.objectives import Objective, at_rollout, get_objective, list_objectives
from tepo.objectives.adaptive import AdaptiveEntropy, PolicyKL
from tepo.objectives.schedule import Linear

# AEnt


def test_adaptive_entropy_has_the_published_settings() -> None:
    """The spec's for 1.5B."""
    assert get_objective("aent").terms == (
        AdaptiveEntropy(0.002, 0.33, low=0.15, high=0.24, rate=0.002, smallest=0.0006, largest=0.009, warmup=30),
    )


def test_adaptive_entropy_raises_the_clamped_entropy() -> None:
    """- lambda mean H~, with the gradient through H~ and nothing else; for tokens of zero advantage too."""
    padded = ragged_batch(1)
    with_bonus = loss_and_gradients(get_objective("aent", adaptive_entropy=0.5), padded)
    without = loss_and_gradients(get_objective("aent", adaptive_entropy=None), padded)
    mean = padded.tokens["top_entropy"][padded.mask].mean().item()
    assert (with_bonus[0] - without[0]).item() == pytest.approx(-0.5 * mean, rel=1e-12)
    expected = padded.mask.double() * (-0.5 / sum(LENGTHS))
    torch.testing.assert_close(with_bonus[1]["top_entropy"], expected, rtol=1e-12, atol=0)
    assert without[1]["top_entropy"].eq(0).all()
    assert with_bonus[1]["logp"].equal(without[1]["logp"])


def after(term: AdaptiveEntropy, entropy: float) -> float:
    """The coefficient after a step with that clamped entropy."""
    return term.adapted({"top_entropy": entropy}).coefficient


@pytest.mark.parametrize(
    ("entropy", "change"),
    [(0.05, 0.002 * 0.1), (0.0, 0.002 * 0.15), (0.15, 0), (0.2, 0), (0.24, 0), (0.34, -0.002 * 0.1)],
)
def test_adaptive_entropy_moves_towards_its_range(entropy: float, change: float) -> None:
    """More where H~ is below it, less where it is above, by rate times the distance; nothing inside."""
    assert after(AdaptiveEntropy(warmup=0), entropy) - 0.002 == pytest.approx(change, rel=1e-9, abs=1e-18)


def test_adaptive_entropy_stays_in_its_bounds() -> None:
    assert after(AdaptiveEntropy(warmup=0), 100.0) == 0.0006
    assert after(AdaptiveEntropy(warmup=0, low=50.0, high=60.0), 0.0) == 0.009
    term = AdaptiveEntropy(warmup=0)
    for _ in range(50):
        term = term.adapted({"top_entropy": 0.0})
        assert 0.0006 <= term.coefficient <= 0.009
    assert term.coefficient == 0.009


def test_adaptive_entropy_waits_for_its_warm_up() -> None:
    """The first 30 steps leave it; the 31st moves it."""
    objective = get_objective("aent")
    for step in range(1, 31):
        objective = objective.adapted({"top_entropy": 0.0})
        assert objective.state["adaptive_entropy"]["coefficient"] == 0.002
        assert objective.state["adaptive_entropy"]["updates"] == step
    objective = objective.adapted({"top_entropy": 0.0})
    assert objective.state["adaptive_entropy"]["coefficient"] == pytest.approx(0.0023)


def test_adaptive_entropy_adapts_by_the_metrics_of_its_own_step() -> None:
    """`objective.adapted(out.metrics)`; the coefficient in force is among the metrics."""
    objective = get_objective("aent", adaptive_entropy={"warmup": 0, "largest": 10.0})
    padded = ragged_batch(2)
    out = objective(padded.batch())
    mean = padded.tokens["top_entropy"][padded.mask].mean().item()
    assert out.metrics["top_entropy"] == pytest.approx(mean, rel=1e-12)
    assert mean > 0.24
    assert out.metrics["entropy_coefficient"] == 0.002
    then = objective.adapted(out.metrics)
    assert then(padded.batch()).metrics["entropy_coefficient"] == pytest.approx(0.002 - 0.002 * (mean - 0.24))
    assert objective(padded.batch()).metrics["entropy_coefficient"] == 0.002


@pytest.mark.parametrize(
    "fields",
    [
        {"dropped": 1.0}, {"dropped": -0.1}, {"low": 0.3}, {"smallest": 0.1}, {"coefficient": -1.0},
        {"rate": math.nan}, {"high": True}, {"largest": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_adaptive_entropy_out_of_range_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="adaptive_entropy"):
        get_objective("aent", adaptive_entropy=fields)


# The KL penalty to the sampling policy


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1), (0.01, 1), (0.0149, 1), (0.0151, 2), (5.0, 2)],
)
def test_policy_kl_doubles_and_halves(divergence: float, factor: float) -> None:
    """Above 1.5 x target and below target / 1.5, with a target of .01."""
    objective = get_objective("policy_kl").adapted({"policy_kl": divergence})
    assert objective.terms == (PolicyKL(1.0 * factor, 0.01),)


def test_policy_kl_stays_between_its_limits_and_comes_back() -> None:
    term = PolicyKL(1.0)
    for _ in range(60):
        term = term.adapted({"policy_kl": 1.0})
    assert term.beta == 1e6
    for _ in range(100):
        term = term.adapted({"policy_kl": 0.0})
    assert term.beta == 1e-6


def test_policy_kl_is_r_minus_1_minus_log_r_over_the_tokens() -> None:
    """Its value and gradient, (r - 1) / N: none where the policy has not moved; reported, and adapted by it."""
    padded = ragged_batch(3)
    objective = get_objective("policy_kl", policy_kl=4.0)
    out = objective(padded.batch())
    log_ratio = (padded.tokens["logp"] - padded.tokens["old_logp"]).detach()
    mean = (log_ratio.exp() - 1 - log_ratio)[padded.mask].mean().item()
    assert out.metrics["policy_kl"] == pytest.approx(mean, rel=1e-9)
    assert out.metrics["policy_kl_loss"] == pytest.approx(4 * mean, rel=1e-9)
    assert out.metrics["policy_kl_beta"] == 4.0
    without = loss_and_gradients(get_objective("policy_kl", policy_kl=None), padded)[1]["logp"]
    gradient = loss_and_gradients(objective, padded)[1]["logp"] - without
    expected = torch.where(padded.mask, 4 * log_ratio.expm1() / sum(LENGTHS), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    assert mean > 0.015
    assert objective.adapted(out.metrics).terms == (PolicyKL(8.0),)


@pytest.mark.parametrize("fields", [{"beta": -1.0}, {"target": -0.1}, {"target": math.nan}, True, "much"], ids=str)
def test_policy_kl_out_of_range_is_an_error(fields: Any) -> None:
    with pytest.raises(ValueError, match="policy_kl"):
        get_objective("policy_kl", policy_kl=fields)


# State


@pytest.mark.parametrize("objective", VARIANTS.values(), ids=VARIANTS)
def test_state_makes_the_round_trip(objective: Objective) -> None:
    """Through JSON, as in a checkpoint, into the objective as the recipe makes it."""
    adapted = objective
    for entropy, divergence in ((0.0, 1.0),) * 33 + ((9.0, 0.0),):
        adapted = adapted.adapted({"top_entropy": entropy, "policy_kl": divergence})
    assert objective.with_state(json.loads(json.dumps(adapted.state))) == adapted
    adapts = any(isinstance(term, AdaptiveEntropy | PolicyKL) for term in objective.terms)
    assert (adapted != objective) == adapts
    if not adapts:
        assert adapted is objective
    assert objective.with_state({}) == objective


def test_state_of_a_term_that_the_objective_lacks_is_left() -> None:
    assert get_objective("dapo").with_state({"policy_kl": {"beta": 2.0}}) == get_objective("dapo")


# Schedules


def test_schedule_begins_with_its_start_and_stays_at_its_end() -> None:
    """HoelderPO's: p from 2 to -2 over 500 rollouts; the first rollout is 1."""
    schedule = Linear(2.0, -2.0, 500)
    assert schedule.at(1) == 2
    assert [schedule.at(rollout) for rollout in (500, 501, 10**6)] == [-2, -2, -2]
    steps = [schedule.at(rollout + 1) - schedule.at(rollout) for rollout in range(1, 500)]
    assert steps == pytest.approx([-4 / 499] * 499, rel=1e-9)


@pytest.mark.parametrize(("over", "values"), [(1, [5, 5, 5]), (2, [1, 5, 5]), (3, [1, 3, 5]), (5, [1, 2, 3, 4, 5, 5])])
def test_schedule_over_few_rollouts(over: int, values: list[float]) -> None:
    assert [Linear(1, 5, over).at(rollout) for rollout in range(1, len(values) + 1)] == values


@pytest.mark.parametrize("value", [{"from": 2, "to": -2, "over": 5}, Linear(2, -2, 5)], ids=["mapping", "Linear"])
@pytest.mark.parametrize("name", ["hoelder", "hoelder_token"])
def test_option_on_a_schedule(name: str, value: Any) -> None:
    """Both forms; the objective as it is made is that of the first rollout, and each rollout has its own."""
    objective = get_objective(name, p=value)
    assert objective.schedules == (("p", Linear(2, -2, 5)),)
    padded = ragged_batch(4)
    for rollout, p in ((1, 2), (2, 1), (3, 0), (4, -1), (5, -2), (6, -2), (700, -2)):
        there = at_rollout(objective, rollout)
        assert dataclasses.replace(there, schedules=()) == get_objective(name, p=p)
        assert there.schedules == objective.schedules
        assert there(padded.batch()).loss.equal(get_objective(name, p=p)(padded.batch()).loss)
    assert dataclasses.replace(objective, schedules=()) == get_objective(name, p=2)
    assert at_rollout(at_rollout(objective, 5), 2) == at_rollout(objective, 2)


def test_several_options_on_schedules_beside_one_that_is_fixed() -> None:
    objective = get_objective(
        "grpo", clip_low={"from": 0.2, "to": 0.1, "over": 3}, ref_kl={"from": 0.04, "to": 0.0, "over": 2}, clip_high=0.3
    )
    assert dataclasses.replace(at_rollout(objective, 1), schedules=()) == get_objective("grpo", clip_high=0.3)
    last = dataclasses.replace(at_rollout(objective, 3), schedules=())
    assert last == get_objective("grpo", clip_low=0.1, clip_high=0.3, ref_kl=None)
    assert {option for option, _ in objective.schedules} == {"clip_low", "ref_kl"}


def test_schedule_keeps_what_has_adapted() -> None:
    objective = get_objective("aent", clip_low={"from": 0.2, "to": 0.1, "over": 3})
    for _ in range(31):
        objective = objective.adapted({"top_entropy": 0.0})
    assert at_rollout(objective, 3).state["adaptive_entropy"]["coefficient"] == pytest.approx(0.0023)
    assert at_rollout(objective, 3).state == objective.state


@pytest.mark.parametrize("name", list_objectives())
def test_objective_without_a_schedule_is_the_same_in_every_rollout(name: str) -> None:
    assert at_rollout(get_objective(name), 17) is get_objective(name)


@pytest.mark.parametrize(
    ("start", "end", "over", "message"),
    [
        *((2, -2, over, "a whole number above 0") for over in (0, -1, 2.5, True, None, "3")),
        *((start, -2, 5, "two numbers are wanted") for start in (None, "2", True, math.nan, math.inf)),
        *((2, end, 5, "two numbers are wanted") for end in (None, "2", False, math.nan, -math.inf)),
    ],
)
def test_schedule_out_of_range_is_an_error(start: Any, end: Any, over: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_objective("hoelder", p={"from": start, "to": end, "over": over})
    with pytest.raises(ValueError, match=message):
        Linear(start, end, over)


@pytest.mark.parametrize(
    ("name", "option"), [("dapo", "p"), ("gpg", "clip_low"), ("dapo", "ratio"), ("dapo", "advantage"), ("dapo", "p_")]
)
def test_schedule_of_an_option_without_use_is_an_error(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        get_objective(name, **{option: {"from": 0.1, "to": 0.2, "over": 3}})


def test_mapping_with_other_keys_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="p is "):
        get_objective("hoelder", p={"from": 2, "to": -2})
    with pytest.raises(ValueError, match="kl_mask has no field 'from'"):
        get_objective("tepo", kl_mask={"from": 0.1, "over": 3})


@pytest.mark.parametrize(
    ("name", "option", "start", "end"),
    [
        ("dapo", "clip_low", 0.2, -0.5),
        ("sapo", "tau", 1, 0),
        ("dapo", "dual_clip", 3.0, 0.5),
        ("kl_cov", "share", 1, 2),
    ],
)
def test_schedule_that_ends_out_of_range_is_an_error_before_the_run(
    name: str, option: str, start: float, end: float
) -> None:
    """And not in the middle of it."""
    with pytest.raises(ValueError, match=option):
        get_objective(name, **{option: {"from": start, "to": end, "over": 10}})


@pytest.mark.parametrize("term", ["ref_kl", "entropy_bonus", "kl_mask"])
def test_a_term_cannot_be_scheduled_from_nothing(term: str) -> None:
    """It would be left out with what it needs: no reference would be loaded for the rollouts that want one."""
    with pytest.raises(ValueError, match=f"{term} runs from 0"):
        get_objective("dapo", **{term: Linear(0.0, 0.04, 10)})


def test_a_term_for_selected_tokens_needs_a_selection() -> None:
    with pytest.raises(ValueError, match="selects none"):
        get_objective("dapo", cov_kl=0.5)


def test_the_first_rollout_is_1() -> None:
    with pytest.raises(ValueError, match="the first is 1"):
        Linear(2, -2, 500).at(0)
