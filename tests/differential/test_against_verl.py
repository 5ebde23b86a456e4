"""Our objectives against verl 0.9.1: its registered losses, KL estimates and advantages on random ragged steps."""

import dataclasses
import importlib.util

import pytest
import torch
from differential_cases import (
    VERL_ADVANTAGES,
    VERL_CASES,
    AdvantageCase,
    Case,
    active,
    pending,
    with_the_papers_alpha,
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
from foreign_verl import verl, verl_advantages, verl_core, verl_gae

from tepo.objectives import get_objective
from tepo.objectives.aggregates import Aggregate, ConstantLength, SequenceMean, SequenceSum, TokenMean
from tepo.objectives.terms import KL_ESTIMATORS

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl==0.9.1; .ci/differential installs it", allow_module_level=True)

AGGREGATES: dict[str, tuple[Aggregate, dict[str, int]]] = {
    "token-mean": (TokenMean(), {}),
    "seq-mean-token-mean": (SequenceMean(), {}),
    "seq-mean-token-sum": (SequenceSum(), {}),
    "seq-mean-token-sum-norm": (ConstantLength(30), {"loss_scale_factor": 30}),
}


@pytest.mark.parametrize("case", active(VERL_CASES).values(), ids=active(VERL_CASES))
def test_loss_and_gradient(case: Case) -> None:
    assert largest_error(case) < case.tolerance


@pytest.mark.parametrize("name", [name for name, case in active(VERL_CASES).items() if case.split])
def test_gradient_accumulated_over_two_micro_batches(name: str) -> None:
    assert largest_error(VERL_CASES[name], number=2) < VERL_CASES[name].tolerance


@pytest.mark.parametrize("name", [name for name, case in active(VERL_CASES).items() if case.empty != "not_compared"])
def test_responses_without_a_token(name: str) -> None:
    assert error_with_empty_responses(VERL_CASES[name]) < VERL_CASES[name].tolerance


@pytest.mark.parametrize("case", active(VERL_ADVANTAGES).values(), ids=active(VERL_ADVANTAGES))
def test_advantages(case: AdvantageCase) -> None:
    assert largest_advantage_error(case) < case.tolerance


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_returns(gamma: float, lam: float) -> None:
    step = random_step(0, 0.2)
    ours = get_objective("ppo", gamma=gamma, lam=lam).prepare(step.rollout()).returns
    assert ours is not None
    torch.testing.assert_close(ours, verl_gae(step, gamma, lam)[1][step.mask.bool()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATES)
def test_aggregation(mode: str) -> None:
    aggregate, settings = AGGREGATES[mode]
    step = random_step(0, 0.2, empty_responses=2)
    batch = step.batch()
    mask = step.mask.bool()
    ours = (aggregate(batch, batch.totals) * step.ref_logp[mask]).sum()
    theirs = verl_core().agg_loss(step.ref_logp, step.mask.double(), mode, **settings)
    torch.testing.assert_close(ours.detach(), theirs, rtol=2e-8, atol=0.0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_estimator(estimator: str) -> None:
    step = random_step(0, 0.2)
    ours = KL_ESTIMATORS[estimator](step.ref_logp - step.logp)
    theirs = verl_core().kl_penalty(step.logp, step.ref_logp, estimator)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    (of_ours,) = torch.autograd.grad(ours.sum(), step.logp)
    (of_theirs,) = torch.autograd.grad(theirs.sum(), step.logp)
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", pending(VERL_CASES).values(), ids=pending(VERL_CASES))
def test_their_side_of_a_pending_row_runs(case: Case) -> None:
    loss, gradient = foreign_result(case.theirs, random_step(0, 0.2))
    assert abs(loss) > 0
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("case", pending(VERL_ADVANTAGES).values(), ids=pending(VERL_ADVANTAGES))
def test_their_advantages_of_a_pending_row_run(case: AdvantageCase) -> None:
    assert bool((case.theirs(random_step(0, 0.2)) != 0).any())


def test_verl_holds_k3_at_10_and_ours_goes_on() -> None:
    logp = torch.tensor([-6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0], dtype=torch.float64)
    ours = KL_ESTIMATORS["k3"](reference - logp)
    theirs = verl_core().kl_penalty(logp, reference, "low_var_kl")
    assert theirs.item() == 10
    assert torch.autograd.grad(theirs, logp)[0].item() == 0
    assert ours.item() == pytest.approx(torch.tensor(5.0).double().exp().item() - 6)
    assert torch.autograd.grad(ours, logp)[0].item() < -100


def test_verls_gspo_sends_each_token_its_own_advantage() -> None:
    step = random_step(0, 0.2, vary_advantages=True)
    theirs = foreign_result(verl("gspo", "seq-mean-token-mean"), step)
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    plain, own = (our_result(get_objective(name, **wide), step) for name in ("gspo", "gspo_token"))
    assert plain[0] == pytest.approx(theirs[0], rel=1e-6)
    assert error(plain, theirs) > 1e-2
    assert error(own, theirs) < 2e-8


def test_verl_aggregates_the_entropy_bonus_like_the_loss() -> None:
    step = random_step(0, 0.2)
    theirs = verl("vanilla", "seq-mean-token-mean", entropy=0.02, clip_ratio_c=1e9)
    ours = get_objective("grpo", ref_kl=None, entropy_bonus=0.02)
    assert error(our_result(ours, step), foreign_result(theirs, step)) > 1e-3


def test_verl_magnifies_the_rounding_of_equal_rewards() -> None:
    step = random_step(0, 0.2)
    equal = dataclasses.replace(step, rewards=torch.full((12,), 0.1), groups=torch.zeros(12, dtype=torch.long))
    assert float(verl_advantages("grpo")(equal).abs().max()) > 1e-4
    assert get_objective("grpo").advantages(equal.rewards, equal.groups).tolist() == [0.0] * 12


def test_verls_alpha_of_gpg_counts_scores_that_are_not_zero() -> None:
    rewards = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    step = dataclasses.replace(random_step(0, 0.2), rewards=rewards)
    verls = verl_advantages("gpg")(step)
    papers = with_the_papers_alpha(verl_advantages("gpg"))(step)
    ours = get_objective("gpg").advantages(step.rewards, step.groups)
    assert (verls[0, 0].item(), papers[0, 0].item(), ours[0].item()) == (2 * 0.5, 3 * 0.5, 3 * 0.5)
