"""Tokens chosen over the whole step: Clip-Cov, KL-Cov, forking tokens; and advantages shaped by the entropy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import definition
import definition_settings
import pytest
import torch
from objective_cases import (
    LENGTHS,
    OVERRIDES,
    VARIANTS,
    assert_same,
    known,
    loss_and_gradients,
    prepared,
    ragged_batch,
    seeded,
)
from test_definition import to_tokens
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, get_objective
from tepo.objectives.selections import RandomCovariance, TopCovariance, TopEntropy, covariance
from tepo.objectives.shaping import EntropyShaping
from tepo.objectives.surrogates import Unclipped

SELECTING = {label: objective for label, objective in VARIANTS.items() if objective.selection is not None}
WIDE: dict[str, Any] = {"cov_low": -10.0, "cov_high": 10.0}
"""A range that every covariance of these batches is in."""


def chosen(objective: Objective, batch: TokenBatch, seed: int = 0) -> Tensor:
    """[N] bool, the tokens that the objective selects of a whole step."""
    return known(prepared(objective, batch, seed).selected)


def test_rows_that_select() -> None:
    uses = {objective.name: selection.use for objective in SELECTING.values() if (selection := objective.selection)}
    assert uses == {"clip_cov": "drop", "kl_cov": "mark", "forking_tokens": "keep"}


@pytest.mark.parametrize("label", SELECTING)
@pytest.mark.parametrize("vary_advantages", [False, True], ids=["", "advantages vary"])
def test_selection_is_one_that_the_definition_allows(label: str, vary_advantages: bool) -> None:
    """Its count, its bounds, and no clipped token in Clip-Cov's, on five batches."""
    objective = SELECTING[label]
    row = definition_settings.settings(objective.name, OVERRIDES[label.split("-", 1)[1]])
    for seed in range(5):
        padded = ragged_batch(seed, vary_advantages=vary_advantages).selected_by(objective)
        definition.check_selection(row, to_tokens(padded))


def test_published_settings() -> None:
    """The spec's: shares, the range of covariances, the shaping."""
    assert get_objective("clip_cov").selection == RandomCovariance(share=2e-4, cov_low=1.0, cov_high=5.0)
    assert get_objective("kl_cov").selection == TopCovariance(share=2e-3)
    assert get_objective("forking_tokens").selection == TopEntropy(share=0.2)
    assert get_objective("entropy_advantage").shaping == EntropyShaping(alpha=0.4, kappa=2.0)


# Clip-Cov


@pytest.mark.parametrize("share", [1e-4, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("bounds", [WIDE, {"cov_low": 0.0}, {"cov_low": -0.3, "cov_high": 2.0}], ids=str)
def test_clip_cov_drops_the_right_number_of_eligible_tokens(share: float, bounds: dict[str, float]) -> None:
    """In the range of covariance, not clipped; as many as the share says (one at least) or as there are."""
    objective = get_objective("clip_cov", share=share, **bounds)
    batch = ragged_batch(3).batch()
    out = objective(prepared(objective, batch))
    cov = covariance(batch, known(batch.advantages))
    low, high = bounds["cov_low"], bounds.get("cov_high", 5.0)
    eligible = (cov > low) & (cov < high) & ~out.tokens["clipped"]
    drawn = out.tokens["selected"]
    assert out.tokens["clipped"].any()
    assert not (drawn & ~eligible).any()
    assert int(drawn.sum()) == min(max(1, int(share * batch.num_tokens)), int(eligible.sum()))


def test_clip_cov_draws_by_torchs_seed_and_among_all_of_them() -> None:
    objective = get_objective("clip_cov", share=0.1, **WIDE)
    batch = ragged_batch(4).batch()
    draws = [chosen(objective, batch, seed) for seed in range(60)]
    assert all(draw.equal(chosen(objective, batch, seed)) for seed, draw in enumerate(draws[:5]))
    assert len({tuple(draw.tolist()) for draw in draws}) > 50
    ever = torch.stack(draws).any(0)
    assert ever.equal(~objective(prepared(objective, batch)).tokens["clipped"])


def test_clip_cov_silences_what_it_drops_and_leaves_the_denominators() -> None:
    """Elsewhere the loss and gradient are those of the same clip without a selection."""
    objective = get_objective("clip_cov", share=0.2, **WIDE)
    padded = ragged_batch(5).selected_by(objective)
    dropped = known(padded.selected)
    assert int(dropped.sum()) == 7
    gradient = loss_and_gradients(objective, padded)[1]["logp"]
    plain = loss_and_gradients(get_objective("dapo", clip_high=0.2), ragged_batch(5))[1]["logp"]
    assert plain[dropped & (padded.advantages != 0)[:, None]].ne(0).all()
    assert gradient.equal(torch.where(dropped, 0.0, plain))


def test_clip_cov_with_nothing_to_drop_is_token_mean_grpo() -> None:
    padded = ragged_batch(6)
    for bounds in ({"cov_high": 1e9, "cov_low": 1e8}, {"cov_low": -1e9, "cov_high": -1e8}):
        objective = get_objective("clip_cov", share=1.0, **bounds)
        assert not chosen(objective, padded.batch()).any()
        assert_same(
            loss_and_gradients(objective, padded), loss_and_gradients(get_objective("dapo", clip_high=0.2), padded)
        )


# KL-Cov


def test_kl_cov_pulls_the_tokens_of_highest_covariance_back() -> None:
    """The penalty adds beta sign(log r) / N at those alone; the rest is the unclipped ratio."""
    objective = get_objective("kl_cov", share=0.2, cov_kl=3.0)
    padded = ragged_batch(7).selected_by(objective)
    selected = known(padded.selected)
    cov = covariance(padded.batch(), known(padded.batch().advantages))
    assert set(cov.topk(7).indices.tolist()) == set(selected[padded.mask].nonzero().flatten().tolist())
    bare = dataclasses.replace(get_objective("dapo"), surrogate=Unclipped())
    gradient = loss_and_gradients(objective, padded)[1]["logp"] - loss_and_gradients(bare, padded)[1]["logp"]
    log_ratio = (padded.tokens["logp"] - padded.tokens["old_logp"]).detach()
    expected = torch.where(selected, 3.0 * log_ratio.sign() / sum(LENGTHS), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("off", [None, 0.0])
def test_kl_cov_without_its_penalty_is_the_unclipped_ratio(off: float | None) -> None:
    padded = ragged_batch(8)
    bare = dataclasses.replace(get_objective("dapo"), surrogate=Unclipped())
    assert_same(loss_and_gradients(get_objective("kl_cov", cov_kl=off), padded), loss_and_gradients(bare, padded))


def test_kl_cov_of_all_tokens_is_a_kl_penalty_to_the_sampling_policy() -> None:
    padded = ragged_batch(9)
    out = get_objective("kl_cov", share=1.0, cov_kl=2.0)(padded.batch())
    bare = dataclasses.replace(get_objective("dapo"), surrogate=Unclipped())(padded.batch())
    difference = (padded.tokens["logp"] - padded.tokens["old_logp"])[padded.mask].abs().mean()
    assert (out.loss - bare.loss).item() == pytest.approx(2 * difference.item(), rel=1e-12)
    assert out.metrics["cov_kl_loss"] == pytest.approx(2 * difference.item(), rel=1e-12)


# Forking tokens


def test_forking_tokens_divides_by_the_selected_tokens() -> None:
    """7 of 35: the loss is DAPO's on a batch of those alone."""
    objective = get_objective("forking_tokens")
    padded = ragged_batch(10).selected_by(objective)
    kept = known(padded.selected)
    entropy = padded.tokens["entropy"].detach()
    assert int(kept.sum()) == 7
    assert entropy[kept].min() > entropy[padded.mask & ~kept].max()
    flat = padded.batch()
    alone = get_objective("dapo")(flat.keep(known(flat.selected)))
    assert objective(flat).loss.item() == pytest.approx(alone.loss.item(), rel=1e-12)
    assert objective(flat).num_tokens == 7
    assert objective.totals(flat).tokens == 7
    gradient = loss_and_gradients(objective, padded)[1]["logp"]
    assert gradient[~kept].eq(0).all()
    assert gradient[kept].ne(0).any()


@pytest.mark.parametrize(("share", "count"), [(1e-6, 1), (0.2, 7), (0.21, 8), (0.5, 18), (1.0, 35)])
def test_forking_tokens_rounds_its_share_up(share: float, count: int) -> None:
    assert int(chosen(get_objective("forking_tokens", share=share), ragged_batch(11).batch()).sum()) == count


def test_forking_tokens_with_a_share_of_1_is_dapo() -> None:
    padded = ragged_batch(12)
    all_of_them = loss_and_gradients(get_objective("forking_tokens", share=1), padded)
    assert_same(all_of_them, loss_and_gradients(get_objective("dapo"), padded))


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "hoelder"])
def test_ratios_of_responses_are_those_of_the_selected_tokens(ratio: str) -> None:
    """The mean over a response's tokens in the loss; those left out have no gradient through it either."""
    objective = get_objective("forking_tokens", ratio=ratio, share=0.5)
    padded = ragged_batch(54).selected_by(objective)
    chosen = padded.in_loss(objective)
    out = objective(padded.batch())
    out.loss.backward()
    log_ratio = (padded.tokens["logp"] - padded.tokens["old_logp"]).detach()
    means = (log_ratio * chosen).sum(1) / chosen.sum(1).clamp(min=1)
    expected = means[:, None].expand_as(chosen)[chosen]
    torch.testing.assert_close(out.tokens["log_ratio"], expected, rtol=1e-12, atol=1e-15)
    assert padded.gradients()["logp"][~chosen].eq(0).all()
    whole = (log_ratio * padded.mask).sum(1) / padded.mask.sum(1)
    assert not torch.allclose(means, whole)


def test_selection_is_not_that_of_the_micro_batches() -> None:
    """Bug 2 (verl issues 7829, 7913): choosing within micro-batches would choose others, so it matters who does."""
    batch = ragged_batch(13).batch()
    halves = [batch.select(torch.arange(4)), batch.select(torch.arange(4, 8))]
    for name in ("forking_tokens", "kl_cov"):
        objective = get_objective(name, share=0.3)
        separately = torch.cat([chosen(objective, half) for half in halves])
        assert not separately.equal(chosen(objective, batch))


# Preparing


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "forking_tokens"])
def test_micro_batch_without_a_selection_is_refused(name: str) -> None:
    """With totals a batch is a part of the step, and nothing may be chosen within it."""
    objective = get_objective(name)
    assert objective.needs_whole_step
    batch = ragged_batch(14).batch()
    part = batch.select(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=f"objective {name} reads selected, which the batch does not have"):
        objective(part, objective.totals(batch))
    objective(prepared(objective, batch).select(torch.tensor([0, 1])), objective.totals(batch))


@pytest.mark.parametrize("label", SELECTING)
def test_a_selection_that_was_made_is_kept(label: str) -> None:
    """Preparing twice, or calling with a prepared batch, draws nothing again."""
    objective = SELECTING[label]
    batch = dataclasses.replace(ragged_batch(15).batch(), selected=torch.arange(35) % 3 == 0)
    assert known(objective.prepare(batch).selected).equal(known(batch.selected))
    once = prepared(objective, ragged_batch(15).batch())
    state = torch.get_rng_state()
    assert objective(once).loss.equal(objective(objective.prepare(once)).loss)
    assert torch.get_rng_state().equal(state)


def test_preparing_without_a_selection_fills_in_the_advantages_alone() -> None:
    objective = get_objective("dapo")
    assert not objective.needs_whole_step
    batch = dataclasses.replace(
        ragged_batch(16).batch(), advantages=None, rewards=torch.arange(8.0), group=torch.arange(8) // 4
    )
    with seeded():
        state = torch.get_rng_state()
        done = objective.prepare(batch)
        assert torch.get_rng_state().equal(state)
    assert done.selected is None
    assert known(done.advantages).equal(objective.token_advantages(batch))


def test_selection_is_detached() -> None:
    """No gradient goes through the choice: not through the entropy, nor through the covariance."""
    for name in ("clip_cov", "kl_cov", "forking_tokens"):
        padded = ragged_batch(17)
        objective = get_objective(name, share=0.3)
        objective(prepared(objective, padded.batch())).loss.backward()
        assert padded.gradients()["entropy"].eq(0).all()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "forking_tokens"])
@pytest.mark.parametrize("share", [0, -0.1, 1.5, math.nan])
def test_share_out_of_range_is_an_error(name: str, share: float) -> None:
    with pytest.raises(ValueError, match=f"share is {share}"):
        get_objective(name, share=share)


@pytest.mark.parametrize(("low", "high"), [(6.0, 8.0), (-1.0, 0.5), (2.0, 3.0), (0.0, 10.0), (5.0, 6.0), (0.5, 1.0)])
def test_range_of_covariances_may_lie_anywhere_whichever_bound_comes_first(low: float, high: float) -> None:
    """Also beyond the default range of 1 to 5, which it must not be crossed with on the way."""
    one, other = (
        get_objective("clip_cov", cov_low=low, cov_high=high),
        get_objective("clip_cov", cov_high=high, cov_low=low),
    )
    assert one == other
    assert one.selection == RandomCovariance(2e-4, low, high)


@pytest.mark.parametrize(
    "bounds", [{"cov_low": 5.0}, {"cov_high": 0.5}, {"cov_low": math.nan}, {"cov_low": 8, "cov_high": 6}]
)
def test_range_of_covariances_that_is_empty_is_an_error(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a range is wanted"):
        get_objective("clip_cov", **bounds)


# Shaping


def test_entropy_advantage_is_grpo_with_other_advantages() -> None:
    """A + min(alpha H, |A| / kappa): never another sign, at most |A| / kappa more, nothing where A = 0; detached."""
    padded = ragged_batch(18, vary_advantages=True)
    objective = get_objective("entropy_advantage", alpha=0.7, kappa=1.5)
    shaped = objective(padded.batch()).tokens["advantage"]
    plain = known(padded.batch().advantages)
    bonus = shaped - plain
    entropy = known(padded.batch().entropy).detach()
    torch.testing.assert_close(bonus, torch.minimum(0.7 * entropy, plain.abs() / 1.5), rtol=1e-12, atol=1e-15)
    assert shaped.sign().equal(plain.sign())
    table = torch.zeros_like(padded.advantages)
    table[padded.mask] = shaped
    grpo = loss_and_gradients(get_objective("grpo", ref_kl=None), padded.fresh(advantages=table))
    assert_same(loss_and_gradients(objective, padded), grpo)
    assert grpo[1]["entropy"].eq(0).all()


def test_entropy_advantage_with_alpha_0_is_grpo() -> None:
    padded = ragged_batch(19)
    grpo = loss_and_gradients(get_objective("grpo", ref_kl=None), padded)
    assert_same(loss_and_gradients(get_objective("entropy_advantage", alpha=0), padded), grpo)


@pytest.mark.parametrize(
    ("option", "value"), [("alpha", -0.1), ("alpha", math.inf), ("kappa", 1.0), ("kappa", 0), ("kappa", math.nan)]
)
def test_shaping_out_of_range_is_an_error(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        get_objective("entropy_advantage", **{option: value})


def test_em_ft_is_the_mean_entropy_whatever_the_answers() -> None:
    padded = ragged_batch(20)
    loss, gradients = loss_and_gradients(get_objective("em_ft"), padded)
    assert loss.item() == pytest.approx(padded.tokens["entropy"][padded.mask].mean().item(), rel=1e-12)
    expected = padded.mask.double() / sum(LENGTHS)
    torch.testing.assert_close(gradients["entropy"], expected, rtol=1e-12, atol=0)
    assert gradients["logp"].eq(0).all()
    other = loss_and_gradients(get_objective("em_ft"), padded.fresh(advantages=-3 * padded.advantages))
    assert_same(other, (loss, gradients))
    detached = dataclasses.replace(padded.batch(), entropy=known(padded.batch().entropy).detach())
    with pytest.raises(ValueError, match="needs entropy to carry a gradient"):
        get_objective("em_ft")(detached)
