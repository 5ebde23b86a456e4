"""Input that would make a loss silently wrong: refused, or made right."""

from __future__ import annotations

import pytest
import torch
from objective_cases import loss_and_gradients, ragged_batch

from tepo.objectives import TokenBatch, get_objective


def test_entropy_bonus_on_an_entropy_without_gradient_is_an_error() -> None:
    """Bug 13: where logp has a gradient and the entropy has none, the bonus silently does nothing."""
    padded = ragged_batch(2)
    batch = TokenBatch.from_padded(
        padded.tokens["logp"],
        padded.tokens["old_logp"],
        padded.mask,
        advantages=padded.advantages,
        entropy=padded.tokens["entropy"].detach(),
    )
    with pytest.raises(ValueError, match="entropy"):
        get_objective("dapo", entropy_bonus=0.1)(batch)


def test_rewards_in_a_micro_batch_are_refused_when_the_group_may_be_cut() -> None:
    """Bug 1: groups of 4 in micro-batches of 2 give other advantages than the whole step, without a word."""
    objective = get_objective("dapo")
    padded = ragged_batch(2)
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1]).double(), torch.arange(8) // 4
    logp, old = padded.tokens["logp"], padded.tokens["old_logp"]
    whole = TokenBatch.from_padded(logp, old, padded.mask, rewards=rewards, groups=groups)
    totals = objective.totals(whole)
    parts = [whole.select(torch.tensor([row, row + 1])) for row in (0, 2, 4, 6)]
    try:
        loss = sum(objective(part, totals).loss.item() for part in parts)
    except ValueError:
        return
    assert loss == pytest.approx(objective(whole).loss.item(), rel=1e-12)


def test_advantage_epsilon_without_a_division_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not use advantage_epsilon"):
        get_objective("dr_grpo", advantage_epsilon=1e-4)


@pytest.mark.parametrize("name", ["gspo", "tepo_v1"])
def test_bfloat16_log_probs_give_the_gradient_of_float32(name: str) -> None:
    """Sums over 700 tokens stagnate in bfloat16: half of the gradient is lost."""
    old = -torch.rand(8, 700, generator=torch.Generator().manual_seed(0))
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        logp = old.bfloat16().to(dtype).requires_grad_()
        batch = TokenBatch.from_padded(logp, logp, torch.ones(8, 700), advantages=torch.tensor([1.0, -1.0] * 4))
        get_objective(name)(batch).loss.backward()
        assert logp.grad is not None
        gradients.append(logp.grad.float())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.01, atol=1e-9)


def test_flat_batch_takes_no_gradient_through_the_old_log_probs() -> None:
    """Bug 14's cousin: TokenBatch(logp, logp, ...) has a gradient of exactly 0."""
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    try:
        batch = TokenBatch(logp, logp, torch.tensor([0, 1]), torch.tensor([0, 0]), advantages=torch.tensor([1.0, -1.0]))
    except ValueError:
        return
    get_objective("dapo")(batch).loss.backward()
    assert logp.grad is not None
    assert logp.grad.ne(0).all()


@pytest.mark.parametrize("option", ["ref_kl", "entropy_bonus"])
def test_a_term_with_coefficient_0_needs_and_touches_nothing(option: str) -> None:
    """ref_kl=0 keeps a reference model in memory and forbids dropping groups, for a term that adds 0."""
    objective = get_objective("dapo", **{option: 0.0})
    assert not objective.touches_zero_advantage
    assert not objective.needs


def test_infinite_kl_outside_the_mask_has_no_gradient() -> None:
    """A token whose log-prob is -inf and that is not in the mask; k2."""
    padded = ragged_batch(2)
    logp = padded.tokens["logp"].detach().clone()
    logp[2, 0] = -torch.inf  # response 2 has a negative advantage
    _, gradients = loss_and_gradients(get_objective("tepo", kl_mask={"estimator": "k2"}), padded.fresh(logp=logp))
    assert gradients["logp"].isfinite().all()
