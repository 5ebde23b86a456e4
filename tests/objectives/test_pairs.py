"""DPO and ORPO on the best and the worst response of a group."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import definition_advantages
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from objective_cases import PAIRS, VARIANTS
from torch import Tensor

from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.pairs import log_odds
from tepo.testing import check_objective
from tepo.testing.batches import random_batch, run

OF_PAIRS = {label: variant for label, variant in VARIANTS.items() if variant.surrogate.pairs}


def pair(logp: list[list[float]], ref: list[list[float]], advantages: list[float], groups: list[int]) -> TokenBatch:
    """A flat batch of responses with one advantage each."""

    def flat(rows: list[list[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    sequence = torch.tensor([i for i, row in enumerate(logp) for _ in row], dtype=torch.long)
    return TokenBatch(
        logp=flat(logp).requires_grad_(),
        old_logp=flat(logp),
        sequence=sequence,
        group=torch.tensor(groups),
        advantages=torch.tensor(advantages, dtype=torch.float64)[sequence],
        ref_logp=flat(ref),
    )


def test_dpo_of_the_specification() -> None:
    """beta .1, margin 3: .554355; the gradient is beta sigmoid(-.3) at each token, of either sign."""
    batch = pair([[-1.0, -1.0], [-3.0]], [[-2.0, -2.0], [-2.0]], [1.0, -1.0], [0, 0])
    out = get_objective("dpo")(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.logp)
    slope = 0.1 / (1 + math.exp(0.3))
    assert out.loss.item() == pytest.approx(0.554355, abs=5e-7)
    assert gradient.tolist() == pytest.approx([-slope, -slope, slope], rel=1e-12)


def test_orpo_of_the_specification() -> None:
    """Mean log-probs -.5 and -.9: log odds ratio .810917."""
    odds = log_odds(torch.tensor([-0.5, -0.9], dtype=torch.float64))
    assert (odds[0] - odds[1]).item() == pytest.approx(0.810917, abs=5e-7)
    batch = pair([[-0.25, -0.75], [-0.9]], [[0.0, 0.0], [0.0]], [1.0, -1.0], [0, 0])
    expected = 0.5 + 0.1 * math.log1p(math.exp(-0.810917))
    assert get_objective("orpo")(batch).loss.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("objective", OF_PAIRS.values(), ids=OF_PAIRS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_variant_has_the_properties_of_all_objectives(objective: Any, seed: int) -> None:
    """Those that test_invariance.py has for advantages that need no pairs; cut at groups."""
    check_objective(objective, seed=seed)


def test_both_rows_are_among_the_variants() -> None:
    assert PAIRS == ["dpo", "orpo"]
    assert {f"{name}-{label}" for name in PAIRS for label in ("defaults", "strong_beta", "ref_kl_and_bonus")} <= set(
        OF_PAIRS
    )


@pytest.mark.parametrize("name", PAIRS)
def test_half_a_pair_is_an_error_that_names_the_groups(name: str) -> None:
    logp = [[-1.0], [-2.0], [-1.0], [-2.0]]
    whole = pair(logp, logp, [1.0, -1.0, 1.0, -1.0], [4, 4, 9, 9])
    objective = get_objective(name)
    totals = objective.totals(whole)
    with pytest.raises(ValueError, match=r"chosen are some of groups \[4, 9\], rejected some of \[4\]"):
        objective(whole.select(torch.tensor([0, 1, 2])), totals)
    with pytest.raises(ValueError, match=r"chosen are some of groups \[4, 9\], rejected some of \[4, 4\]"):
        objective(pair(logp, logp, [1.0, -1.0, -1.0, 1.0], [4, 4, 4, 9]))
    with pytest.raises(ValueError, match=r"chosen are some of groups \[4, 4\], rejected some of \[4, 4\]"):
        objective(pair(logp, logp, [1.0, -1.0, 1.0, -1.0], [4, 4, 4, 4]))


@pytest.mark.parametrize("name", PAIRS)
def test_a_group_without_a_pair_contributes_nothing_and_counts(name: str) -> None:
    logp, ref = [[-1.0, -0.5], [-2.0], [-1.0], [-2.0, -0.3]], [[-1.1, -0.7], [-1.0], [-3.0], [-2.0, -0.1]]
    both = pair(logp, ref, [1.0, -1.0, 0.0, 0.0], [0, 0, 1, 1])
    objective = get_objective(name)
    loss, gradients = run(objective, both)
    alone, of_alone = run(objective, both.select(torch.tensor([0, 1])))
    assert loss.item() == pytest.approx(alone.item() / 2, rel=1e-14)
    assert gradients["logp"][:3].tolist() == pytest.approx((of_alone["logp"] / 2).tolist(), rel=1e-14)
    assert gradients["logp"][3:].eq(0).all()


@pytest.mark.parametrize("name", PAIRS)
def test_responses_between_the_best_and_the_worst_have_no_gradient(name: str) -> None:
    batch = random_batch(get_objective(name), 0)
    _, gradients = run(get_objective(name), batch)
    assert batch.advantages is not None
    assert gradients["logp"].ne(0).equal(batch.advantages != 0)
    assert (gradients["logp"] * batch.advantages <= 0).all()


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=5), max_size=4),
    data=st.data(),
)
def test_pairs_are_the_first_of_the_best_and_the_first_of_the_worst(groups: list[list[float]], data: Any) -> None:
    """Responses without a token passed over."""
    rewards = [reward for group in groups for reward in group]
    labels = [7 - 3 * label for label, group in enumerate(groups) for _ in group]
    lengths = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    present = [length > 0 for length in lengths or [1] * len(rewards)]
    expected = [0] * len(rewards)
    for label in set(labels):
        rows = [i for i in range(len(rewards)) if labels[i] == label and present[i]]
        for i, sign in zip(rows, definition_advantages.best_and_worst([rewards[i] for i in rows]) if rows else [],
                           strict=True):  # fmt: skip
            expected[i] = sign
    made = get_objective("dpo").advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(labels, dtype=torch.long),
        None if lengths is None else torch.tensor(lengths, dtype=torch.long),
    )
    assert made.tolist() == expected


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, None, True])
def test_beta_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="beta is"):
        get_objective(name, beta=value)


def test_a_response_that_is_certain_has_finite_odds() -> None:
    """log (1 - p) would be -inf: 1e-6 nats are the least, with no gradient of the odds below."""
    batch = pair([[0.0, 0.0], [-1.0]], [[0.0, 0.0], [0.0]], [1.0, -1.0], [0, 0])
    out = get_objective("orpo")(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.logp)
    assert out.loss.isfinite()
    assert gradient[:2].tolist() == [-0.5, -0.5]  # that of log p(chosen) alone
    assert gradient[2] > 0


@pytest.mark.parametrize("name", PAIRS)
def test_scores_are_sums_for_dpo_and_means_for_orpo(name: str) -> None:
    """A response written twice as long with the same log-probs: DPO sees twice the margin, ORPO the same."""
    short = pair([[-0.5], [-1.0]], [[-0.7], [-0.8]], [1.0, -1.0], [0, 0])
    long = pair([[-0.5] * 2, [-1.0] * 2], [[-0.7] * 2, [-0.8] * 2], [1.0, -1.0], [0, 0])
    objective = get_objective(name)
    doubled = dataclasses.replace(objective, surrogate=dataclasses.replace(objective.surrogate, beta=0.2))
    expected = (doubled if name == "dpo" else objective)(short).loss
    assert objective(long).loss.item() == pytest.approx(expected.item(), rel=1e-14)
