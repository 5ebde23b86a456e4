"""What holds of every objective at the first update, where all ratios are 1, and after it; of a bonus and a divisor.

Numbers of bugs are those of the specification's list "What real implementations got wrong".
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from objective_cases import (
    TOKENWISE,
    VARIANTS,
    loss_and_gradients,
    prepared,
    ragged_batch,
)
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, get_objective, list_objectives

OF_TOKENS = {label: variant for label, variant in VARIANTS.items() if not variant.surrogate.pairs}
each_variant = pytest.mark.parametrize("objective", OF_TOKENS.values(), ids=OF_TOKENS)


@each_variant
def test_ratio_is_one_before_the_first_step_and_not_after(objective: Objective) -> None:
    """Bug 14: a small softmax policy; old log-probs from before the step, ratio 1 on the first mini-batch only.

    Where there is no ratio it stays 1, and what has moved shows in the measured divergence.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(3, (4, 5, 1), generator=generator)

    def policy() -> tuple[Tensor, Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        top = log_probs.topk(2).values.log_softmax(-1)
        logp = log_probs.gather(-1, actions).squeeze(-1)
        return logp, -(log_probs.exp() * log_probs).sum(-1), -(top.exp() * top).sum(-1)

    old_logp, old_entropy, _ = (value.detach() for value in policy())

    def batch() -> TokenBatch:
        logp, entropy, top_entropy = policy()
        return TokenBatch.from_padded(
            logp, old_logp, torch.ones(4, 5), advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), entropy=entropy,
            old_entropy=old_entropy, ref_logp=old_logp - 0.1, exact_kl=logp - old_logp, entropy_direction=entropy,
            top_entropy=top_entropy, values=entropy, old_values=old_entropy, returns=old_entropy + 1,
            shared=torch.tensor([False, True]).repeat_interleave(2)[:, None].expand(4, 5),
        )  # fmt: skip

    first = objective(prepared(objective, batch()))
    assert first.tokens["log_ratio"].eq(0).all()
    assert first.metrics["clip_fraction"] == 0
    assert first.metrics["log_ratio_max"] == 0
    assert first.metrics["approx_kl"] == 0
    first.loss.backward()
    assert logits.grad is not None
    assert logits.grad.ne(0).any()
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    second = objective(prepared(objective, batch()))
    assert second.metrics["approx_kl"] > 0
    has_ratio = objective.ratio.name != "none"
    assert bool(second.tokens["log_ratio"].ne(0).any()) == has_ratio
    assert (second.metrics["log_ratio_max"] > 0) == has_ratio


@pytest.mark.parametrize("name", TOKENWISE)
def test_old_log_probs_that_are_the_current_ones_do_not_cancel_the_gradient(name: str) -> None:
    """Bug 14's cousin: from_padded(logp, logp, ...) has a gradient, since old log-probs are constants.

    It has one at every token that has a surrogate; through the entropy where the surrogate is made of that.
    """
    objective = get_objective(name, kl_mask=None, ref_kl=None)
    padded = ragged_batch(14)
    padded = dataclasses.replace(padded, tokens={**padded.tokens, "old_logp": padded.tokens["logp"]})
    padded = padded.selected_by(objective)
    objective(padded.batch()).loss.backward()
    field = "entropy" if "entropy_gradient" in objective.surrogate.needs else "logp"
    gradient = padded.gradients()[field]
    assert gradient[padded.in_surrogate(objective) & (padded.advantages != 0)[:, None]].ne(0).all()


@pytest.mark.parametrize("name", list_objectives())
def test_entropy_bonus_has_a_gradient_where_the_advantage_is_zero(name: str) -> None:
    """Bug 13: dL/dH = -coefficient / N at every token in the loss, whatever its advantage."""
    objective = get_objective(name, entropy_bonus=0.25)
    assert objective.touches_zero_advantage
    assert {"entropy", "entropy_gradient"} <= objective.needs
    padded = ragged_batch(15)
    padded = padded.fresh(advantages=torch.zeros_like(padded.advantages)).selected_by(objective)
    _, gradients = loss_and_gradients(objective, padded)
    _, without = loss_and_gradients(get_objective(name), padded)
    assert without["entropy"].eq(0).all() == (not objective.surrogate.touches_zero_advantage)
    in_loss = padded.in_loss(objective)
    expected = in_loss.double() * (-0.25 / int(in_loss.sum()))
    torch.testing.assert_close(gradients["entropy"] - without["entropy"], expected, rtol=1e-12, atol=1e-16)


def test_constant_length_divides_by_the_constant() -> None:
    """Bug 3: Dr.GRPO's loss is in inverse proportion to length_normalizer and has nothing to do with the width."""
    padded = ragged_batch(16, width=30)
    by_8 = get_objective("dr_grpo", length_normalizer=8)(padded.batch()).loss
    by_3000 = get_objective("dr_grpo")(padded.batch()).loss
    torch.testing.assert_close(by_8, by_3000 * 3000 / 8, rtol=1e-12, atol=0)
