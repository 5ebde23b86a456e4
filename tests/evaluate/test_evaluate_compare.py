"""Whether one evaluation is better than another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import model_folder
from rich.console import Console
from scipy import stats

from tepo.errors import TepoError
from tepo.evaluate.command import evaluate_model
from tepo.evaluate.compare import compare_evaluations, compare_rates, compare_responses


def rows(counts: Sequence[int], samples: int, *, data: str = "d", first: int = 0) -> list[dict[str, Any]]:
    """Responses to problems of which counts[i] of `samples` are right."""
    return [
        {
            "data": data,
            "kind": "sampled",
            "id": f"p{first + i}",
            "answer": "1",
            "status": "correct" if j < right else "wrong",
        }
        for i, right in enumerate(counts)
        for j in range(samples)
    ]


def test_mcnemar_is_the_exact_binomial_test_on_the_problems_that_differ() -> None:
    """Agresti's table 10.1 turned over to small numbers: 12 against 3 of 40."""
    before = [0] * 12 + [1] * 3 + [1] * 10 + [0] * 15
    after = [1] * 12 + [0] * 3 + [1] * 10 + [0] * 15
    _, p_value, test = compare_rates(before, after)
    assert test == "McNemar, exact"
    assert p_value == pytest.approx(2 * sum(stats.binom.pmf(k, 15, 0.5) for k in range(4)))
    (found,) = compare_responses(rows(before, 1), rows(after, 1))
    assert (found.better, found.worse, found.verdict) == (12, 3, "B is better")
    assert found.difference == pytest.approx(9 / 40)
    assert found.interval[0] < 9 / 40 < found.interval[1]
    (turned,) = compare_responses(rows(after, 1), rows(before, 1))
    assert turned.verdict == "A is better"
    assert turned.p_value == found.p_value


def test_equal_evaluations_do_not_differ() -> None:
    for samples in (1, 4):
        (found,) = compare_responses(rows([1, 0, 1], samples), rows([1, 0, 1], samples))
        assert (found.p_value, found.interval, found.verdict) == (1.0, (0.0, 0.0), "no difference shown")


def test_sign_permutation_over_few_problems_is_exact() -> None:
    """Six problems, all better by different amounts: 2 of the 64 assignments of signs are as far from 0."""
    _, p_value, test = compare_rates([0.0] * 6, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert test == "sign permutation"
    assert p_value == pytest.approx(2 / 64)


def test_errors_of_the_first_kind_are_about_as_many_as_stated() -> None:
    """Two runs of one model on 40 problems: of 60 comparisons 3 are expected to find a difference."""
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(60):
        difficulty = rng.beta(1, 1, 40)
        before, after = (rng.binomial(4, difficulty) / 4 for _ in range(2))
        found += compare_rates(before.tolist(), after.tolist())[1] < 0.05
    assert found <= 9


def test_only_what_both_have_is_compared() -> None:
    (found,) = compare_responses(rows([1] * 5, 1), rows([0] * 5, 1, first=2))
    assert (found.problems, found.unmatched) == (3, 4)
    with pytest.raises(TepoError, match=r"nothing to compare: A has d \(sampled\), B has e \(sampled\)"):
        compare_responses(rows([1], 1), rows([1], 1, data="e"))
    other_gold = [{**row, "answer": "2"} for row in rows([1], 1)]
    with pytest.raises(TepoError, match="nothing to compare"):
        compare_responses(rows([1], 1), other_gold)


def test_two_folders(tmp_path: Path) -> None:
    options = ["data.test_problems=8", "data.options.digits=1", "rollout.max_response_tokens=8", "reward.workers=1"]
    quiet = Console(quiet=True)
    model = str(model_folder(tmp_path / "model"))
    for name in ("a", "b"):
        seed = "seed=0" if name == "a" else "evaluation.samples=2"
        evaluate_model(model, overrides=[*options, seed], output=tmp_path / name, console=quiet)
    found = compare_evaluations(tmp_path / "a", tmp_path / "b", quiet)
    assert [row["kind"] for row in found] == ["sampled", "greedy"]
    assert found[1]["difference"] == 0
    with pytest.raises(TepoError, match="no finished evaluation"):
        compare_evaluations(tmp_path / "a", tmp_path / "model", quiet)
