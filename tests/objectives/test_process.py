"""Credit from process and structure: PRPO's segments, SKPO's shared prefixes, by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import definition_advantages
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.segments import SegmentAdvantage

# PRPO


@pytest.mark.parametrize(
    ("cuts", "gap", "entropy", "starts"),
    [
        (1, 2, [0.1, 0.2, 0.3, 0.9, 0.2], [0, 3]),
        (2, 2, [0.1, 0.2, 0.8, 0.9, 0.2, 0.3], [0, 3, 5]),  # 2 is too near to 3, which is higher
        (5, 2, [0.1, 0.9, 0.2, 0.1], [0, 2]),  # 1 is too near to the start
        (5, 3, [0.5] * 8, [0, 3, 6]),  # of equal ones the first
        (2, 1, [0.5] * 8, [0, 1, 2]),  # no more than `cuts`
        (0, 1, [0.1, 0.9], [0]),
        (5, 1, [0.7, 0.1], [0, 1]),  # the start itself is no cut
        (5, 10, [0.1] * 10, [0]),
        (5, 10, [0.1] * 11, [0, 10]),
        (5, 10, [], [0]),
    ],
)
def test_segments_start_where_the_entropy_is_highest(
    cuts: int, gap: int, entropy: list[float], starts: list[int]
) -> None:
    assert SegmentAdvantage(cuts, gap).segments(torch.tensor(entropy)) == starts


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    entropy=st.lists(st.floats(0, 3, width=32), min_size=1, max_size=40), cuts=st.integers(0, 6), gap=st.integers(1, 12)
)
def test_segments_are_apart_few_and_cut_where_nothing_higher_was_possible(
    entropy: list[float], cuts: int, gap: int
) -> None:
    starts = SegmentAdvantage(cuts, gap).segments(torch.tensor(entropy))
    assert starts[0] == 0
    assert len(starts) <= cuts + 1
    assert all(later - start >= gap for start, later in itertools.pairwise(starts))
    free = [i for i in range(len(entropy)) if all(abs(i - start) >= gap for start in starts)]
    assert len(starts) == cuts + 1 or not free
    lowest = min((entropy[start] for start in starts[1:]), default=math.inf)
    assert all(entropy[i] <= lowest for i in free)


def batch_of(rewards: list[float], rows: list[list[float]], **fields: list[list[float]]) -> TokenBatch:
    """A flat batch of one group, rows of process rewards and other fields."""

    def flat(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([value for row in values for value in row], dtype=torch.float64)

    return TokenBatch(
        logp=-flat(rows).abs() - 1,
        old_logp=-flat(rows).abs() - 1,
        sequence=torch.tensor([i for i, row in enumerate(rows) for _ in row]),
        group=torch.zeros(len(rows), dtype=torch.long),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        ref_logp=-flat(rows).abs() - 1,
        process_reward=flat(rows),
        **{name: flat(values).bool() if name == "shared" else flat(values) for name, values in fields.items()},  # type: ignore[arg-type]
    )


def test_advantages_of_segments() -> None:
    """sqrt(1/24) = .204124: a process reward of 1 is worth 2.449490 at its tokens; outcomes 1 and -1 are worth +-1."""
    rewards, rows = [1.0, -1.0], [[1.0, 1.0, 0.5], [0.25, 0.0]]
    made = get_objective("prpo").token_advantages(batch_of(rewards, rows))
    assert made.tolist() == pytest.approx([3.449490, 3.449490, 1.0, -2.224745, -3.449490], abs=1e-6)
    assert made.tolist() == pytest.approx(
        [a for row in definition_advantages.prpo(rewards, rows) for a in row], rel=1e-12
    )


def test_equal_outcomes_leave_the_process_alone() -> None:
    made = get_objective("prpo").token_advantages(batch_of([0.1, 0.1], [[0.5, 1.0], [0.5]]))
    assert made[[0, 2]].eq(0).all()
    assert made[1].item() == pytest.approx(math.sqrt(6), rel=1e-12)


def test_prpo_names_what_is_missing() -> None:
    batch = dataclasses.replace(batch_of([1.0, 0.0], [[0.5], [0.5]]), process_reward=None)
    with pytest.raises(ValueError, match="reads rewards and process_reward"):
        get_objective("prpo").token_advantages(batch)


@pytest.mark.parametrize(
    ("option", "value"), [("cuts", -1), ("cuts", 1.5), ("cuts", True), ("gap", 0), ("gap", 2.0), ("gap", None)]
)
def test_cuts_and_gap_are_whole_numbers(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}"):
        get_objective("prpo", **{option: value})


# SKPO

ROWS = [[0.0] * 2, [0.0] * 3, [0.0], [0.0] * 2]
SHARED = [[1.0] * 2, [0.0] * 3, [0.0], [0.0] * 2]
BASELINE = [[0.25] * len(row) for row in ROWS]


@pytest.mark.parametrize("own", [0.0, 7.0, -100.0])
def test_a_prefix_gets_the_mean_of_its_responses_less_the_baseline(own: float) -> None:
    """1, 0, 0: mean 1/3, deviation .577350. What the row of the prefix has for a reward is of no account."""
    made = get_objective("skpo").token_advantages(
        batch_of([own, 1.0, 0.0, 0.0], ROWS, shared=SHARED, baseline=BASELINE)
    )
    high, low = 2 / 3 / (math.sqrt(1 / 3) + 1e-6), -1 / 3 / (math.sqrt(1 / 3) + 1e-6)
    assert made.tolist() == pytest.approx([1 / 3 - 0.25] * 2 + [high] * 3 + [low] * 3, rel=1e-12)


def test_a_prefix_may_stand_before_one_of_its_responses() -> None:
    """Then that row is a response, and its reward counts: 1, 0, 0 as above."""
    rows, baseline = [[0.0] * 5, [0.0], [0.0] * 2], [[0.25] * 5, [0.25], [0.25] * 2]
    shared = [[1.0, 1.0, 0.0, 0.0, 0.0], [0.0], [0.0] * 2]
    made = get_objective("skpo").token_advantages(batch_of([1.0, 0.0, 0.0], rows, shared=shared, baseline=baseline))
    alone = batch_of([7.0, 1.0, 0.0, 0.0], ROWS, shared=SHARED, baseline=BASELINE)
    assert made.equal(get_objective("skpo").token_advantages(alone))


def test_a_response_without_a_token_is_a_response_still() -> None:
    """Cut off right after the prefix: 1, 0 and 0, of which the last has no token."""
    rows, shared, baseline = [*ROWS[:3], []], [*SHARED[:3], []], [*BASELINE[:3], []]
    made = get_objective("skpo").token_advantages(
        batch_of([9.0, 1.0, 0.0, 0.0], rows, shared=shared, baseline=baseline)
    )
    assert made[:2].tolist() == pytest.approx([1 / 3 - 0.25] * 2, rel=1e-12)


def test_groups_have_prefixes_of_their_own_and_may_have_none() -> None:
    rows = [*ROWS, [0.0], [0.0], [0.0] * 2, [0.0], [0.0]]
    shared = [*SHARED, [0.0], [0.0], [1.0] * 2, [0.0], [0.0]]
    baseline = [*BASELINE, [0.9], [0.9], [-1.0] * 2, [-1.0], [-1.0]]
    batch = batch_of([5.0, 1.0, 0.0, 0.0, 1.0, 0.0, 5.0, 1.0, 1.0], rows, shared=shared, baseline=baseline)
    batch = dataclasses.replace(batch, group=torch.tensor([7, 7, 7, 7, 2, 2, 3, 3, 3]))
    made = get_objective("skpo").token_advantages(batch)
    one = get_objective("skpo").token_advantages(batch.select(torch.arange(4)))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert made[:8].equal(one)
    assert made[8:].tolist() == pytest.approx([half, -half, 2.0, 2.0, 0.0, 0.0], rel=1e-12)
    assert made[-2:].eq(0).all()


def test_a_prefix_without_a_response_is_refused() -> None:
    batch = batch_of([0.0, 1.0, 0.0, 0.0], ROWS, shared=SHARED, baseline=BASELINE)
    batch = dataclasses.replace(batch, group=torch.tensor([4, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"groups \[4\] have a shared prefix and no response"):
        get_objective("skpo").token_advantages(batch)


@pytest.mark.parametrize("missing", ["rewards", "shared", "baseline"])
def test_skpo_names_what_it_reads(missing: str) -> None:
    batch = batch_of([0.0, 1.0, 0.0, 0.0], ROWS, shared=SHARED, baseline=BASELINE)
    absent: dict[str, Any] = {missing: None}
    with pytest.raises(ValueError, match="reads rewards, shared and baseline"):
        get_objective("skpo").advantage.per_token(dataclasses.replace(batch, **absent))


def test_prefix_is_clipped_as_ppo_and_the_rest_weighed_as_cispo() -> None:
    """Two tokens of prefix and three after it, all with the ratio 1.5, advantages 2 and 2; and 1/2 of each level."""
    batch = batch_of([0.0, 1.0], [[0.0] * 2, [0.0] * 3], shared=[[1.0] * 2, [0.0] * 3])
    logp = (batch.old_logp + math.log(1.5)).requires_grad_()
    batch = dataclasses.replace(batch, logp=logp, advantages=torch.full((5,), 2.0, dtype=torch.float64))
    out = get_objective("skpo")(batch)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    after = 1.28 * 2 * logp[2].item()
    assert out.loss.item() == pytest.approx(-(0.5 * 1.2 * 2 + 0.5 * after), rel=1e-12)
    assert gradient.tolist() == pytest.approx([0.0, 0.0] + [-0.5 / 3 * 1.28 * 2] * 3, rel=1e-12)
    assert out.tokens["clipped"].all()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_prefix_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="prefix_share is"):
        get_objective("skpo", prefix_share=share)
