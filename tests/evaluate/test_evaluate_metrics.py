"""pass@k and the interval of an accuracy."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from tepo.evaluate import majority, mean_interval, pass_at_k


@pytest.mark.parametrize(
    ("samples", "correct", "k", "value"),
    [(4, 1, 2, 0.5), (16, 3, 8, 0.9), (32, 1, 8, 0.25), (256, 2, 64, 0.438235)],
)
def test_pass_at_k_has_the_numbers_of_the_specification(samples: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(value, abs=5e-7)


def test_pass_at_k_is_the_share_of_all_subsets() -> None:
    """Bug 15: subsets are drawn without replacement."""
    for samples in range(1, 8):
        for correct in range(samples + 1):
            right = [i < correct for i in range(samples)]
            for k in range(1, samples + 1):
                subsets = list(combinations(right, k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_at_its_ends() -> None:
    assert pass_at_k(10, 0, 10) == 0
    assert pass_at_k(10, 10, 1) == 1
    assert pass_at_k(10, 1, 10) == 1
    assert pass_at_k(7, 3, 1) == pytest.approx(3 / 7)
    assert 0 < pass_at_k(100_000, 1, 1) < 2e-5


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} with {correct} of {samples} correct"):
        pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, Wilson score, and R's prop.test(correct = FALSE)
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_one_sample_a_problem_gives_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    interval = mean_interval([1] * right + [0] * (count - right), 1)
    assert interval == pytest.approx((low, high), abs=5e-5)


def test_the_interval_contains_the_mean_and_shrinks_with_more_problems() -> None:
    rng = np.random.default_rng(0)
    for samples in (1, 4):
        widths = []
        for problems in (10, 100, 1000):
            correct = rng.binomial(samples, rng.beta(1, 1, problems)).tolist()
            low, high = mean_interval(correct, samples)
            assert 0 <= low <= sum(correct) / (samples * problems) <= high <= 1
            widths.append(high - low)
        assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_more_confidence_is_a_wider_interval() -> None:
    correct = [0, 4, 2, 3, 1, 0, 0, 4, 4, 2]
    narrow, wide = mean_interval(correct, 4, confidence=0.8), mean_interval(correct, 4, confidence=0.99)
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


def test_samples_of_one_problem_are_not_counted_as_independent() -> None:
    """Problems that are either always or never solved: 8 samples of each tell no more than one."""
    always_or_never = [8] * 20 + [0] * 20
    low, high = mean_interval(always_or_never, 8)
    one_low, one_high = mean_interval([1] * 20 + [0] * 20, 1)
    assert high - low == pytest.approx(one_high - one_low, rel=0.1)


@pytest.mark.parametrize("samples", [1, 8])
def test_all_right_or_all_wrong_is_not_certainty(samples: int) -> None:
    """Problems drawn with replacement would all be alike; 20 of 20 still leave 16 % for what was not seen."""
    assert mean_interval([samples] * 20, samples) == pytest.approx((0.8389, 1.0), abs=5e-5)
    assert mean_interval([0] * 20, samples) == pytest.approx((0.0, 0.1611), abs=5e-5)
    low, high = mean_interval([samples], samples)
    assert low < 0.3
    assert high == 1


def test_the_interval_of_equal_rates_is_not_empty() -> None:
    low, high = mean_interval([2, 2, 2], 4)
    assert low < 0.2 < 0.8 < high


def test_the_interval_is_the_same_every_time() -> None:
    correct = [0, 1, 3, 2, 4, 4, 0]
    assert mean_interval(correct, 4) == mean_interval(correct, 4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """60 problems whose difficulty varies, 4 samples: of 25 intervals 24 are expected to hold it."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(25):
        correct = rng.binomial(4, rng.beta(1, 2, 60)).tolist()
        low, high = mean_interval(correct, 4)
        hits += low <= 1 / 3 <= high
    assert hits >= 21


def test_the_mean_of_pass_at_k_is_that_over_all_subsets_of_all_problems() -> None:
    """Every way in which 5 responses can be right, at every k."""
    for pattern in product([False, True], repeat=5):
        for k in range(1, 6):
            subsets = list(combinations(pattern, k))
            assert pass_at_k(5, sum(pattern), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_majority_is_the_most_frequent_answer_with_a_fair_draw_among_equals() -> None:
    """Every way in which 5 responses can vote, against counting by hand."""
    for votes in product(["right", "a", "b", None], repeat=5):
        counts = {name: votes.count(name) for name in ("right", "a", "b")}
        most = max(counts.values())
        equals = sum(count == most for count in counts.values())
        expected = 1 / equals if most and counts["right"] == most else 0
        assert majority(votes, "right") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        (["r", "r", "a", "b"], 1.0),
        (["r", "r", "a", "a"], 0.5),
        (["r", "a", "b"], 1 / 3),
        (["a", "a", "r"], 0.0),
        ([None, None, "r"], 1.0),
        ([None, None], 0.0),
        ([], 0.0),
    ],
)
def test_majority_by_hand(votes: list[str | None], value: float) -> None:
    assert majority(votes, "r") == pytest.approx(value)
