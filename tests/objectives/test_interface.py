"""Names of `tepo.objectives`, what objectives ask for and give; options: test_options.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from objective_cases import LENGTHS, PER_TOKEN, TOKENWISE, prepared, ragged_batch

from tepo.objectives import (
    Objective,
    TokenBatch,
    Totals,
    get_objective,
    list_objectives,
)

# Names


def test_fixed_names_of_the_table() -> None:
    names = list_objectives()
    assert {"tepo", "grpo", "dr_grpo", "dapo", "gspo"} <= set(names)
    assert len(set(names)) == len(names)
    for name in names:
        row = get_objective(name)
        assert row.name == name
        assert row.title
        assert row.paper


@pytest.mark.parametrize("spelling", ["dr_grpo", "Dr-GRPO", "DR_GRPO"])
def test_hyphens_and_case_do_not_matter(spelling: str) -> None:
    assert get_objective(spelling) is get_objective("dr_grpo")


def test_unknown_objective_is_an_error_with_the_nearest_and_all_names() -> None:
    with pytest.raises(ValueError, match=r"unknown objective 'grpoo' \(did you mean 'grpo'\?\).*tepo.*gspo"):
        get_objective("grpoo")


def test_unknown_option_is_an_error_with_the_nearest_and_all_options() -> None:
    with pytest.raises(ValueError, match=r"no option 'clip_hihg' \(did you mean 'clip_high'\?\).*kl_mask"):
        get_objective("tepo", clip_hihg=0.2)


def test_unknown_field_of_a_term_is_an_error_with_the_nearest_and_all_fields() -> None:
    with pytest.raises(ValueError, match=r"kl_mask has no field 'estimater' \(did you mean 'estimator'\?\).*beta"):
        get_objective("tepo", kl_mask={"estimater": "k3"})


# What an objective asks for


@pytest.mark.parametrize(
    ("name", "overrides", "needs", "reference", "exact"),
    [
        ("tepo", {}, {"entropy", "old_entropy"}, False, None),
        ("tepo", {"kl_mask": {"target": "reference"}}, {"entropy", "old_entropy", "ref_logp"}, True, None),
        ("tepo", {"kl_mask": {"estimator": "exact"}}, {"entropy", "old_entropy", "exact_kl"}, False, "old"),
        ("tepo", {"kl_mask": {"entropy_test": "first_order"}}, {"entropy_direction"}, False, None),
        ("grpo", {}, {"ref_logp"}, True, None),
        ("grpo", {"ref_kl": {"estimator": "exact"}}, {"exact_kl"}, True, "reference"),
        ("dapo", {}, set(), False, None),
        ("dapo", {"entropy_bonus": 0.1}, {"entropy", "entropy_gradient"}, False, None),
        ("forking_tokens", {}, {"entropy"}, False, None),
        ("entropy_advantage", {}, {"entropy"}, False, None),
        ("aent", {}, {"top_entropy"}, False, None),
        ("em_ft", {}, {"entropy", "entropy_gradient"}, False, None),
        ("em_rl_token", {}, {"ref_logp"}, True, None),
        ("policy_kl", {}, set(), False, None),
        ("ppo", {}, {"values", "old_values", "returns"}, False, None),
        ("ppo", {"value_loss": {"clip": None}}, {"values", "returns"}, False, None),
        ("ppo", {"reward_kl": 0.1}, {"values", "old_values", "returns"}, True, None),
        ("prpo", {}, {"ref_logp"}, True, None),
        ("skpo", {}, {"shared"}, False, None),
        ("dpo", {}, {"ref_logp"}, True, None),
        ("orpo", {}, set(), False, None),
    ],
)
def test_needs(name: str, overrides: dict[str, Any], needs: set[str], reference: bool, exact: str | None) -> None:
    objective = get_objective(name, **overrides)
    assert objective.needs == needs
    assert objective.needs_reference is reference
    assert objective.exact_kl_target == exact


def needing() -> list[tuple[str, Objective]]:
    """Each optional field with an objective that reads it."""
    return [
        ("entropy", get_objective("dapo", entropy_bonus=0.1)),
        ("entropy", get_objective("tepo")),
        ("old_entropy", get_objective("tepo")),
        ("ref_logp", get_objective("grpo")),
        ("ref_logp", get_objective("tepo", kl_mask={"target": "reference"})),
        ("exact_kl", get_objective("tepo", kl_mask={"estimator": "exact"})),
        ("entropy_direction", get_objective("tepo", kl_mask={"entropy_test": "first_order"})),
        ("top_entropy", get_objective("aent")),
        ("entropy", get_objective("em_ft")),
        ("entropy", get_objective("entropy_advantage")),
        ("values", get_objective("ppo")),
        ("old_values", get_objective("ppo")),
        ("shared", get_objective("skpo")),
    ]


@pytest.mark.parametrize(("field", "objective"), needing(), ids=lambda value: getattr(value, "name", value))
def test_field_that_is_missing_is_named(field: str, objective: Objective) -> None:
    absent: dict[str, Any] = {field: None}
    batch = dataclasses.replace(ragged_batch(21).batch(), **absent)
    message = f"objective {objective.name} reads {field}, which the batch does not have"
    for totals in (None, Totals(10, 2, 1, {"kl_mask_tokens": 3.0})):
        with pytest.raises(ValueError, match=message):
            objective(batch, totals)


@pytest.mark.parametrize("name", TOKENWISE)
def test_only_what_is_needed_is_read(name: str) -> None:
    """An optional field that `needs` does not name can be left out."""
    objective = get_objective(name)
    batch = prepared(objective, ragged_batch(22).batch())
    absent: dict[str, Any] = dict.fromkeys(set(PER_TOKEN) - {"logp", "old_logp"} - objective.needs)
    without = dataclasses.replace(batch, **absent)
    assert objective(without).loss.equal(objective(batch).loss)


def test_neither_advantages_nor_rewards_is_an_error() -> None:
    batch = dataclasses.replace(ragged_batch(23).batch(), advantages=None)
    with pytest.raises(ValueError, match="neither advantages nor rewards"):
        get_objective("dapo")(batch)


def test_totals_without_the_statistic_that_is_needed_are_refused() -> None:
    """Bug 2: a divisor that only the whole step knows is never made up from the micro-batch."""
    objective = get_objective("tepo", kl_mask={"normalizer": "masked"})
    assert objective.statistics == {"kl_mask_tokens"}
    batch = ragged_batch(24).batch()
    with pytest.raises(ValueError, match=r"kl_mask_tokens.*objective\.totals"):
        objective(batch, batch.totals)
    assert objective(batch, objective.totals(batch)).loss.equal(objective(batch).loss)


def test_totals_of_different_kinds_do_not_add() -> None:
    objective = get_objective("tepo", kl_mask={"normalizer": "masked"})
    batch = ragged_batch(24).batch()
    with pytest.raises(ValueError, match="different statistics"):
        objective.totals(batch) + batch.totals


def test_output_has_plain_floats_and_detached_tokens() -> None:
    padded = ragged_batch(25)
    out = get_objective("tepo")(padded.batch())
    assert out.loss.shape == ()
    assert {"clip_fraction", "kl_mask_fraction", "approx_kl", "loss"} <= out.metrics.keys()
    assert all(type(value) is float for value in out.metrics.values())
    assert out.metrics["loss"] == out.loss.item()
    for value in out.tokens.values():
        assert value.shape == (sum(LENGTHS),)
        assert not value.requires_grad


@pytest.mark.parametrize("name", ["dapo", "grpo", "gmpo", "hoelder", "hoelder_token", "reinforce_pp", "luspo", "gspo"])
def test_clip_fraction_counts_the_tokens_that_the_clip_silences(name: str) -> None:
    padded = ragged_batch(26)
    out = get_objective(name, clip_low=0.1, clip_high=0.1, ref_kl=None)(padded.batch())
    out.loss.backward()
    silent = padded.gradients()["logp"][padded.mask].eq(0) & out.tokens["advantage"].ne(0)
    assert out.tokens["clipped"].equal(silent)
    assert out.metrics["clip_fraction"] == pytest.approx(silent.double().mean().item())
    parts = out.metrics["clip_fraction_positive"] + out.metrics["clip_fraction_negative"]
    assert parts == pytest.approx(out.metrics["clip_fraction"])
    assert 0 < out.metrics["clip_fraction_positive"] < out.metrics["clip_fraction"] < 1


def test_clip_fraction_of_cispo_counts_the_tokens_whose_weight_is_bounded() -> None:
    """They keep a gradient: that of the bound."""
    padded = ragged_batch(26)
    out = get_objective("cispo", clip_low=0.1, clip_high=0.1)(padded.batch())
    out.loss.backward()
    weight = -padded.gradients()["logp"][padded.mask] * sum(LENGTHS) / out.tokens["advantage"]
    at_a_bound = torch.isclose(weight, weight.new_tensor(0.9)) | torch.isclose(weight, weight.new_tensor(1.1))
    assert out.tokens["clipped"].equal(at_a_bound & out.tokens["advantage"].ne(0))
    assert 0 < out.metrics["clip_fraction_positive"] < out.metrics["clip_fraction"] < 1


@pytest.mark.parametrize("name", ["sapo", "gpg", "rloo"])
def test_without_a_clip_nothing_is_clipped(name: str) -> None:
    assert get_objective(name)(ragged_batch(26).batch()).metrics["clip_fraction"] == 0


# Precision


def test_k3_keeps_its_precision_for_small_steps_in_float32() -> None:
    """e^d - 1 - d for d = 1e-3 is 5e-7: rounded e^d would leave one digit, and a negative KL now and then."""
    old = torch.full((1, 4), -2.0)
    ref = old + torch.tensor([[1e-3, -1e-3, 3e-4, -3e-4]])
    objective = get_objective("grpo", ref_kl=1.0)
    batch = TokenBatch.from_padded(old, old, torch.ones(1, 4), advantages=torch.zeros(1), ref_logp=ref)
    d = (ref - old).double()
    expected = (d.exp() - d - 1).mean().item()
    assert objective(batch).loss.item() == pytest.approx(expected, rel=1e-2)


def test_k3_never_pushes_away_from_a_reference_that_is_far_off() -> None:
    """Where e^d is held, the rest of k3 must not be left alone with the opposite sign."""
    logp = torch.tensor([[-60.0]], requires_grad=True)
    batch = TokenBatch.from_padded(
        logp, logp, torch.ones(1, 1), advantages=torch.zeros(1), ref_logp=torch.tensor([[-1.0]])
    )
    get_objective("grpo", ref_kl=1.0)(batch).loss.backward()
    assert logp.grad is not None
    assert logp.grad.item() <= 0


def test_stop_gradient_form_of_the_ratio_is_as_precise_as_the_plain_one() -> None:
    """float32, log-probs far larger than the clip range: no rounding of s_i against logp."""
    old = torch.tensor([[-12.3, -9.7, -0.01, -300.0]])
    batch = TokenBatch.from_padded(old + 1e-3, old, torch.ones(1, 4), advantages=torch.ones(1))
    plain, token = (get_objective(name)(batch).tokens["log_ratio"] for name in ("gspo", "gspo_token"))
    assert token.equal(plain)


# Imports


def test_import_brings_nothing_heavy_but_torch() -> None:
    """`import tepo.objectives` loads torch, and beyond what torch loads only the standard library."""
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import tepo.objectives\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('tepo') and name.count('.') == 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    third_party, own = done.stdout.splitlines()
    assert third_party.split() == ["tepo"]
    assert own.split() == ["tepo.objectives"], "objectives is the lowest layer and imports no other"
