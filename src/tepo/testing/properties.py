"""What must hold for every objective, one function for each property."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tepo.objectives import Objective, TokenBatch, combine_metrics
from tepo.objectives.batch import DIFFERENTIABLE, TOKEN_FIELDS
from tepo.testing.batches import (
    assert_close,
    assert_finite,
    assert_same,
    fresh_leaves,
    gradients_of,
    prepare,
    random_batch,
    random_step,
    run,
    seeded,
)

SPLITS: dict[str, list[list[int]]] = {
    "two of 4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "four of 2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "eight of 1": [[row] for row in range(8)],
    "unequal": [[0], [7, 2, 4, 1, 3], [6, 5]],
}


def check_objective(objective: Objective, *, seed: int = 0) -> None:
    """Hold an objective to every property of `PROPERTIES`, on random batches made from `seed`.

    Raises AssertionError naming the first property that fails, and how. Objectives that draw tokens at random are
    prepared once and then compared with themselves. About a tenth of a second on a CPU.
    """
    for name, check in PROPERTIES.items():
        try:
            check(objective, seed)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"objective {objective.name} fails {name!r}: {kind}{error}") from error


def splits(objective: Objective) -> dict[str, list[list[int]]]:
    """Ways to cut the eight responses into micro-batches: pairs of a group are never cut apart."""
    return {"two of 4": SPLITS["two of 4"]} if objective.surrogate.pairs else SPLITS


def _bare(objective: Objective) -> Objective:
    return dataclasses.replace(objective, terms=())


def _output(objective: Objective, seed: int) -> None:
    """Shapes, types and finite values of everything that it gives, in float64 and float32."""
    for dtype in (torch.float64, torch.float32):
        step = random_step(seed, dtype=dtype)
        batch = prepare(objective, step.batch(), seed)
        assert batch.advantages is not None
        assert batch.advantages.isfinite().all(), "advantages are not finite"
        if not objective.advantage.needs:
            made = objective.advantages(step.rewards, step.groups, step.mask.sum(1))
            assert made.shape == (8,), f"advantages have shape {list(made.shape)} for 8 responses"
            assert made.dtype == dtype, f"advantages are {made.dtype} for rewards of {dtype}"
        leaves = fresh_leaves(batch)
        out = objective(dataclasses.replace(batch, **leaves), objective.totals(batch))
        assert out.loss.shape == (), f"the loss has shape {list(out.loss.shape)}; a scalar is wanted"
        assert out.loss.dtype == dtype, f"the loss is {out.loss.dtype} for log-probs of {dtype}"
        assert out.loss.isfinite(), "the loss is not finite"
        assert out.loss.requires_grad, f"the loss has no gradient in any of {', '.join(leaves)}"
        for name, gradient in gradients_of(out.loss, leaves).items():
            assert gradient.isfinite().all(), f"the gradient in {name} is not finite"
        for name, value in out.tokens.items():
            assert value.shape == (out.num_tokens,), f"tokens[{name!r}] has shape {list(value.shape)}"
            assert not value.requires_grad, f"tokens[{name!r}] carries a gradient"


def _fields(objective: Objective, seed: int) -> None:
    """Only fields that `needs` (of the objective and of its advantage) names are read."""
    step = random_step(seed)
    named = {"logp", "old_logp"} | objective.needs | objective.advantage.needs
    needed = dataclasses.replace(step, tokens={n: value for n, value in step.tokens.items() if n in named})
    results = []
    for given in (step, needed):
        with torch.no_grad():
            results.append(objective(prepare(objective, given.batch(), seed)).loss)
    assert results[0].equal(results[1]), f"the loss changes when fields that `needs` lacks are left out: {results}"


def _repeatable(objective: Objective, seed: int) -> None:
    """The same loss and gradient when called again: nothing is drawn or remembered outside of `prepare`."""
    batch = random_batch(objective, seed)
    first, second = run(objective, batch), run(objective, batch)
    same = first[0].equal(second[0]) and all(first[1][name].equal(second[1][name]) for name in first[1])
    assert same, "a second call on the same prepared batch gives another loss or gradient (draw in a selection)"


class _Held(TorchFunctionMode):
    """Keeps what `detach` and `no_grad` gave in the first run, and gives it again in the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.replayed: Iterator[Any] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.Tensor.detach, torch.detach) and torch.is_grad_enabled():
            return result
        if self.replayed is not None:
            return next(self.replayed)
        self.values.append(result)
        return result


def _finite_differences(objective: Objective, seed: int) -> None:
    """The gradient is the slope of the loss (float64, central differences), with what is detached held constant."""
    for attempt in range(seed, seed + 20):
        compared = _differences(objective, random_batch(objective, attempt, lengths=(3, 1, 4, 2, 2, 3), size=3))
        if compared is not None:
            break
    else:
        raise AssertionError("no batch of 20 is away from corners and jumps of the loss")
    for name, (gradient, expected, noise) in compared.items():
        atol = 1e-6 * float(gradient.abs().max()) + noise
        assert_close(gradient, expected, f"gradient in {name}, against differences of the loss", rtol=1e-5, atol=atol)


def _differences(objective: Objective, batch: TokenBatch) -> dict[str, tuple[Tensor, Tensor, float]] | None:
    """For each field: gradient [N], central differences [N], their rounding; None next to a corner of the loss."""
    step, totals, held = 1e-5, objective.totals(batch), _Held()
    leaves = fresh_leaves(batch)

    def loss(changed: dict[str, Tensor]) -> Tensor:
        moved = dataclasses.replace(batch, **changed)
        held.replayed = iter(held.values) if held.values else None
        with held:
            return objective(moved, totals).loss

    at = loss(leaves)
    gradients = gradients_of(at, leaves)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    noise = 1e-10 * (1 + abs(float(at.detach())))
    found = {}
    for name, leaf in leaves.items():
        sides = torch.zeros(2, batch.num_tokens, dtype=leaf.dtype)
        for token in range(batch.num_tokens):
            for side, sign in enumerate((1, -1)):
                value = leaf.detach().clone()
                value[token] += sign * step
                sides[side, token] = loss(leaves | {name: value.requires_grad_()}).detach()
        if bool(((sides.sum(0) - 2 * at.detach()).abs() / step > 1e-3 * largest + noise).any()):
            return None
        found[name] = gradients[name], (sides[0] - sides[1]) / (2 * step), noise
    return found


def _direction(objective: Objective, seed: int) -> None:
    """At the sampling policy the surrogate raises rewarded responses: old log-probs and advantages are constants."""
    step = random_step(seed)
    batch = prepare(objective, step.batch(logp=step.tokens["old_logp"], entropy=step.tokens["old_entropy"]), seed)
    _, gradients = run(_bare(objective), batch)
    assert any(gradient.ne(0).any() for gradient in gradients.values()), (
        "the surrogate has no gradient at logp = old_logp: does one flow through the old log-probs as well?"
    )
    assert batch.advantages is not None
    gain = torch.zeros(8, dtype=torch.float64).index_add(0, batch.sequence, -gradients["logp"] * batch.advantages)
    wrong = torch.nonzero(gain < -1e-12 * gain.abs().max()).flatten().tolist()
    assert not wrong, f"the surrogate lowers the log-probs of responses {wrong} where their advantage is positive"


def _micro_batches(objective: Objective, seed: int) -> None:
    """The loss is one sum over the step: 8 responses = 2 x 4 = 4 x 2 = 8 x 1; ranks that add their totals, too."""
    batch = random_batch(objective, seed)
    whole, totals = run(objective, batch), objective.totals(batch)
    for name, parts in splits(objective).items():
        assert_same(run(objective, batch, parts, totals), whole, f"micro-batches, {name}")
    ranks = [objective.totals(batch.select(torch.tensor(rows))) for rows in SPLITS["two of 4"]]
    assert_same(run(objective, batch, SPLITS["two of 4"], ranks[0] + ranks[1]), whole, "totals added over two ranks")
    assert_same(run(objective, batch, [list(range(8))]), whole, "one batch")


def _order(objective: Objective, seed: int) -> None:
    """The order of responses, the order of tokens and the labels of groups are of no account."""
    plain = random_step(seed).batch()
    backwards = torch.arange(7, -1, -1)
    relabelled = dataclasses.replace(plain.select(backwards), group=5 - 3 * plain.group[backwards])
    made, wanted = objective.token_advantages(relabelled), objective.token_advantages(plain)
    assert_close(made, wanted, "advantages of responses in another order")
    batch = prepare(objective, plain, seed)
    whole = run(objective, batch)
    assert_same(run(objective, batch, [backwards.tolist()]), whole, "responses in reversed order")
    order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    fields = {name: value[order] for name in ("sequence", *TOKEN_FIELDS) if (value := getattr(batch, name)) is not None}
    loss, gradients = run(objective, dataclasses.replace(batch, **fields))
    back = torch.argsort(order)
    assert_same((loss, {name: value[back] for name, value in gradients.items()}), whole, "tokens shuffled")


def _poisoned(value: Tensor, mask: Tensor, sides: tuple[int, int]) -> Tensor:
    """[S, T] padded on its sides, with NaN (of a boolean: True) where no token is."""
    poison: float = math.nan if value.is_floating_point() else True
    return torch.nn.functional.pad(value.masked_fill(~mask, poison), sides, value=poison)


def _padding(objective: Objective, seed: int) -> None:
    """NaN in the padding, on either side and of any width, leaves every bit of the loss as it was."""
    step = random_step(seed)
    loss, gradients = run(objective, prepare(objective, step.batch(), seed))
    for left, right in ((0, 0), (3, 2)):
        mask = torch.nn.functional.pad(step.mask, (left, right))
        padded = {name: _poisoned(value, step.mask, (left, right)) for name, value in step.tokens.items()}
        leaves = {name: padded[name].requires_grad_() for name in DIFFERENTIABLE}
        poisoned = objective(prepare(objective, step.batch(mask=mask, **padded), seed)).loss
        assert poisoned.detach().equal(loss), f"the loss is {poisoned} with NaN in the padding, and {loss} without"
        for name, gradient in gradients_of(poisoned, leaves).items():
            assert gradient[~mask].eq(0).all(), f"padding has a gradient in {name}"
            assert gradient[mask].equal(gradients[name]), f"NaN in the padding changes the gradient in {name}"


def _masked_responses(objective: Objective, seed: int) -> None:
    """Responses without a token count in no denominator: the loss is that of the others alone."""
    step = random_step(seed)
    mask = step.mask.clone()
    mask[[1, 5]] = False
    batch = prepare(objective, step.batch(mask=mask), seed)
    others = batch.select(torch.tensor([0, 2, 3, 4, 6, 7]))
    got, expected = objective.totals(batch), objective.totals(others)
    for name in ("tokens", "sequences", "groups", "statistics"):
        assert getattr(got, name) == getattr(expected, name), (
            f"masked responses change the totals: {name} {getattr(got, name)}, and {getattr(expected, name)} without"
        )
    assert_same(run(objective, batch), run(objective, others), "two responses masked, against the other six alone")


def _everything_masked(objective: Objective, seed: int) -> None:
    """Loss 0 and finite metrics where no token is left, in the whole step and in one micro-batch of it."""
    step = random_step(seed)
    empty = prepare(objective, step.batch(mask=torch.zeros_like(step.mask)), seed)
    for totals in (None, objective.totals(random_batch(objective, seed))):
        loss, _ = run(objective, empty, totals=totals)
        assert loss == 0, f"the loss is {float(loss)} where everything is masked"
        assert_finite(objective(empty, totals).metrics, "where everything is masked")


def _zero_variance(objective: Objective, seed: int) -> None:
    """Equal rewards give advantages of exactly 0, and such groups can be left out where that is promised."""
    advantage = objective.advantage
    for dtype in (torch.float32, torch.float64):
        for value in (0.1, 0.7, 1 / 3, 1000.1) if not advantage.needs and advantage.relative_to_group else ():
            for size in range(2, 10):
                rewards = torch.cat([torch.full((size,), value, dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype)])
                groups = torch.tensor([0] * size + [1] * 2)
                made = objective.advantages(rewards, groups)[:size]
                assert made.eq(0).all(), (
                    f"{size} rewards of {value:g} ({dtype}) have advantages {made.tolist()}: exactly 0 is wanted"
                )
    batch = random_step(seed).batch()
    silent = batch.group == 1
    advantages = torch.where(silent[batch.sequence], 0.0, objective.token_advantages(batch))
    batch = prepare(objective, dataclasses.replace(batch, advantages=advantages), seed)
    kept = torch.nonzero(~silent).flatten().tolist()
    for part in (objective, _bare(objective)):
        if not part.touches_zero_advantage:
            totals = part.totals(batch)
            left_out, whole = run(part, batch, [kept], totals), run(part, batch, totals=totals)
            assert_same((whole[0], left_out[1]), whole, "touches_zero_advantage is False, and without such a group")


def _extreme_ratios(objective: Objective, seed: int) -> None:
    """Log-ratios of +-100 and +-1e4 in float32 give no NaN, whatever the sign of the advantage."""
    for log_ratio in (100.0, -100.0, 1e4, -1e4):
        step = random_step(seed, dtype=torch.float32)
        logp = step.tokens["logp"].clone()
        logp[:, 0] += log_ratio
        batch = prepare(objective, step.batch(logp=logp), seed)
        loss, gradients = run(objective, batch)
        assert loss.isfinite(), f"the loss is {float(loss)} at a log-ratio of {log_ratio:g}"
        for name, gradient in gradients.items():
            assert gradient.isfinite().all(), f"the gradient in {name} is not finite at a log-ratio of {log_ratio:g}"
        assert_finite(objective(batch).metrics, f"at a log-ratio of {log_ratio:g}")


def _metrics(objective: Objective, seed: int) -> None:
    """Plain floats, and those of micro-batches combine to those of the whole (`combine_metrics`)."""
    batch = random_batch(objective, seed)
    totals = objective.totals(batch)
    whole = objective(batch, totals)
    for name, value in whole.metrics.items():
        assert type(value) is float, f"metric {name} is of type {type(value).__name__}; a float is wanted"
    assert whole.metrics.get("loss") == whole.loss.item(), "metrics['loss'] is not the loss"
    outs = [objective(batch.select(torch.tensor(part)), totals) for part in list(splits(objective).values())[-1]]
    combined = combine_metrics((out.metrics, out.num_tokens) for out in outs)
    assert combined.keys() == whole.metrics.keys(), f"metrics differ: {combined.keys() ^ whole.metrics.keys()}"
    for name, value in whole.metrics.items():
        assert math.isclose(combined[name], value, rel_tol=1e-9, abs_tol=1e-12), (
            f"metric {name} is {combined[name]} combined from micro-batches and {value} of the whole step"
        )


def _state(objective: Objective, seed: int) -> None:
    """What a checkpoint saves of adaptive coefficients brings them back."""
    with seeded(seed):
        adapted = objective.adapted(objective(random_batch(objective, seed)).metrics)
    assert isinstance(adapted, Objective), f"adapted() gives a {type(adapted).__name__}"
    assert objective.with_state(adapted.state) == adapted, "with_state(state) does not bring the adapted terms back"


PROPERTIES: dict[str, Callable[[Objective, int], None]] = {
    "output": _output,
    "repeatability": _repeatable,
    "fields": _fields,
    "micro-batches": _micro_batches,
    "finite differences": _finite_differences,
    "direction": _direction,
    "order": _order,
    "padding": _padding,
    "masked responses": _masked_responses,
    "everything masked": _everything_masked,
    "zero-variance groups": _zero_variance,
    "extreme ratios": _extreme_ratios,
    "metrics": _metrics,
    "state": _state,
}
"""What `check_objective` checks, in its order: name -> a function of the objective and the seed."""
