"""Both sides of a row on the same step, and how far apart they are."""

from __future__ import annotations

import math

import torch
from differential_cases import AdvantageCase, Case
from foreign import Loss, Step, random_step, window
from torch import Tensor

from tepo.objectives import Objective, get_objective

DRIFTS = (1e-3, 0.2, 0.8)
"""Small enough for the narrow clips to let something through, up to large enough for the dual clip to bite."""

SEEDS = range(4)

Result = tuple[float, Tensor]
"""Loss, and the gradient in logp, entropy and values: [3, S, T]."""


def gradients(step: Step) -> Tensor:
    """[3, S, T] that backward left in logp, entropy and values, which are cleared."""
    leaves = (step.logp, step.entropy, step.values)
    found = torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    for leaf in leaves:
        leaf.grad = None
    return found


def parts(step: Step, number: int) -> list[Step]:
    """Equal numbers of responses, unequal numbers of tokens."""
    size = len(step.mask) // number
    return [step.rows(slice(i * size, (i + 1) * size)) for i in range(number)]


def our_result(objective: Objective, step: Step, number: int = 1) -> Result:
    """Loss and gradient, accumulated over parts of the step."""
    batch = objective.prepare(step.batch())
    totals = objective.totals(batch)
    losses = [objective(batch.select(rows), totals).loss for rows in torch.arange(len(step.mask)).chunk(number)]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses), gradients(step)


def foreign_result(theirs: Loss, step: Step, number: int = 1) -> Result:
    """The same of TRL or verl."""
    whole = window(step, number)
    losses = [theirs(part, whole) for part in parts(step, number)]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses), gradients(step)


def error(ours: Result, theirs: Result) -> float:
    """The larger of two relative errors. Gradients: to the largest of them. Losses: to the size of what they add up,
    for which the sum of the gradients stands (a token's share w r A has the gradient w r A), since they may cancel."""
    assert math.isfinite(theirs[0])
    assert bool(theirs[1].isfinite().all())
    size = max(abs(theirs[0]), float(theirs[1].abs().sum()))
    assert size > 0
    of_gradient = (ours[1] - theirs[1]).abs().max() / max(float(theirs[1].abs().max()), 1e-300)
    return max(abs(ours[0] - theirs[0]) / size, float(of_gradient))


def steps(case: Case) -> list[Step]:
    """The steps that a row is compared on."""
    if get_objective(case.ours).surrogate.pairs:
        return [random_step(seed, drift).in_pairs() for seed in SEEDS for drift in DRIFTS]
    varied = (False, True) if case.per_token else (False,)
    return [random_step(seed, drift, vary) for seed in SEEDS for drift in DRIFTS for vary in varied]


def largest_error(case: Case, number: int = 1) -> float:
    """Over all steps, each in `number` parts."""
    objective = get_objective(case.ours, **case.overrides)
    return max(
        error(our_result(objective, step, number), foreign_result(case.theirs, step, number)) for step in steps(case)
    )


def error_with_empty_responses(case: Case) -> float:
    """On a step where some responses have no token, theirs brought to our number of responses."""
    step = random_step(0, 0.2, empty_responses=3)
    loss, gradient = foreign_result(case.theirs, step)
    factor = len(step.mask) / (len(step.mask) - 3) if case.empty == "counted" else 1.0
    return error(our_result(get_objective(case.ours, **case.overrides), step), (loss * factor, gradient * factor))


def largest_advantage_error(case: AdvantageCase) -> float:
    """Over several steps, relative to the largest advantage."""
    objective = get_objective(case.ours, **case.overrides)
    worst = 0.0
    for seed in SEEDS:
        step = random_step(seed, 0.1)
        theirs = case.theirs(step)
        ours = torch.zeros_like(theirs)
        ours[step.mask.bool()] = objective.token_advantages(step.rollout())
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    return worst
