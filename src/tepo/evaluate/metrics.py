"""Statistics of correct answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased chance that at least one of k responses is right, 1 - C(n-c, k)/C(n, k) (2107.03374, eq. 1).

    samples: n responses sampled, of which `correct` are right; k at most n. Exact: binomials are integers here.
    Raises ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} with {correct} of {samples} correct; 0 <= correct <= samples and 1 <= k <= samples needed"
        )
    return 1 - comb(samples - correct, k) / comb(samples, k)


def majority(votes: Sequence[Hashable | None], right: Hashable) -> float:
    """maj@k of one problem: whether the answer given most often is the right one (2203.11171).

    votes: one a response, equal for equivalent answers; None is no answer, and no vote. Of m answers given equally
    often each counts 1/m, the chance of a fair draw. Without a vote the problem is lost.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    leaders = [vote for vote, count in counts.items() if count == most]
    return 1 / len(leaders) if right in leaders else 0.0


def mean_interval(
    counts: Sequence[float], samples: int = 1, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Interval of the mean over problems of counts[i] / samples, a quantity from 0 to 1: accuracy, pass@k, maj@k.

    Where each problem is either right or wrong it is Wilson's for a proportion. Otherwise it comes from problems drawn
    with replacement (10,000 times, percentiles): the samples of one problem are not independent of each other. Where
    every problem has the same value, those draws would all be equal and say nothing of other problems: it is Wilson's
    then too, for as many trials as there are problems.
    """
    values = np.asarray(counts, dtype=np.float64) / samples
    if np.isin(values, (0.0, 1.0)).all() or values.min() == values.max():
        return _wilson(float(values.mean()), len(values), confidence)
    low, high = np.quantile(resampled_means(values, seed), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def resampled_means(values: NDArray[np.float64], seed: int = 0, draws: int = 10_000) -> NDArray[np.float64]:
    """[draws]: means over as many problems as there are, drawn with replacement."""
    generator = np.random.default_rng(seed)
    count = len(values)
    parts = [generator.integers(count, size=(size, count)) for size in _portions(draws, max(1, 2**22 // count))]
    return np.concatenate([values[part].mean(axis=1) for part in parts])


def _portions(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _wilson(share: float, trials: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a proportion, kept within [0, 1] where rounding would leave it."""
    z2 = float(stats.norm.ppf((1 + confidence) / 2)) ** 2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = sqrt(z2 * share * (1 - share) / trials + (z2 / (2 * trials)) ** 2) / (1 + z2 / trials)
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))
