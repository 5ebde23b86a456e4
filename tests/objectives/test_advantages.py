"""From rewards to advantages."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tepo.objectives import TokenBatch, get_objective, list_objectives

each_objective = pytest.mark.parametrize("name", list_objectives())


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0, 10.0]), min_size=2, max_size=6), max_size=4),
    normalize=st.booleans(),
    data=st.data(),
)
def test_advantages_equal_the_definition(groups: list[list[float]], normalize: bool, data: st.DataObject) -> None:
    """(R - mean) / (std + 1e-6) with the sample standard deviation, or R - mean; groups interleaved in any order."""
    rows = data.draw(st.permutations([(label, reward) for label, group in enumerate(groups) for reward in group]))
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    labels = torch.tensor([7 - 3 * label for label, _ in rows], dtype=torch.long)
    got = get_objective("grpo", advantage="standardized" if normalize else "centered").advantages(rewards, labels)
    for row, (label, reward) in enumerate(rows):
        group = groups[label]
        expected = reward - statistics.fmean(group)
        if normalize:
            expected /= statistics.stdev(group) + 1e-6
        if len(set(group)) == 1:
            expected = 0.0
            assert got[row] == 0
        assert got[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@each_objective
def test_dr_grpo_alone_does_not_divide_by_the_deviation(name: str) -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    largest = get_objective(name).advantages(rewards, groups)[0].item()
    assert largest == pytest.approx(0.75 if name == "dr_grpo" else 0.75 / (0.5 + 1e-6), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "overrides"), [*((name, {}) for name in list_objectives()), ("grpo", {"advantage_epsilon": 0.0})], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, -0.3, 1e8, 1 / 3])
def test_equal_rewards_give_exactly_0(name: str, overrides: dict[str, Any], dtype: torch.dtype, reward: float) -> None:
    """Bug 8, beside a group that is not equal; where epsilon is 0 too."""
    rewards = torch.cat([torch.full((8,), reward, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])
    groups = torch.tensor([0] * 8 + [1] * 2)
    advantages = get_objective(name, **overrides).advantages(rewards, groups)
    assert advantages[:8].eq(0).all()
    assert advantages[8:].ne(0).all()
    assert advantages.isfinite().all()


@each_objective
def test_group_of_one_is_an_error_that_names_the_group(name: str) -> None:
    with pytest.raises(ValueError, match=r"groups \[7\] have one response"):
        get_objective(name).advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2, 2, 7]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_an_error_that_names_the_response(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards of responses \[1\] are not finite"):
        get_objective("grpo").advantages(torch.tensor([1.0, bad, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))


def test_rewards_and_groups_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="one of each a response"):
        get_objective("grpo").advantages(torch.ones(4), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64, torch.bfloat16])
def test_advantages_are_floating_point_whatever_the_rewards(dtype: torch.dtype) -> None:
    """Rewards 0 and 1 as integers must not round the advantages to 0."""
    advantages = get_objective("grpo").advantages(torch.tensor([1, 0, 0, 1]).to(dtype), torch.zeros(4))
    assert advantages.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert advantages.double().tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=4e-3)


@pytest.mark.parametrize("epsilon", [-1e-6, math.nan, math.inf])
def test_epsilon_out_of_range_is_an_error(epsilon: float) -> None:
    with pytest.raises(ValueError, match="advantage_epsilon"):
        get_objective("grpo", advantage_epsilon=epsilon)


def test_a_masked_response_still_counts_in_the_mean_of_its_group() -> None:
    """Overlong filtering masks the loss of a truncated response; its reward is still part of the group."""
    objective = get_objective("dapo")
    advantages = objective.advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3))
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    batch = TokenBatch.from_padded(zeros, zeros, mask, rewards=torch.tensor([1.0, 0.0, 0.0]), groups=torch.zeros(3))
    assert objective(batch).tokens["advantage"].tolist() == advantages[[0, 0, 1]].tolist()
