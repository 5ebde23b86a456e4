"""What makes one objective another: each equality that follows from the definitions, in loss and in gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import definition_settings
import pytest
import torch
from objective_cases import LENGTHS, TOKENWISE, Padded, assert_same, loss_and_gradients, ragged_batch
from torch import Tensor

from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.surrogates import Unclipped

UNBOUNDED = {"clip_low": 1.0, "clip_high": math.inf}
LENGTH_OF = torch.tensor(LENGTHS, dtype=torch.float64)
SCORE_FUNCTIONS = [name for name, row in definition_settings.SETTINGS.items() if row.surrogate == "score"]


def both(name: str, padded: Padded, **overrides: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of an objective, without the terms that it may have."""
    return loss_and_gradients(get_objective(name, kl_mask=None, ref_kl=None, **overrides), padded)


def on_policy(seed: int, vary_advantages: bool = False) -> Padded:
    """The first mini-batch of a rollout: the log-probs are those of sampling."""
    padded = ragged_batch(seed, vary_advantages=vary_advantages)
    return padded.fresh(logp=padded.tokens["old_logp"])


def moved_far(seed: int) -> Padded:
    """Log-ratios of about 1 at every token, so that every clip has something to do."""
    padded = ragged_batch(seed)
    noise = torch.randn(padded.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return padded.fresh(logp=padded.tokens["old_logp"] + noise)


@pytest.mark.parametrize("batch", [ragged_batch, moved_far])
@pytest.mark.parametrize("vary_advantages", [False, True], ids=["", "advantages vary"])
@pytest.mark.parametrize("clip", [{}, {"clip_low": 3e-4, "clip_high": 4e-4}, {"dual_clip": 1.2}, UNBOUNDED], ids=str)
def test_hoelder_with_p_0_is_gspo_with_its_clip(batch: Any, clip: dict[str, Any], vary_advantages: bool) -> None:
    padded = batch(31)
    if vary_advantages:
        padded = padded.fresh(advantages=ragged_batch(31, vary_advantages=True).advantages)
    gspo = both("gspo", padded, **({"clip_low": 0.2, "clip_high": 0.2} | clip))
    assert_same(both("hoelder", padded, **clip), gspo)
    assert_same(both("gspo", padded, ratio="hoelder", **({"clip_low": 0.2, "clip_high": 0.2} | clip)), gspo)


@pytest.mark.parametrize("seed", [32, 33])
@pytest.mark.parametrize("clip", [{}, {"clip_low": 0.05, "clip_high": 0.1}, UNBOUNDED], ids=str)
def test_hoelder_token_variant_with_p_1_is_grpo(seed: int, clip: dict[str, float]) -> None:
    """Without the KL to the reference."""
    for padded in (ragged_batch(seed), moved_far(seed)):
        assert_same(both("hoelder_token", padded, p=1, **clip), both("grpo", padded, **clip))


def test_hoelder_token_variant_with_p_0_is_gmpo_with_the_same_bounds_in_log_space() -> None:
    padded = moved_far(34)
    bounds = {"clip_low": -math.log(0.8), "clip_high": math.log(1.2)}
    assert_same(both("hoelder_token", padded, p=0), both("gmpo", padded, **bounds))


@pytest.mark.parametrize("p", [-1.0, 0.0, 1.0])
def test_hoelder_variants_are_one_without_a_clip(p: float) -> None:
    padded = moved_far(35)
    assert_same(both("hoelder_token", padded, p=p, **UNBOUNDED), both("hoelder", padded, p=p, **UNBOUNDED))


def test_luspo_is_gspo_weighted_by_length() -> None:
    """Each response's loss and gradient times its length, measured one response at a time and together."""
    for clip in ({}, {"clip_low": 0.2, "clip_high": 0.2}):
        padded = ragged_batch(36)
        luspo, gspo = both("luspo", padded, **clip), both("gspo", padded, **clip)
        torch.testing.assert_close(luspo[1]["logp"], gspo[1]["logp"] * LENGTH_OF[:, None], rtol=1e-12, atol=1e-15)
        totals = padded.batch().totals
        alone = [
            [get_objective(name, **clip)(padded.batch([row]), totals).loss.item() for row in range(8)]
            for name in ("luspo", "gspo")
        ]
        weighted = [length * loss for length, loss in zip(LENGTHS, alone[1], strict=True)]
        assert alone[0] == pytest.approx(weighted, rel=1e-12)
        assert luspo[0].item() == pytest.approx(sum(weighted), rel=1e-12)


def test_luspo_is_tepo_without_its_mask_up_to_a_constant() -> None:
    """Both weigh responses by length: N/S times the gradient, which a normalized optimizer does not see."""
    padded = ragged_batch(37)
    luspo, tepo = (both(name, padded, clip_low=2e-3, clip_high=2.5e-3) for name in ("luspo", "tepo_v1"))
    ratio = sum(LENGTHS) / len(LENGTHS)
    torch.testing.assert_close(luspo[1]["logp"], tepo[1]["logp"] * ratio, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bounds", [{"clip_low": 1e3, "clip_high": 1e3}, {"clip_low": math.inf, "clip_high": math.inf}])
@pytest.mark.parametrize("vary_advantages", [False, True], ids=["", "advantages vary"])
def test_gmpo_with_a_wide_clip_is_the_sequence_ratio_unclipped(bounds: dict[str, float], vary_advantages: bool) -> None:
    padded = moved_far(38)
    if vary_advantages:
        padded = padded.fresh(advantages=ragged_batch(38, vary_advantages=True).advantages)
    assert_same(both("gmpo", padded, **bounds), both("gspo", padded, **UNBOUNDED))


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_unclipped_is_a_clip_without_bounds(name: str) -> None:
    padded = moved_far(39)
    unclipped = dataclasses.replace(get_objective(name), surrogate=Unclipped())
    assert_same(loss_and_gradients(unclipped, padded), both(name, padded, **UNBOUNDED))


def test_gmpo_clips_each_token_before_the_mean() -> None:
    """One response of two tokens, by hand: log-ratios .9 and -.5 against bounds of .4."""
    logp = torch.tensor([[0.9, -0.5]], dtype=torch.float64, requires_grad=True)
    for advantage, mean, silent in ((1.0, (0.4 - 0.5) / 2, 0), (-1.0, (0.9 - 0.4) / 2, 1)):
        a = torch.tensor([advantage], dtype=torch.float64)
        out = get_objective("gmpo")(TokenBatch.from_padded(logp, torch.zeros(1, 2), torch.ones(1, 2), advantages=a))
        (gradient,) = torch.autograd.grad(out.loss, logp)
        assert out.loss.item() == pytest.approx(-advantage * math.exp(mean), rel=1e-14)
        expected = [-advantage * math.exp(mean) / 2] * 2
        expected[silent] = 0.0
        assert gradient[0].tolist() == pytest.approx(expected, rel=1e-14)


def test_gmpo_leaves_tokens_without_an_advantage_out() -> None:
    """l = sgn(A) min(...) is 0 where A is, whatever the ratio, and there is no gradient."""
    logp = torch.tensor([[0.3, 0.2, -0.1]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[1.0, 0.0, -2.0]], dtype=torch.float64)
    old = torch.zeros(1, 3, dtype=torch.float64)
    out = get_objective("gmpo")(TokenBatch.from_padded(logp, old, torch.ones(1, 3), advantages=a))
    (gradient,) = torch.autograd.grad(out.loss, logp)
    loss = math.exp((0.3 - 0.1) / 3) / 3
    assert out.loss.item() == pytest.approx(loss, rel=1e-14)
    assert gradient[0].tolist() == pytest.approx([loss / 3, 0, loss / 3], rel=1e-14)


def test_cispo_keeps_the_gradient_that_dapo_clips() -> None:
    """r A inside the bounds, as DAPO; the bound times A outside, where DAPO has none; r A everywhere unbounded."""
    padded = moved_far(40)
    cispo, dapo = both("cispo", padded)[1]["logp"], both("dapo", padded)[1]["logp"]
    ratio = (padded.tokens["logp"] - padded.tokens["old_logp"]).detach().exp()
    inside = padded.mask & (ratio < 1.28) & ((padded.advantages > 0)[:, None] | (ratio > 0.8))
    torch.testing.assert_close(cispo[inside], dapo[inside], rtol=1e-12, atol=1e-15)
    advantages = padded.advantages[:, None].expand_as(ratio)
    expected = torch.where(padded.mask, -ratio.clamp(max=1.28) * advantages / sum(LENGTHS), 0.0)
    torch.testing.assert_close(cispo, expected, rtol=1e-12, atol=1e-15)
    everywhere = both("cispo", padded, **UNBOUNDED)[1]["logp"]
    torch.testing.assert_close(everywhere, both("dapo", padded, **UNBOUNDED)[1]["logp"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "other", "overrides"),
    [
        ("cispo", "dapo", {}),
        ("sapo", "grpo", {}),
        ("sapo", "grpo", {"aggregate": "token_mean"}),
        ("gmpo", "grpo", {}),
        ("luspo", "gspo", {"aggregate": "sequence_sum"}),
        ("hoelder", "grpo", {}),
        ("hoelder_token", "grpo", {}),
        ("gpg", "dapo", {}),
        ("rloo", "luspo", {}),
        ("reinforce_pp", "dapo", {}),
        ("reinforce_pp_baseline", "dapo", {}),
    ],
)
def test_at_the_old_policy_the_gradient_is_that_of(name: str, other: str, overrides: dict[str, Any]) -> None:
    """Where r = 1, with the same advantages and the same aggregate."""
    padded = on_policy(41)
    gradient = both(name, padded, **overrides)[1]["logp"]
    assert gradient.ne(0).any()
    expected = both(other, padded, **overrides)[1]["logp"]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", TOKENWISE)
def test_at_the_old_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    """- w_t A_t, with the weights of the aggregate: at r = 1 no surrogate is anything but a score function.

    For each token that has a surrogate; N counts those in the loss. A: shaped, where the objective shapes it.
    """
    objective = get_objective(name, kl_mask=None, ref_kl=None)
    padded = on_policy(42).selected_by(objective)
    weights = {
        "token_mean": torch.full((8,), 1 / int(padded.in_loss(objective).sum()), dtype=torch.float64),
        "sequence_mean": 1 / (8 * LENGTH_OF),
        "sequence_sum": torch.full((8,), 1 / 8, dtype=torch.float64),
        "constant_length": torch.full((8,), 1 / (8 * 3000), dtype=torch.float64),
        "level_mean": torch.tensor([0.5 / (10 if i in (2, 7) else 25) for i in range(8)], dtype=torch.float64),
    }[definition_settings.SETTINGS[name].aggregate]
    advantages = padded.advantages[:, None].expand_as(padded.mask)
    if objective.shaping is not None:
        bonus = torch.minimum(0.4 * padded.tokens["entropy"].detach(), advantages.abs() / 2)
        advantages = advantages + bonus
    if "entropy_gradient" in objective.surrogate.needs:  # the entropy alone, which no advantage weighs
        advantages = torch.zeros_like(advantages)
    expected = torch.where(padded.in_surrogate(objective), -weights[:, None] * advantages, 0.0)
    torch.testing.assert_close(both(name, padded)[1]["logp"], expected, rtol=1e-12, atol=1e-15)


def test_score_functions_are_gpg_rloo_and_those_of_entropy_minimisation() -> None:
    assert SCORE_FUNCTIONS == ["gpg", "rloo", "em_rl_sequence", "em_rl_token"]


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
@pytest.mark.parametrize("other", [0.0, -1e4, math.nan])
def test_score_functions_do_not_depend_on_the_old_log_probs(name: str, other: float) -> None:
    """Not even where they are not numbers."""
    padded = ragged_batch(43, vary_advantages=True)
    stale = padded.fresh(old_logp=torch.full_like(padded.tokens["old_logp"], other))
    assert_same(both(name, stale), both(name, padded))
    expected = torch.where(padded.mask, -padded.advantages / (sum(LENGTHS) if name == "gpg" else 8), 0.0)
    torch.testing.assert_close(both(name, padded)[1]["logp"], expected, rtol=1e-12, atol=1e-15)


def with_rewards(padded: Padded, rewards: Tensor, groups: Tensor) -> TokenBatch:
    """The batch with rewards in the advantages' place."""
    return TokenBatch.from_padded(mask=padded.mask, rewards=rewards, groups=groups, **padded.tokens)


def test_gpg_at_the_old_policy_is_dapo_with_centered_advantages_times_alpha() -> None:
    """Rewards in, gradients out: one group of four says nothing, so that alpha = 8 / 4."""
    rewards, groups = torch.tensor([1.0, 0, 0, 0.5, 1, 1, 1, 1], dtype=torch.float64), torch.arange(8) // 4
    gradients = []
    for name, overrides in (("gpg", {}), ("dapo", {"advantage": "centered"})):
        padded = on_policy(44)
        get_objective(name, **overrides)(with_rewards(padded, rewards, groups)).loss.backward()
        gradients.append(padded.gradients()["logp"])
    assert gradients[0].ne(0).any()
    torch.testing.assert_close(gradients[0], 2 * gradients[1], rtol=1e-12, atol=1e-15)


def test_rloo_is_its_gradient_estimator() -> None:
    """1/S sum_i (R_i - mean of the others) grad log pi(o_i), by hand for each response."""
    rewards, groups = torch.tensor([1.0, 0, 0.3, 0.5, 1, 1, 0, 1], dtype=torch.float64), torch.arange(8) // 4
    padded = ragged_batch(45)
    get_objective("rloo")(with_rewards(padded, rewards, groups)).loss.backward()
    for row in range(8):
        others = [rewards[i].item() for i in range(8) if i // 4 == row // 4 and i != row]
        expected = -(rewards[row].item() - sum(others) / 3) / 8
        gradient = padded.gradients()["logp"][row, : LENGTHS[row]]
        assert gradient.tolist() == pytest.approx([expected] * LENGTHS[row], rel=1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_differs_from_dapo_in_its_advantages_alone(name: str) -> None:
    padded = moved_far(46)
    assert_same(both(name, padded), both("dapo", padded, clip_high=0.2))


def test_sapo_fades_with_the_distance_from_1_and_faster_with_tau() -> None:
    """dJ/dr = 4 sigmoid'(tau (r - 1)) A: A at r = 1, symmetric about it, less further away and for a larger tau."""
    slopes = {}
    for tau in (0.5, 1.0, 4.0):
        for ratio in (0.7, 1.0, 1.3, 2.0):
            logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
            a = torch.ones(1, dtype=torch.float64)
            batch = TokenBatch.from_padded(logp, torch.zeros(1, 1), torch.ones(1, 1), advantages=a)
            (gradient,) = torch.autograd.grad(get_objective("sapo", tau=tau)(batch).loss, logp)
            slopes[tau, ratio] = -gradient.item() / ratio
        assert slopes[tau, 1.0] == pytest.approx(1, rel=1e-14)
        assert slopes[tau, 0.7] == pytest.approx(slopes[tau, 1.3], rel=1e-12)
        assert 1 > slopes[tau, 1.3] > slopes[tau, 2.0] > 0
    assert slopes[0.5, 2.0] > slopes[1.0, 2.0] > slopes[4.0, 2.0]


def test_sapo_takes_one_tau_for_each_sign() -> None:
    padded = moved_far(47)
    positive = (padded.advantages > 0)[:, None] & padded.mask
    negative = (padded.advantages < 0)[:, None] & padded.mask
    plain, sharper = (both("sapo", padded, **o)[1]["logp"] for o in ({}, {"tau": 2.0}))
    assert sharper[positive].ne(plain[positive]).all()
    assert sharper[negative].equal(plain[negative])
    sharper = both("sapo", padded, tau_negative=2.0)[1]["logp"]
    assert sharper[positive].equal(plain[positive])
    assert sharper[negative].ne(plain[negative]).all()
