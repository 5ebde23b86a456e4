"""The statistics of a comparison, against independent computations."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import integrate, stats

from tepo.errors import TepoError
from tepo.report.compare.outcome import Outcome
from tepo.report.compare.statistics import holm, mean_over_seeds, paired_difference, restricted_mean
from tepo.report.compare.summary import summarize
from tepo.report.compare.tables import Grid, grids, notes


def test_the_interval_of_a_mean_is_students() -> None:
    """Against scipy's own t interval; of one value nothing is said."""
    values = [0.91, 0.95, 0.89, 0.97, 0.93]
    found = mean_over_seeds(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found.interval == pytest.approx((low, high))
    assert mean_over_seeds([0.5]).interval is None


def test_intervals_cover_as_often_as_they_say() -> None:
    """Five seeds at a time, 4,000 times: 95 % of the intervals hold the true mean."""
    generator = np.random.default_rng(0)
    drawn = generator.normal(0.9, 0.02, size=(4000, 5))
    held = [found.interval[0] <= 0.9 <= found.interval[1] for row in drawn if (found := mean_over_seeds(row)).interval]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)


def test_pairs_are_compared_by_their_differences() -> None:
    first, second = [0.80, 0.90, 0.85, 0.95], [0.82, 0.93, 0.86, 0.97]
    found = paired_difference(first, second)
    assert found.p == pytest.approx(stats.ttest_rel(second, first).pvalue)
    assert found.p is not None
    assert found.p < 0.05 < stats.ttest_ind(second, first).pvalue  # seeds differ by more than objectives do
    assert found.mean.mean == pytest.approx(0.02)
    assert paired_difference([0.5], [0.6]).p is None
    assert paired_difference([0.5, 0.6], [0.5, 0.6]).p == 1.0
    # Equal differences: no p of 0 from a variance of 0.
    assert paired_difference([0.5, 0.6, 0.7], [0.6, 0.7, 0.8]).p == pytest.approx(2 / 2**3)


def test_holm_is_its_definition() -> None:
    """Values as statsmodels 0.15's multipletests(method="holm") gives them."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.001, 0.9]) == pytest.approx([1.0, 0.003, 1.0])
    assert holm([]) == []


def test_holm_keeps_false_findings_rare() -> None:
    """Four comparisons of things that are alike, five seeds each: one of them is 'found' in about 5 % of the cases."""
    generator = np.random.default_rng(1)
    p_values = stats.ttest_1samp(generator.normal(size=(2000, 4, 5)), 0, axis=-1).pvalue
    found = np.mean([min(holm(row.tolist())) < 0.05 for row in p_values])
    assert 0.035 < found < 0.06


def test_a_restricted_mean_is_the_area_under_the_survival_curve() -> None:
    """Against scipy's Kaplan-Meier estimate, integrated up to the horizon."""
    times, horizon = [40.0, None, 80.0, 60.0, None], 120.0
    found = restricted_mean(times, [horizon] * 5)
    data = stats.CensoredData.right_censored([t or horizon for t in times], [t is None for t in times])
    survival = stats.ecdf(data).sf
    area, _ = integrate.quad(lambda t: float(survival.evaluate(t)), 0, horizon, points=[40, 60, 80], limit=200)
    assert (found.reached, found.count) == (3, 5)
    assert found.restricted.mean == pytest.approx(area)


def outcome(objective: str, seed: int, accuracies: list[float], **changes: object) -> Outcome:
    steps = tuple(range(0, 10 * len(accuracies), 10))
    last = steps[-1]
    empty: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    made = Outcome(
        "task", objective, seed, last, (steps, tuple(accuracies)), empty, empty, (0.5,) * last, False, None, "machine"
    )
    return dataclasses.replace(made, **changes)


RUNS = [
    outcome("old", 0, [0.4, 0.7, 0.80]),
    outcome("old", 1, [0.4, 0.6, 0.70]),
    outcome("old", 2, [0.4, 0.6, 0.75]),
    outcome("new", 0, [0.4, 0.8, 0.90]),
    outcome("new", 1, [0.4, 0.7, 0.81]),
    outcome("new", 2, [0.4, 0.7, 0.84]),
    outcome("bad", 0, [0.4, 0.7, 0.10], collapsed=True),
    outcome("bad", 1, [0.4, 0.6, 0.70]),
]


def test_a_summary_of_known_runs() -> None:
    found = summarize(RUNS, "old", None, failed=[("task", "bad", 2)])
    task = found.tasks[0]
    assert task.threshold == pytest.approx(0.4 + 0.9 * (0.75 - 0.4))
    old, new, bad = task.rows
    assert old.verdict == "baseline"
    assert new.verdict == "better"
    assert new.difference is not None
    assert new.difference.mean.mean == pytest.approx(0.1)
    assert new.difference.adjusted == pytest.approx(2 * (new.difference.p or math.nan))
    assert (new.steps.reached, new.steps.restricted.mean) == (3, pytest.approx(50 / 3))
    assert (old.steps.reached, old.steps.count) == (2, 3)
    assert old.steps.restricted.mean == pytest.approx((20 + 20 + 20) / 3)
    assert new.seconds.restricted.mean == pytest.approx(25 / 3)
    assert bad.verdict == "no difference shown"
    assert (bad.worst, bad.collapsed, bad.missing) == ((0, 0.10), (0,), (2,))
    assert found.comparisons == 2
    text = "\n".join(grid.markdown() for grid in grids(found))
    assert "| bad | 10.0 (seed 0) | 1 of 2 (seed 0) | 1 of 3 (seed 2) |" in text
    assert "+10.0 [" in text
    assert "2 of 3 | ≥ 20" in text
    assert "all 2 differences" in " ".join(notes(found))


def test_a_threshold_that_nothing_reaches_is_censored_and_says_so() -> None:
    text = grids(summarize(RUNS, "old", 0.99))[1].markdown()
    assert "| new | 0 of 3 | > 20 | > 10 |" in text


def test_several_tasks_are_corrected_together_and_have_a_table_of_all() -> None:
    runs = RUNS[:6] + [dataclasses.replace(run, task="other", curve=run.curve) for run in RUNS[:6]]
    found = summarize(runs, "old", None)
    assert found.comparisons == 2
    assert grids(found)[0].header == ("objective", "task", "other", "mean of the tasks")
    assert grids(found)[0].rows[1][-1] == "85.0"


def test_a_missing_baseline_is_an_error() -> None:
    with pytest.raises(TepoError, match="no finished run of it on task"):
        summarize(RUNS, "grpo", None)


def test_cells_cannot_break_out_of_their_table() -> None:
    """Labels hold paths and settings: markup, pipes and what LaTeX takes for commands."""
    grid = Grid("a & b", ("name", "x"), ((r"[red]a|b_c\input{x}", "−1 %"),))
    assert r"| [red]a\|b_c\input{x} | −1 % |" in grid.markdown()
    assert r"{[}" not in grid.latex()
    assert r"[red]a|b\_c\textbackslash{}input\{x\} & $-$1 \% \\" in grid.latex()
    assert "a \\& b" in grid.latex()
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    console.print(grid.rich())
    assert "[red]a|b_c" in console.file.getvalue()  # type: ignore[attr-defined]
