"""What the specification says follows from TEPO's definition, and its KL mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cases import LENGTHS, Padded, assert_same, loss_and_gradients, ragged_batch
from torch import Tensor

from tepo.objectives import get_objective

TEPO_FORMS = ["tepo", "tepo_v1"]


def on_policy(seed: int = 0) -> Padded:
    """The first mini-batch of a rollout: log-probs and entropies are those of sampling."""
    padded = ragged_batch(seed)
    return padded.fresh(logp=padded.tokens["old_logp"], entropy=padded.tokens["old_entropy"])


def logp_gradient(padded: Padded, name: str, **overrides: Any) -> Tensor:
    """dL/dlogp, [S, T]."""
    return loss_and_gradients(get_objective(name, **overrides), padded)[1]["logp"]


def sequence_ratios(padded: Padded) -> list[float]:
    """s_i, one response at a time."""
    log_ratio = (padded.tokens["logp"] - padded.tokens["old_logp"]).detach()
    return [log_ratio[row, : LENGTHS[row]].mean().exp().item() for row in range(len(LENGTHS))]


@pytest.mark.parametrize("name", TEPO_FORMS)
@pytest.mark.parametrize(
    "other", [{"name": "dapo"}, {"name": "grpo", "aggregate": "token_mean", "ref_kl": None}], ids=str
)
def test_consequence_1_at_the_old_policy_the_gradient_is_that_of_token_mean_grpo_and_dapo(
    name: str, other: dict[str, Any]
) -> None:
    padded = on_policy()
    gradient = logp_gradient(padded, name)
    assert gradient.ne(0).any()
    torch.testing.assert_close(gradient, logp_gradient(padded, **other), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("clip", [(2e-3, 2.5e-3), (0.2, 0.28), (1.0, 100.0)])
def test_consequence_2_with_equal_lengths_it_is_gspo_up_to_the_clip(clip: tuple[float, float]) -> None:
    padded = ragged_batch(1, lengths=(5,) * 8)
    low, high = clip
    tepo, gspo = (get_objective(name, clip_low=low, clip_high=high) for name in ("tepo_v1", "gspo"))
    assert_same(loss_and_gradients(tepo, padded), loss_and_gradients(gspo, padded))
    ragged = ragged_batch(1)
    assert not torch.allclose(loss_and_gradients(tepo, ragged)[0], loss_and_gradients(gspo, ragged)[0])


@pytest.mark.parametrize("name", [*TEPO_FORMS, "gspo"])
def test_consequence_3_plain_and_stop_gradient_forms_have_equal_gradients(name: str) -> None:
    """Where the advantage is constant over a response; clipped and unclipped responses."""
    padded = ragged_batch(2)
    plain, token = (get_objective(name, ratio=ratio) for ratio in ("sequence", "sequence_token"))
    assert_same(loss_and_gradients(token, padded), loss_and_gradients(plain, padded))


def test_consequence_4_gradient_is_s_times_advantage_over_n_unclipped_and_0_clipped() -> None:
    low, high = 2e-3, 2.5e-3
    padded = ragged_batch(3)
    gradient = logp_gradient(padded, "tepo_v1")
    seen = set()
    for row, s in enumerate(sequence_ratios(padded)):
        advantage = padded.advantages[row].item()
        clipped = s > 1 + high if advantage > 0 else s < 1 - low
        expected = 0.0 if clipped else -s * advantage / sum(LENGTHS)
        seen.add((clipped, advantage > 0))
        row_gradient = gradient[row, : LENGTHS[row]]
        torch.testing.assert_close(row_gradient, torch.full_like(row_gradient, expected), rtol=1e-12, atol=1e-15)
    assert len(seen) == 4, "the batch should hold clipped and unclipped responses of both signs"


def test_consequence_5_on_the_first_mini_batch_the_mask_is_empty_and_tepo_is_dapo_without_clip_higher() -> None:
    padded = on_policy(4)
    out = get_objective("tepo", kl_mask=1.0)(padded.batch())
    assert not out.tokens["kl_mask"].any()
    assert out.metrics["kl_mask_fraction"] == 0
    tepo = loss_and_gradients(get_objective("tepo", kl_mask=1.0), padded)
    assert_same(tepo, loss_and_gradients(get_objective("dapo", clip_high=0.2), padded))
    assert_same(tepo, loss_and_gradients(get_objective("tepo_v1"), padded))


def test_later_mini_batches_have_a_mask() -> None:
    padded = ragged_batch(4)
    out = get_objective("tepo")(padded.batch())
    assert 0 < out.metrics["kl_mask_fraction"] < 1
    assert out.loss != get_objective("tepo_v1")(padded.batch()).loss


def test_where_the_advantage_varies_the_plain_form_gives_its_mean_and_the_token_form_each_its_own() -> None:
    padded = ragged_batch(5, vary_advantages=True)
    wide = {"clip_low": 1.0, "clip_high": 100.0}
    plain = logp_gradient(padded, "tepo_v1", **wide)
    token = logp_gradient(padded, "tepo_v1", ratio="sequence_token", **wide)
    for row, s in enumerate(sequence_ratios(padded)):
        advantages = padded.advantages[row, : LENGTHS[row]]
        mean = advantages.mean().expand_as(advantages)
        for gradient, expected in ((plain, mean), (token, advantages)):
            got = gradient[row, : LENGTHS[row]]
            torch.testing.assert_close(got, -s * expected / sum(LENGTHS), rtol=1e-12, atol=1e-15)


def test_mask_holds_tokens_with_positive_advantage_and_falling_entropy() -> None:
    padded = ragged_batch(6)
    mask = get_objective("tepo")(padded.batch()).tokens["kl_mask"]
    tokens = padded.tokens
    expected = (padded.advantages[:, None] > 0) & (tokens["entropy"] < tokens["old_entropy"])
    assert mask.equal(expected[padded.mask])
    assert 0 < int(mask.sum()) < len(mask)


def test_mask_is_detached_and_its_kl_pulls_only_masked_tokens_back() -> None:
    """The mask adds the gradient beta sign(logp - old_logp) / N inside, 0 outside, nothing through the entropy."""
    padded = ragged_batch(7)
    objective = get_objective("tepo", kl_mask=0.5)
    with_mask = loss_and_gradients(objective, padded)[1]
    assert with_mask["entropy"].eq(0).all()
    difference = (with_mask["logp"] - logp_gradient(padded, "tepo_v1"))[padded.mask]
    batch = padded.batch()
    mask = objective(batch).tokens["kl_mask"]
    expected = torch.where(mask, 0.5 * torch.sign(batch.logp - batch.old_logp) / sum(LENGTHS), 0.0).detach()
    torch.testing.assert_close(difference, expected, rtol=1e-12, atol=1e-15)


def test_masked_normalizer_divides_by_the_tokens_in_the_mask() -> None:
    padded = ragged_batch(8)
    by_tokens = get_objective("tepo")(padded.batch())
    by_masked = get_objective("tepo", kl_mask={"normalizer": "masked"})(padded.batch())
    fraction = by_tokens.metrics["kl_mask_fraction"]
    assert by_masked.metrics["kl_mask_loss"] == pytest.approx(by_tokens.metrics["kl_mask_loss"] / fraction, rel=1e-12)


def test_first_order_entropy_test_agrees_with_the_derivative_of_the_entropy() -> None:
    """The spec's form, S_a > sum_j p_j S_j, is a fall of H along the gradient of log p_a (dH/dz_j = -S_j)."""
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    s = (p * (log_p + entropy[:, None])).detach()
    torch.testing.assert_close(slope, -s)
    chosen = torch.arange(40) % 6
    along = torch.nn.functional.one_hot(chosen, 6) - p.detach()
    change = (slope * along).sum(-1)
    direction = (p.detach() * s).sum(-1) - s[torch.arange(40), chosen]
    torch.testing.assert_close(change, direction)

    padded = ragged_batch(9)
    padded.tokens["entropy_direction"][padded.mask] = direction[: sum(LENGTHS)]
    mask = get_objective("tepo", kl_mask={"entropy_test": "first_order"})(padded.batch()).tokens["kl_mask"]
    positive = (padded.advantages[:, None] > 0).expand_as(padded.mask)[padded.mask]
    expected = (change[: sum(LENGTHS)] < 0) & positive
    assert mask.equal(expected)
