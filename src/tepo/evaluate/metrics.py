"""Statistics of correct answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import numpy as np
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


def mean_interval(correct: Sequence[int], samples: int, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean accuracy over problems, each answered `samples` times with correct[i] right answers.

    With one sample a problem it is Wilson's for a proportion. With more it comes from problems drawn with replacement
    (10,000 times, percentiles): the samples of one problem are not independent of each other. Where every problem has
    the same rate, those draws would all be equal and say nothing of other problems: it is Wilson's then too, for as
    many trials as there are problems.
    """
    rates = np.asarray(correct) / samples
    if samples == 1 or rates.min() == rates.max():
        return _wilson(float(rates.mean()), len(rates), confidence)
    generator = np.random.default_rng(seed)
    means = np.array([generator.choice(rates, len(rates)).mean() for _ in range(10_000)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _wilson(share: float, trials: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a proportion, kept within [0, 1] where rounding would leave it."""
    z2 = float(stats.norm.ppf((1 + confidence) / 2)) ** 2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = sqrt(z2 * share * (1 - share) / trials + (z2 / (2 * trials)) ** 2) / (1 + z2 / trials)
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))
