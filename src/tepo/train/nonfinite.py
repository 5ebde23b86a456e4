"""Which responses make a loss or a gradient that is not a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tepo.train.sample import Sample


@dataclass(frozen=True)
class Blame:
    """One response of a step that was skipped; loss and grad_norm: of it alone, or of its pair.

    alone: it is enough by itself. Where none is, all responses of the step are blamed together.
    """

    sample: Sample
    loss: float
    grad_norm: float
    alone: bool


def blame(
    samples: Sequence[Sample], pairs: bool, measured: Callable[[Sequence[Sample]], tuple[float, float]]
) -> list[Blame]:
    """The responses that are not finite by themselves, or all of them. pairs: those of a group only count together.

    measured: samples -> their loss and the norm of its gradient.
    """
    units: dict[int, list[Sample]] = {}
    for place, sample in enumerate(samples):
        units.setdefault(sample.group if pairs else place, []).append(sample)
    found = [(unit, *measured(unit)) for unit in units.values()]
    guilty = [entry for entry in found if not (math.isfinite(entry[1]) and math.isfinite(entry[2]))]
    return [Blame(sample, loss, norm, bool(guilty)) for unit, loss, norm in guilty or found for sample in unit]
