"""Filling micro-batches by a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tepo.policy import Row


def plan_microbatches(
    rows: Sequence[Row], budget: int, together: Sequence[int] | None = None, *, padded: bool = False
) -> list[list[int]]:
    """Indices of rows, put together so that what a forward pass holds stays within `budget` tokens.

    It holds each prompt once and its responses; if padded, rows x longest row. The largest come first, each into the
    first micro-batch with room. Responses to one prompt stay together as far as the budget allows; what is longer than
    it by itself gets a micro-batch of its own: a response is never split.
    together: a label for each row; rows of one label are never in different micro-batches, whatever the budget.
    """

    def tokens(part: Sequence[int]) -> int:
        if padded:
            return len(part) * max(len(rows[i]) for i in part)
        prompts = {tuple(rows[i].prompt) for i in part}
        return sum(map(len, prompts)) + sum(len(rows[i].response) for i in part)

    everything = list(range(len(rows)))
    if together is not None:
        units = _by(everything, lambda i: together[i])
    elif padded:
        units = [[i] for i in everything]
    else:
        groups = _by(everything, lambda i: tuple(rows[i].prompt))
        units = [part for group in groups for part in _first_fit([[i] for i in group], budget, tokens)]
    return _first_fit(units, budget, tokens)


def _by(indices: Sequence[int], label: Callable[[int], object]) -> list[list[int]]:
    """Indices with equal labels together, in the order in which the labels first come."""
    groups: dict[object, list[int]] = {}
    for i in indices:
        groups.setdefault(label(i), []).append(i)
    return list(groups.values())


def _first_fit(units: Sequence[list[int]], budget: int, tokens: Callable[[Sequence[int]], int]) -> list[list[int]]:
    plan: list[list[int]] = []
    for unit in sorted(units, key=lambda unit: -tokens(unit)):
        place = next((part for part in plan if tokens(part + unit) <= budget), None)
        if place is None:
            plan.append(list(unit))
        else:
            place += unit
    return plan
