"""What few seeds can say: means with intervals, paired differences, and a correction for looking at many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
SIGNIFICANT = 1 - CONFIDENCE

Interval = tuple[float, float]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds. interval: 95 %, by Student's t; None for a single seed, of which nothing can be said."""

    mean: float
    interval: Interval | None
    count: int


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """The mean of one value a seed. Student's interval: a bootstrap of five values is far too short."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Mean(mean, None, count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Mean(mean, (mean - half, mean + half), count)


@dataclass(frozen=True)
class Difference:
    """Of pairs of runs with one seed: mean and 95 % interval of the second less the first, p of no difference.

    adjusted: p corrected for the number of differences that are looked at (Holm). p is None for a single pair.
    """

    mean: Mean
    p: float | None
    adjusted: float | None = None


def paired_difference(baseline: Sequence[float], other: Sequence[float]) -> Difference:
    """A paired t-test: two runs with one seed share problems, order and held-out set, so they differ by less noise.

    With n pairs a permutation of signs has no p below 2^(1-n) (0.0625 for five seeds) and could never show anything
    there. Where all differences are equal the t-test would say p = 0; then the permutation's least p is taken.
    """
    differences = np.asarray(other, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    mean = mean_over_seeds(differences.tolist())
    count = len(differences)
    if count < 2:
        return Difference(mean, None)
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())):
        return Difference(mean, 2.0 ** (1 - count) if abs(mean.mean) > 1e-12 else 1.0)
    return Difference(mean, float(stats.ttest_1samp(differences, 0.0).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance of any false finding among all stays below each.

    The k-th smallest of m is multiplied by m - k + 1, and none may be smaller than one before it.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Reached:
    """How long runs took to get somewhere, when some did not. reached of count did.

    restricted: mean of the smaller of that time and the horizon, which is where the others are censored. It is a mean
    of all runs and does not reward a method for losing the slow ones; it is a lower bound of the mean time.
    """

    reached: int
    count: int
    restricted: Mean


def restricted_mean(times: Sequence[float | None], horizons: Sequence[float]) -> Reached:
    """times: of each run, None where it did not get there by its horizon."""
    held = [horizon if time is None else min(time, horizon) for time, horizon in zip(times, horizons, strict=True)]
    return Reached(sum(time is not None for time in times), len(times), mean_over_seeds(held))
