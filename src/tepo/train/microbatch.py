"""Filling micro-batches by a budget of tokens."""

from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], budget: int, together: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of rows, put together so that rows x longest row stays within `budget` tokens.

    Rows of similar length share a micro-batch (longest first, stable), so that little is padding. A row longer than the
    budget gets a micro-batch of its own: a response is never split.
    together: a label for each row; rows of one label are never in different micro-batches, whatever the budget.
    """
    units: dict[int, list[int]] = {}
    for i in range(len(lengths)):
        units.setdefault(i if together is None else together[i], []).append(i)
    plan: list[list[int]] = []
    longest = 0
    for unit in sorted(units.values(), key=lambda unit: -max(lengths[i] for i in unit)):
        if plan and (len(plan[-1]) + len(unit)) * longest <= budget:
            plan[-1] += unit
        else:
            plan.append(list(unit))
            longest = max(lengths[i] for i in unit)
    return plan
