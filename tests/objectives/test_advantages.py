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

from tepo.objectives import TokenBatch, get_objective

KINDS = ["standardized", "centered", "leave_one_out", "informative", "batch"]
RELATIVE = ["standardized", "centered", "leave_one_out", "informative"]
"""Kinds of advantages, by the override that sets them; those whose baseline is the group."""

SPECIFIED = {
    "tepo": ("standardized", 1e-6), "tepo_v1": ("standardized", 1e-6), "grpo": ("standardized", 1e-6),
    "dr_grpo": ("centered", 0.0), "dapo": ("standardized", 1e-6), "gspo": ("standardized", 1e-6),
    "gspo_token": ("standardized", 1e-6), "luspo": ("standardized", 1e-6), "gmpo": ("standardized", 1e-6),
    "hoelder": ("standardized", 1e-8), "hoelder_token": ("standardized", 1e-8), "cispo": ("standardized", 1e-6),
    "sapo": ("standardized", 1e-6), "gpg": ("informative", 0.0), "rloo": ("leave_one_out", 0.0),
    "reinforce_pp": ("batch", 1e-8), "reinforce_pp_baseline": ("batch_baseline", 1e-8),
    "clip_cov": ("standardized", 1e-6), "kl_cov": ("standardized", 1e-6), "forking_tokens": ("standardized", 1e-6),
    "entropy_advantage": ("standardized", 1e-6), "aent": ("standardized", 1e-6), "em_ft": ("centered", 0.0),
    "policy_kl": ("standardized", 1e-6),
}  # fmt: skip
"""The kind of advantages of each objective that makes them of rewards alone, and what is added to the divisor.

The others: test_entropy_advantages.py, test_values.py, test_process.py and test_pairs.py.
"""


def expected_advantages(kind: str, epsilon: float, rows: list[tuple[int, float]], lengths: list[int]) -> list[float]:
    """The definitions, one response (label, reward) at a time."""
    members: dict[int, list[float]] = {}
    for label, reward in rows:
        members.setdefault(label, []).append(reward)
    means = {label: statistics.fmean(group) for label, group in members.items()}
    equal = {label: len(set(group)) == 1 for label, group in members.items()}
    if kind.startswith("batch"):
        values = [reward for _, reward in rows]
        if kind == "batch_baseline":
            values = [0.0 if equal[label] else reward - means[label] for label, reward in rows]
        tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
        if len(set(tokens)) <= 1:
            return [0.0] * len(rows)
        return [(value - statistics.fmean(tokens)) / (statistics.stdev(tokens) + epsilon) for value in values]
    informative = sum(not equal[label] for label, _ in rows)
    advantages = []
    for label, reward in rows:
        group = members[label]
        advantage = reward - means[label]
        if equal[label]:
            advantage = 0.0
        elif kind == "standardized":
            advantage /= statistics.stdev(group) + epsilon
        elif kind == "leave_one_out":
            advantage = reward - (sum(group) - reward) / (len(group) - 1)
        elif kind == "informative":
            advantage *= len(rows) / informative
        advantages.append(advantage)
    return advantages


def test_every_objective_has_the_specified_advantage() -> None:
    """Name of the kind and epsilon, beside the values below."""
    for name, (kind, epsilon) in SPECIFIED.items():
        advantage = get_objective(name).advantage
        assert (advantage.name, getattr(advantage, "epsilon", 0.0)) == (kind.removesuffix("_baseline"), epsilon)


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(list(SPECIFIED)),
    groups=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0, 10.0]), min_size=2, max_size=6), max_size=4),
    data=st.data(),
)
def test_advantages_equal_the_definition(name: str, groups: list[list[float]], data: st.DataObject) -> None:
    """Of every objective and every kind that can be put in its place; groups and lengths in any order."""
    kind, epsilon = SPECIFIED[name]
    objective = get_objective(name)
    if data.draw(st.booleans()):
        kind = data.draw(st.sampled_from(KINDS))
        epsilon = {"standardized": 1e-6, "batch": 1e-8}.get(kind, 0.0)
        objective = get_objective(name, advantage=kind)
    rows = data.draw(st.permutations([(label, reward) for label, group in enumerate(groups) for reward in group]))
    count = len(rows)
    lengths = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=count, max_size=count))
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    labels = torch.tensor([7 - 3 * label for label, _ in rows], dtype=torch.long)
    got = objective.advantages(rewards, labels, None if lengths is None else torch.tensor(lengths, dtype=torch.long))
    assert got.isfinite().all()
    present = [length > 0 for length in lengths or [1] * count]
    for value, expected, counts in zip(
        got.tolist(), expected_advantages(kind, epsilon, rows, lengths or [1] * count), present, strict=True
    ):
        if counts or not kind.startswith("batch"):  # the others have no token to stand at
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for (label, _), value in zip(rows, got.tolist(), strict=True):
        if kind in RELATIVE and len(set(groups[label])) == 1:
            assert value == 0


@pytest.mark.parametrize("name", SPECIFIED)
def test_one_right_of_four(name: str) -> None:
    """Deviation .5: the divisor, the rescaling and the epsilon of each objective in one number."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    kind, epsilon = SPECIFIED[name]
    expected = {"centered": 0.75, "informative": 0.75, "leave_one_out": 1.0}.get(kind, 0.75 / (0.5 + epsilon))
    assert get_objective(name).advantages(rewards, groups)[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, {}) for name, (kind, _) in SPECIFIED.items() if kind != "batch"),
        *(("dapo", {"advantage": kind}) for kind in RELATIVE),
        *((name, {"advantage_epsilon": 0.0}) for name in ("grpo", "reinforce_pp_baseline")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, -0.3, 1e8, 1 / 3])
def test_equal_rewards_give_exactly_0(name: str, overrides: dict[str, Any], dtype: torch.dtype, reward: float) -> None:
    """Bug 8, beside groups that are not equal; where epsilon is 0 too."""
    others = torch.tensor([0.0, 1.0, 0.1, 0.7, 0.2], dtype=dtype)
    rewards = torch.cat([torch.full((8,), reward, dtype=dtype), others])
    groups = torch.tensor([0] * 8 + [1] * 2 + [2] * 3)
    advantages = get_objective(name, **overrides).advantages(rewards, groups)
    assert advantages[:8].eq(0).all()
    assert advantages[8:].ne(0).all()
    assert advantages.isfinite().all()


@pytest.mark.parametrize("name", SPECIFIED)
@pytest.mark.parametrize("epsilon", [None, 0.0])
@pytest.mark.parametrize("lengths", [None, [5, 1, 7, 2, 3, 11, 0, 4]], ids=["", "weighted"])
@pytest.mark.parametrize("reward", [0.1, -0.3, 1e8, 1 / 3])
def test_a_rollout_of_equal_groups_gives_exactly_0(
    name: str, epsilon: float | None, lengths: list[int] | None, reward: float
) -> None:
    """Bug 8 where the mean is taken over tokens of all groups: every group is equal; where all of them are, or not."""
    kind, _ = SPECIFIED[name]
    if epsilon is not None and kind in ("centered", "informative", "leave_one_out"):
        with pytest.raises(ValueError, match="does not use advantage_epsilon"):
            get_objective(name, advantage_epsilon=epsilon)
        return
    objective = get_objective(name, **({} if epsilon is None else {"advantage_epsilon": epsilon}))
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    weights = None if lengths is None else torch.tensor(lengths)
    for other in (reward, 1.0):
        if kind == "batch" and other != reward:
            continue  # the group is not its baseline
        rewards = torch.tensor([reward] * 3 + [other] * 3 + [reward] * 2, dtype=torch.float64)
        assert objective.advantages(rewards, groups, weights).eq(0).all()


def test_batch_advantage_of_a_rollout_that_is_equal_where_it_has_tokens_is_exactly_0() -> None:
    """Bug 8: the response that differs is masked, so that mean and deviation are those of equal rewards."""
    objective = get_objective("reinforce_pp", advantage_epsilon=0.0)
    rewards, lengths = torch.tensor([0.1] * 7 + [1.0], dtype=torch.float64), torch.tensor([3, 5, 7, 1, 2, 9, 11, 0])
    assert objective.advantages(rewards, torch.zeros(8), lengths)[:7].eq(0).all()
    assert objective.advantages(rewards, torch.zeros(8), torch.zeros(8)).eq(0).all()


def test_gpg_scales_by_the_share_of_informative_responses() -> None:
    """The spec's rewards: alpha is 12 / (12 - 8) = 3; verl, which counts non-zero scores, has 12 / 6 = 2."""
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    groups = torch.arange(12) // 4
    advantages = get_objective("gpg").advantages(rewards, groups)
    assert advantages.tolist() == [1.5, -1.5, -1.5, 1.5] + [0.0] * 8


def test_gpg_counts_groups_of_equal_rewards_by_equality() -> None:
    """Bug 8: the mean of [.1]*8 is not .1, and its residue does not make the group informative."""
    rewards = torch.tensor([0.1] * 8 + [0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0] * 8 + [1] * 2)
    assert get_objective("gpg").advantages(rewards, groups).tolist() == [0.0] * 8 + [-2.5, 2.5]


def test_gpg_scale_has_the_precision_of_the_rewards() -> None:
    """5/3 is no float32."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    advantages = get_objective("gpg").advantages(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert advantages.tolist() == pytest.approx([5 / 6, -5 / 6, 0, 0, 0], rel=1e-15)


def test_rloo_is_centered_times_g_over_g_minus_1() -> None:
    """Groups of 2, 3 and 4."""
    rewards = torch.tensor([1.0, 0, 0.3, 0.6, 0, 1, 1, 0, -2], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    sizes = torch.tensor([2.0, 2, 3, 3, 3, 4, 4, 4, 4], dtype=torch.float64)
    centered = get_objective("dr_grpo").advantages(rewards, groups)
    expected = centered * sizes / (sizes - 1)
    torch.testing.assert_close(get_objective("rloo").advantages(rewards, groups), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_whitens_over_tokens(name: str) -> None:
    """Spread over the tokens, mean 0 and deviation 1 (ddof 1); and not so over the responses."""
    rewards, groups = torch.tensor([1.0, 0, 0.5, 0, 0, 2], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([9, 2, 4, 1, 30, 6])
    advantages = get_objective(name, advantage_epsilon=0.0).advantages(rewards, groups, lengths)
    tokens = advantages.repeat_interleave(lengths)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std().item() == pytest.approx(1, rel=1e-12)
    assert abs(advantages.mean().item()) > 0.1
    unweighted = get_objective(name, advantage_epsilon=0.0).advantages(rewards, groups)
    assert unweighted.std().item() == pytest.approx(1, rel=1e-12)
    assert not torch.allclose(unweighted, advantages)


def test_reinforce_pp_takes_lengths_from_the_batch() -> None:
    """With rewards in the batch, the weights are the tokens that the mask keeps."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    zeros, rewards = torch.zeros(4, 4, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.5, 9.0], dtype=torch.float64)
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        objective = get_objective(name)
        batch = TokenBatch.from_padded(zeros, zeros, mask, rewards=rewards, groups=torch.zeros(4))
        expected = objective.advantages(rewards, torch.zeros(4), torch.tensor([4, 1, 2, 0]))
        assert objective(batch).tokens["advantage"].tolist() == expected[[0, 0, 0, 0, 1, 2, 2]].tolist()
        assert objective(batch).tokens["advantage"].sum().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", SPECIFIED)
def test_order_of_responses_is_of_no_account(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(12, generator=generator, dtype=torch.float64)
    rewards[:4] = 0.1
    groups, lengths = torch.arange(12) // 4, torch.randint(1, 40, (12,), generator=generator)
    objective = get_objective(name)
    expected = objective.advantages(rewards, groups, lengths)
    order = torch.randperm(12, generator=generator)
    got = objective.advantages(rewards[order], groups[order] * -5, lengths[order])
    torch.testing.assert_close(got, expected[order], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SPECIFIED)
def test_group_of_one_is_an_error_that_names_the_group_where_the_group_is_the_baseline(name: str) -> None:
    objective = get_objective(name)
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2, 2, 7])
    assert objective.advantage.relative_to_group == (name != "reinforce_pp")
    if name != "reinforce_pp":
        with pytest.raises(ValueError, match=r"groups \[7\] have one response"):
            objective.advantages(rewards, groups)
        return
    ones = objective.advantages(rewards, torch.tensor([0, 1, 2]))
    assert ones.equal(objective.advantages(rewards, groups))
    assert ones.tolist() == pytest.approx([3**-0.5, -2 * 3**-0.5, 3**-0.5], rel=1e-6)
    assert objective.advantages(rewards[:1], groups[:1]).tolist() == [0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_an_error_that_names_the_response(kind: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards of responses \[1\] are not finite"):
        get_objective("grpo", advantage=kind).advantages(torch.tensor([1.0, bad, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_and_groups_of_different_lengths_are_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match="one of each a response"):
        get_objective("grpo", advantage=kind).advantages(torch.ones(4), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("standardized", 0.866), ("centered", 0.5), ("leave_one_out", 0.667), ("informative", 0.5), ("batch", 0.866)],
)
def test_advantages_are_floating_point_whatever_the_rewards(kind: str, value: float, dtype: torch.dtype) -> None:
    """Rewards 0 and 1 as integers must not round the advantages to 0."""
    objective = get_objective("grpo", advantage=kind)
    advantages = objective.advantages(torch.tensor([1, 0, 0, 1]).to(dtype), torch.zeros(4))
    assert advantages.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert advantages.double().tolist() == pytest.approx([value, -value, -value, value], abs=4e-3)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
@pytest.mark.parametrize("epsilon", [-1e-6, math.nan, math.inf])
def test_epsilon_out_of_range_is_an_error(name: str, epsilon: float) -> None:
    with pytest.raises(ValueError, match="advantage_epsilon"):
        get_objective(name, advantage_epsilon=epsilon)


def test_a_masked_response_still_counts_in_the_mean_of_its_group() -> None:
    """Overlong filtering masks the loss of a truncated response; its reward is still part of the group."""
    objective = get_objective("dapo")
    advantages = objective.advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3))
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    batch = TokenBatch.from_padded(zeros, zeros, mask, rewards=torch.tensor([1.0, 0.0, 0.0]), groups=torch.zeros(3))
    assert objective(batch).tokens["advantage"].tolist() == advantages[[0, 0, 1]].tolist()
