"""Is one evaluation better than another? Answered problem by problem, on the problems that both have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from tepo.errors import TepoError
from tepo.evaluate.metrics import resampled_means
from tepo.evaluate.saved import read_responses
from tepo.evaluate.table import percent
from tepo.rewards.verdict import Status

SIGNIFICANT = 0.05
Rates = dict[tuple[str, str], dict[str, tuple[float, int]]]
"""By data set and kind: of each problem (its id and gold) the share of right responses, and their number."""


@dataclass(frozen=True)
class Comparison:
    """Two evaluations A and B of the same problems.

    difference: mean of B less A over the problems, with a 95 % interval. better, worse: problems where B's share of
    right responses is the larger, the smaller. p_value: two-sided, of no difference; test: how it was found.
    unmatched: problems that only one of the two has.
    """

    data: str
    kind: str
    problems: int
    unmatched: int
    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    better: int
    worse: int
    p_value: float
    test: str

    @property
    def verdict(self) -> str:
        if self.p_value >= SIGNIFICANT:
            return "no difference shown"
        return "B is better" if self.difference > 0 else "A is better"


def compare_rates(first: Sequence[float], second: Sequence[float]) -> tuple[tuple[float, float], float, str]:
    """95 % interval of the mean of second - first over paired problems, p-value of no difference, and the test's name.

    Where each problem is right or wrong, McNemar's exact test: a binomial test on the problems that differ. Otherwise a
    paired test by permutation of signs. The interval is the percentiles of 10,000 means of resampled problems.
    """
    before, after = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    differences = after - before
    means = resampled_means(differences)
    low, high = np.quantile(means, [0.025, 0.975])
    interval = (float(low), float(high))
    if np.isin([before, after], (0.0, 1.0)).all():
        won, lost = int((differences > 0).sum()), int((differences < 0).sum())
        p_value = float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0
        return interval, p_value, "McNemar, exact"
    if not differences.any() or len(differences) < 2:
        return interval, 1.0, "sign permutation"
    found = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=9999, rng=np.random.default_rng(0), axis=-1
    )
    return interval, float(found.pvalue), "sign permutation"


def compare_responses(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], names: tuple[str, str] = ("A", "B")
) -> list[Comparison]:
    """One comparison for each data set and kind that both have. Raises TepoError when there is none."""
    left, right = _rates(first), _rates(second)
    out = []
    for key in left:
        ids = [problem for problem in left[key] if problem in right.get(key, {})]
        if not ids:
            continue
        before, after = ([side[key][problem][0] for problem in ids] for side in (left, right))
        interval, p_value, test = compare_rates(before, after)
        pairs = list(zip(before, after, strict=True))
        mean = (sum(before) / len(ids), sum(after) / len(ids))
        out.append(
            Comparison(
                *key,
                problems=len(ids),
                unmatched=len(left[key]) + len(right[key]) - 2 * len(ids),
                first=mean[0],
                second=mean[1],
                difference=mean[1] - mean[0],
                interval=interval,
                better=sum(b > a for a, b in pairs),
                worse=sum(b < a for a, b in pairs),
                p_value=p_value,
                test=test,
            )
        )
    if not out:
        shown = [", ".join(f"{data} ({kind})" for data, kind in side) or "nothing" for side in (left, right)]
        raise TepoError(
            f"nothing to compare: {names[0]} has {shown[0]}, {names[1]} has {shown[1]}; they must have a data set, a "
            f"way of sampling and problems in common"
        )
    return out


def _rates(responses: Sequence[Mapping[str, Any]]) -> Rates:
    counts: dict[tuple[str, str], dict[str, list[bool]]] = {}
    for row in responses:
        # The gold is part of the name: another gold is another problem.
        problem = f"{row['id']} {row['answer']}"
        counts.setdefault((row["data"], row["kind"]), {}).setdefault(problem, []).append(
            row["status"] == Status.CORRECT
        )
    return {
        key: {problem: (sum(right) / len(right), len(right)) for problem, right in problems.items()}
        for key, problems in counts.items()
    }


def compare_evaluations(first: Path, second: Path, console: Console | None = None) -> list[dict[str, Any]]:
    """Compare two folders of `tepo eval`, print a table, and return its rows as plain values.

    Raises TepoError for a folder without a finished evaluation, or when nothing is in both.
    """
    found = compare_responses(read_responses(first), read_responses(second), (str(first), str(second)))
    table = Table(title=f"A: {first}\nB: {second}", title_justify="left")
    table.add_column("")
    for row in found:
        table.add_column(f"{row.data}, {row.kind}")
    lines: dict[str, Callable[[Comparison], str]] = {
        "problems": lambda row: f"{row.problems}" + (f" ({row.unmatched} in one only)" if row.unmatched else ""),
        "A": lambda row: percent(row.first),
        "B": lambda row: percent(row.second),
        "B - A, 95 % interval": lambda row: percent(row.difference, row.interval),
        "B better, worse": lambda row: f"{row.better}, {row.worse}",
        "p of no difference": lambda row: f"{row.p_value:.3g} ({row.test})",
        "verdict": lambda row: row.verdict,
    }
    for label, shown in lines.items():
        table.add_row(label, *map(shown, found))
    (console or Console()).print(table)
    return [asdict(row) | {"verdict": row.verdict} for row in found]
