"""Our objectives against TRL 1.16: loss and gradient of its trainers' own `_compute_loss` on random ragged steps."""

import importlib.util

import pytest
import torch
from differential_cases import (
    TRL_ADVANTAGES,
    TRL_CASES,
    AdvantageCase,
    Case,
    active,
    pending,
)
from differential_comparison import (
    error,
    error_with_empty_responses,
    foreign_result,
    largest_advantage_error,
    largest_error,
    our_result,
)
from foreign import random_step
from foreign_trl import RLOO, trl, trl_advantages

from tepo.objectives import get_objective

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl==1.16.0; .ci/differential installs it", allow_module_level=True)


@pytest.mark.parametrize("case", active(TRL_CASES).values(), ids=active(TRL_CASES))
def test_loss_and_gradient(case: Case) -> None:
    assert largest_error(case) < case.tolerance


@pytest.mark.parametrize("name", [name for name, case in active(TRL_CASES).items() if case.split])
def test_gradient_accumulated_over_two_micro_batches(name: str) -> None:
    assert largest_error(TRL_CASES[name], number=2) < TRL_CASES[name].tolerance


@pytest.mark.parametrize("name", [name for name, case in active(TRL_CASES).items() if case.empty != "not_compared"])
def test_responses_without_a_token(name: str) -> None:
    assert error_with_empty_responses(TRL_CASES[name]) < TRL_CASES[name].tolerance


@pytest.mark.parametrize("case", active(TRL_ADVANTAGES).values(), ids=active(TRL_ADVANTAGES))
def test_advantages(case: AdvantageCase) -> None:
    assert largest_advantage_error(case) < case.tolerance


@pytest.mark.parametrize("case", pending(TRL_CASES).values(), ids=pending(TRL_CASES))
def test_their_side_of_a_pending_row_runs(case: Case) -> None:
    loss, gradient = foreign_result(case.theirs, random_step(0, 0.2))
    assert abs(loss) > 0
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("case", pending(TRL_ADVANTAGES).values(), ids=pending(TRL_ADVANTAGES))
def test_their_advantages_of_a_pending_row_run(case: AdvantageCase) -> None:
    assert bool((case.theirs(random_step(0, 0.2)) != 0).any())


def test_trl_multiplies_the_kl_by_the_ratio_unless_told_not_to() -> None:
    step = random_step(0, 0.2)
    ours = our_result(get_objective("grpo"), step)
    assert error(ours, foreign_result(trl("grpo", beta=0.04), step)) > 1e-3
    d = step.ref_logp - step.logp
    correction = (torch.expm1(d) - d) * torch.expm1(step.logp - step.old_logp)
    by_hand = 0.04 * ((correction * step.mask).sum(-1) / step.mask.sum(-1)).mean()
    assert foreign_result(trl("grpo", beta=0.04), step)[0] == pytest.approx(ours[0] + by_hand.item(), rel=1e-12)


def test_trls_bnpo_changes_with_the_micro_batches_and_ours_does_not() -> None:
    step = random_step(0, 0.2)
    bnpo, dapo = trl("bnpo", epsilon_high=0.28), get_objective("dapo")
    assert error(foreign_result(bnpo, step, 1), foreign_result(bnpo, step, 2)) > 1e-3
    assert error(our_result(dapo, step, 1), our_result(dapo, step, 2)) < 1e-12


def test_trl_divides_the_loss_of_forking_tokens_by_all_tokens() -> None:
    step = random_step(0, 0.2)
    whole, few = (foreign_result(trl("dapo", top_entropy_quantile=q), step)[1][0] for q in (1.0, 0.2))
    chosen = few != 0
    assert 0 < int(chosen.sum()) < 0.3 * int(step.mask.sum())
    torch.testing.assert_close(few[chosen], whole[chosen], rtol=1e-12, atol=0.0)


def test_trls_standard_deviation_has_a_larger_epsilon() -> None:
    step = random_step(0, 0.2)
    ours = get_objective("grpo").advantages(step.rewards, step.groups)[:, None] * step.mask
    difference = (trl_advantages()(step) - ours).abs().max()
    assert 1e-6 < float(difference) < 1e-2


def test_trls_rloo_clips_the_ratio_of_whole_responses_and_has_our_gradient_before_the_first_step() -> None:
    theirs, ours = trl(None, RLOO, beta=0.0), get_objective("rloo")
    step = random_step(0, 0.2)
    assert error(our_result(ours, step), foreign_result(theirs, step)) > 1e-2
    step = random_step(0, 0.0)
    torch.testing.assert_close(our_result(ours, step)[1], foreign_result(theirs, step)[1], rtol=1e-12, atol=1e-15)
