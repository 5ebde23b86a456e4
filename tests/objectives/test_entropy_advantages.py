"""Advantages made of old log-probs and entropies: EM-RL, GTPO, GRPO-S."""

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
from objective_cases import PAIRS
from test_advantages import SPECIFIED

from tepo.objectives import TokenBatch, get_objective, list_objectives
from tepo.objectives.entropy_advantages import EntropyShare

NAMES = {"em_rl_sequence": "old_logp", "em_rl_token": "old_entropy", "gtpo": "old_entropy", "grpo_s": "old_entropy"}
"""The objectives whose advantages are not made of rewards alone, and what else they are made of."""

Response = tuple[int, float, list[float]]
"""Label of the group, reward, and the old entropy of each token (less: the old log-prob)."""


def batch_of(responses: list[Response]) -> TokenBatch:
    """A flat batch with these old entropies, and log-probs of minus as much."""
    entropy = torch.tensor([value for *_, row in responses for value in row], dtype=torch.float64)
    return TokenBatch(
        logp=-entropy + 0.1,
        old_logp=-entropy,
        sequence=torch.tensor([i for i, (*_, row) in enumerate(responses) for _ in row], dtype=torch.long),
        group=torch.tensor([label for label, *_ in responses], dtype=torch.long),
        rewards=torch.tensor([reward for _, reward, _ in responses], dtype=torch.float64),
        old_entropy=entropy,
        ref_logp=-entropy,
    )


def expected(name: str, responses: list[Response], **options: float) -> list[float]:
    """The definitions, one group at a time; one value a token."""
    found: dict[int, list[float]] = {}
    for label in {label for label, *_ in responses}:
        members = [i for i, response in enumerate(responses) if response[0] == label]
        rewards, rows = [responses[i][1] for i in members], [responses[i][2] for i in members]
        if name == "gtpo":
            values = definition_advantages.gtpo(rewards, rows, **options)
        elif name == "grpo_s":
            means = definition_advantages.grpo_s(rewards, rows, **options)
            values = [[a] * len(row) for a, row in zip(means, rows, strict=True)]
        else:  # sum_t log pi_old, or - sum_t H_old: the same numbers in these batches
            own = definition_advantages.leave_one_out([-math.fsum(row) for row in rows])
            values = [[a] * len(row) for a, row in zip(own, rows, strict=True)]
        found |= dict(zip(members, values, strict=True))
    return [value for i in range(len(responses)) for value in found[i]]


@st.composite
def rollouts(draw: st.DrawFn) -> list[Response]:
    """Up to three groups of two to five responses of one to four tokens, in any order."""
    entropies = st.lists(st.sampled_from([0.01, 0.3, 0.5, 1.0, 2.7]), min_size=1, max_size=4)
    responses: list[Response] = []
    for label in range(draw(st.integers(1, 3))):
        rewards = draw(st.lists(st.sampled_from([1.0, 0.0, -1.0, 0.5]), min_size=2, max_size=5))
        responses += [(7 - 3 * label, reward, draw(entropies)) for reward in rewards]
    return list(draw(st.permutations(responses)))


@hypothesis_settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(list(NAMES)), responses=rollouts(), other=st.booleans())
def test_advantages_equal_the_definition(name: str, responses: list[Response], other: bool) -> None:
    options = {"a1": 2.0, "a2": 0.7} if other and name in ("gtpo", "grpo_s") else {}
    got = get_objective(name, **options).token_advantages(batch_of(responses))
    assert got.tolist() == pytest.approx(expected(name, responses, **options), rel=1e-9, abs=1e-11)


def test_these_are_the_objectives_whose_advantages_rewards_do_not_tell() -> None:
    needing = {name: get_objective(name).advantage.needs for name in list_objectives()}
    elsewhere = {"ppo", "prpo", "skpo"}  # test_values.py, test_process.py
    assert {name for name, needs in needing.items() if needs} - elsewhere == NAMES.keys()
    assert SPECIFIED.keys() == needing.keys() - NAMES.keys() - elsewhere - set(PAIRS)
    for name, field in NAMES.items():
        assert needing[name] == {field}
        with pytest.raises(ValueError, match=f"reads {field}: one value a token"):
            get_objective(name).advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))


ONE_GROUP: list[Response] = [
    (0, 1.0, [0.4, 1.2, 0.1, 2.0]), (0, 1.0, [1.0, 0.3]), (0, 0.0, [0.2, 0.9, 0.6]), (0, -1.0, [2.5]),
    (0, 1.0, [0.8, 0.7, 0.6]), (0, 0.0, [1.1, 0.05]),
]  # fmt: skip


@pytest.mark.parametrize(("a1", "a2"), [(1.0, 0.1), (0.3, 2.0)])
def test_gtpo_bonuses_at_each_position_sum_to_a2_times_those_alive(a1: float, a2: float) -> None:
    """The spec's invariant, d_t successes (and h_t failures) still alive at t."""
    rewards = [reward for _, reward, _ in ONE_GROUP]
    in_python = definition_advantages.gtpo_rewards(rewards, [row for *_, row in ONE_GROUP], a1, a2)
    for success in (True, False):
        for t in range(4):
            alive = [i for i, (_, r, row) in enumerate(ONE_GROUP) if (r > 0) == success and t < len(row)]
            entropy = torch.tensor([ONE_GROUP[i][2][t] for i in alive], dtype=torch.float64)
            given_rewards = torch.tensor([rewards[i] for i in alive], dtype=torch.float64)
            everyone = torch.full((len(alive),), success), torch.zeros(len(alive), dtype=torch.long)
            shaped = EntropyShare(a1=a1, a2=a2).shaped(entropy, given_rewards, *everyone)
            assert shaped.tolist() == pytest.approx([in_python[i][t] for i in alive], rel=1e-12)
            bonuses = shaped - a1 * given_rewards if success else -a1 - shaped
            assert bonuses.sum().item() == pytest.approx(a2 * len(alive), rel=1e-12, abs=1e-15)
            assert bonuses.gt(0).all()


def test_gtpo_rewards_uncertain_successes_more_and_certain_failures_less() -> None:
    """Two successes and two failures of one token: the more entropy, the larger the advantage, on both sides."""
    responses: list[Response] = [(0, 1.0, [0.2]), (0, 1.0, [0.9]), (0, 0.0, [0.2]), (0, 0.0, [0.9])]
    low, high, low_failure, high_failure = get_objective("gtpo").token_advantages(batch_of(responses)).tolist()
    assert low < 0 < high
    assert low_failure < 0 < high_failure


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_each_side_of_a_group_is_standardized_by_itself(name: str) -> None:
    """Mean 0 and deviation 1 (ddof 1) over the tokens, or the responses, of the successes and of the failures."""
    batch = batch_of(ONE_GROUP)
    advantages = get_objective(name, advantage_epsilon=0.0).token_advantages(batch)
    assert batch.rewards is not None
    if name == "grpo_s":
        advantages = batch.sequence_mean(advantages)
    success = batch.rewards > 0 if name == "grpo_s" else (batch.rewards > 0)[batch.sequence]
    for side in (advantages[success], advantages[~success]):
        assert side.mean().item() == pytest.approx(0, abs=1e-12)
        assert side.std().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_groups_and_order_of_responses_are_of_no_account(name: str) -> None:
    objective = get_objective(name)
    other: list[Response] = [(4, 1.0, [0.1, 0.2]), (4, 0.0, [3.0, 0.7, 0.2]), (4, 1.0, [0.6])]
    alone = objective.token_advantages(batch_of(ONE_GROUP))
    beside = objective.token_advantages(batch_of([*ONE_GROUP, *other]))
    torch.testing.assert_close(beside[: len(alone)], alone, rtol=1e-12, atol=1e-14)
    batch = batch_of([*ONE_GROUP, *other])
    order = torch.tensor([5, 8, 0, 3, 2, 7, 1, 6, 4])
    again = torch.argsort(order)
    back = dataclasses.replace(batch.select(order), advantages=objective.token_advantages(batch.select(order)))
    torch.testing.assert_close(back.select(again).advantages, beside, rtol=1e-12, atol=1e-14)
    assert not objective.advantage.across_groups


@pytest.mark.parametrize("name", ["em_rl_sequence", "em_rl_token"])
def test_em_rl_does_not_look_at_the_rewards(name: str) -> None:
    batch = batch_of(ONE_GROUP)
    objective = get_objective(name)
    for rewards in (torch.zeros(6), None):
        blind = objective.token_advantages(dataclasses.replace(batch, rewards=rewards))
        assert blind.equal(objective.token_advantages(batch))
    with pytest.raises(ValueError, match=r"groups \[1\] have one response"):
        objective.token_advantages(batch_of([*ONE_GROUP, (1, 1.0, [0.3])]))


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_shaped_rewards_need_rewards(name: str) -> None:
    with pytest.raises(ValueError, match="neither advantages nor rewards"):
        get_objective(name).token_advantages(dataclasses.replace(batch_of(ONE_GROUP), rewards=None))


@pytest.mark.parametrize("name", ["em_rl_token", "gtpo", "grpo_s"])
def test_old_entropy_that_is_missing_is_named(name: str) -> None:
    batch = dataclasses.replace(batch_of(ONE_GROUP), old_entropy=None)
    with pytest.raises(ValueError, match="old_entropy, which the batch does not have"):
        get_objective(name)(batch)
    given_advantages = dataclasses.replace(batch, advantages=torch.ones(batch.num_tokens))
    assert get_objective(name)(given_advantages).loss.isfinite()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_equal_responses_give_exactly_0(name: str, reward: float) -> None:
    """Bug 8: 8 responses alike, with entropies whose sums and shares have rounding residues."""
    responses: list[Response] = [(0, reward, [0.1] * 7) for _ in range(8)]
    assert get_objective(name).token_advantages(batch_of(responses)).eq(0).all()


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_entropies_of_0_stay_finite(name: str) -> None:
    """A token that the policy was sure of: 1/H is not infinite, and a sum of zeros divides nothing by zero."""
    for rows in ([[0.0], [0.0]], [[0.0, 1.0], [0.5]], [[1e-12, 0.0], [0.0, 0.0]]):
        for reward in (1.0, 0.0):
            responses: list[Response] = [(0, reward, row) for row in rows]
            assert get_objective(name).token_advantages(batch_of(responses)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_response_without_a_token_takes_part_in_nothing_but_its_group(name: str) -> None:
    batch = batch_of([*ONE_GROUP, (0, 1.0, []), (3, 0.0, []), (3, 1.0, [])])
    assert get_objective(name).token_advantages(batch).isfinite().all()
    assert get_objective(name)(batch).loss.isfinite()


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
@pytest.mark.parametrize("options", [{"a1": True}, {"a2": "much"}, {"advantage_epsilon": -1.0}], ids=str)
def test_options_out_of_range_are_errors(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        get_objective(name, **options)
