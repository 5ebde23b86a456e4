"""Filling micro-batches by a budget of tokens."""

from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows, put together so that rows x longest row stays within `budget` tokens.

    Rows of similar length share a micro-batch (longest first, stable), so that little is padding. A row longer than the
    budget gets a micro-batch of its own: a response is never split.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    plan: list[list[int]] = []
    for i in order:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= budget:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan
