"""What an equality of two objectives is: sides, condition, factor. `equalities.py` holds those that are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tepo.objectives.objective import Objective
from tepo.objectives.options import get_objective

ALWAYS = "always"
AT_OLD = "at theta_old"
EQUAL_LENGTHS = "equal lengths"
CONSTANT = "advantage constant over a response"
SAME_ADVANTAGES = "the same advantages"
NO_SILENT_GROUP = "no group of equal rewards"
AT_REFERENCE = "at the reference policy"
OLD_IS_REFERENCE = "the reference is the sampling policy"
NO_ADVANTAGE = "all advantages 0"
NO_PREFIX = "no shared prefix"
EVEN_PROCESS = "process rewards of 0.5"
TRUE_VALUES = "the same advantages, true values"
PAIRS_AT_REFERENCE = "pairs, at the reference policy"
CONDITIONS = {
    ALWAYS: "on every batch",
    AT_OLD: "on the first update of a rollout, where all ratios are 1 and all entropies what they were",
    EQUAL_LENGTHS: "where all responses are equally long (6 tokens each, where a row names the length)",
    CONSTANT: "with one advantage for each response, as group rewards give; not where it varies inside a response",
    SAME_ADVANTAGES: "once the advantages are made, which the two do differently",
    NO_SILENT_GROUP: "where no group has equal rewards",
    AT_REFERENCE: "where the policy is still the reference policy",
    OLD_IS_REFERENCE: "where the reference policy is the one that sampled, as in the first rollout",
    NO_ADVANTAGE: "where no response has an advantage",
    NO_PREFIX: "where responses share no beginning",
    EVEN_PROCESS: "where the process reward model finds every segment neither good nor bad",
    TRUE_VALUES: "once the advantages are made, with a critic whose values are the returns",
    PAIRS_AT_REFERENCE: "with the advantage 1 for the best response of a group, -1 for the worst and 0 for the others, "
    "where the policy is still the reference policy",
}
"""When an equality holds, and what that means."""

BOTH, GRADIENT = "loss and gradient", "gradient"
ONE, LENGTH, PER_LENGTH, LEAVE_ONE_OUT, MINUS_ONE, HALF_BETA = "1", "|o|", "S/N", "G/(G-1)", "-1", "beta G/2"
FACTORS = {
    ONE: "",
    LENGTH: "each response's share times its length |o|",
    PER_LENGTH: "divided by the mean length N/S",
    LEAVE_ONE_OUT: "times G/(G-1), G responses in a group",
    MINUS_ONE: "times -1",
    HALF_BETA: "times beta G/2, G responses in a group",
}
"""What the right side is multiplied with."""


@dataclass(frozen=True)
class Spec:
    """An objective by name and options; as text, each option is as YAML has it (numbers to four digits)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Objective:
        """The objective itself."""
        return get_objective(self.name, **self.options)

    def __str__(self) -> str:
        shown = ", ".join(f"{option}={as_yaml(value)}" for option, value in self.options.items())
        return f"{self.name}({shown})" if shown else self.name


@dataclass(frozen=True)
class Equality:
    """left = factor x right, in loss and gradient or in the gradient alone, under a condition.

    condition: a key of CONDITIONS. of: BOTH or GRADIENT. factor: a key of FACTORS. meaning: one sentence.
    """

    left: Spec
    right: Spec
    condition: str
    meaning: str
    of: str = BOTH
    factor: str = ONE

    def __str__(self) -> str:
        return f"{self.left} = {'' if self.factor == ONE else f'{self.factor} x '}{self.right}, {self.condition}"


def as_yaml(value: Any) -> str:
    """The value of an option as YAML has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(inner)}" for key, inner in value.items()) + "}"
    if value is None or value == math.inf:
        return "null" if value is None else ".inf"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
