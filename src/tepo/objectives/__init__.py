"""Policy objectives: tensors in, a loss out. Open `table.py` to see them all; needs torch alone."""

from tepo.objectives.advantages import CenteredAdvantage, StandardizedAdvantage
from tepo.objectives.batch import TokenBatch, Totals
from tepo.objectives.objective import Objective, ObjectiveOutput, combine_metrics
from tepo.objectives.options import at_rollout, get_objective, list_objectives
from tepo.objectives.terms import EntropyBonus, KLMask, ReferenceKL

__all__ = [
    "CenteredAdvantage",
    "EntropyBonus",
    "KLMask",
    "Objective",
    "ObjectiveOutput",
    "ReferenceKL",
    "StandardizedAdvantage",
    "TokenBatch",
    "Totals",
    "at_rollout",
    "combine_metrics",
    "get_objective",
    "list_objectives",
]
