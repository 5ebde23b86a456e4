"""Every equality of docs/relatives.md, on random batches; and that its condition is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tepo.config import load_recipe
from tepo.objectives import Objective, TokenBatch, get_objective
from tepo.objectives import relatives as r
from tepo.objectives.equalities import equalities
from tepo.testing.batches import Result, assert_same, prepare, random_step, run

EQUALITIES = equalities()
CONDITIONAL = [equality for equality in EQUALITIES if equality.condition != r.ALWAYS]


def varying(batch: TokenBatch, seed: int) -> TokenBatch:
    """With advantages that vary inside responses, 0 at some tokens."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)
    return dataclasses.replace(batch, advantages=torch.where(normal.abs() < 0.2, 0.0, normal))


def in_pairs(batch: TokenBatch) -> TokenBatch:
    """With the advantages of pairs."""
    return dataclasses.replace(batch, advantages=get_objective("dpo").token_advantages(batch))


def fulfilling(condition: str, seed: int) -> list[TokenBatch]:
    """Random batches for which an equality under the condition holds."""
    if condition == r.EQUAL_LENGTHS:
        return [random_step(seed, lengths=(6,) * 8).batch()]
    step = random_step(seed)
    tokens, batch = step.tokens, step.batch()
    if condition == r.AT_OLD:
        return [step.batch(logp=tokens["old_logp"], entropy=tokens["old_entropy"])]
    if condition == r.AT_REFERENCE:
        return [step.batch(ref_logp=tokens["logp"])]
    if condition == r.OLD_IS_REFERENCE:
        return [step.batch(ref_logp=tokens["old_logp"])]
    if condition == r.NO_ADVANTAGE:
        return [dataclasses.replace(batch, advantages=torch.zeros_like(batch.logp))]
    if condition == r.NO_PREFIX:
        apart = step.batch(shared=torch.zeros_like(step.mask))
        return [apart, varying(apart, seed)]
    if condition == r.EVEN_PROCESS:
        return [step.batch(process_reward=torch.full_like(tokens["logp"], 0.5))]
    if condition == r.TRUE_VALUES:
        values = tokens["values"]
        return [varying(step.batch(returns=values, old_values=values), seed)]
    if condition == r.PAIRS_AT_REFERENCE:
        return [in_pairs(step.batch(ref_logp=tokens["logp"]))]
    if condition in (r.CONSTANT, r.NO_SILENT_GROUP):
        return [batch]
    if condition == r.SAME_ADVANTAGES:
        return [varying(batch, seed)]
    assert condition == r.ALWAYS
    return [batch, varying(batch, seed)]


def breaking(condition: str, seed: int) -> TokenBatch:
    """A random batch for which it does not hold."""
    batch = random_step(seed).batch()
    if condition == r.CONSTANT:
        return varying(batch, seed)
    if condition == r.TRUE_VALUES:
        return varying(batch, seed)
    if condition == r.PAIRS_AT_REFERENCE:
        return in_pairs(batch)
    if condition == r.NO_SILENT_GROUP:
        return dataclasses.replace(batch, rewards=torch.where(batch.group == 0, 0.1, batch.rewards))
    return batch


def scaled(objective: Objective, batch: TokenBatch, factor: str) -> Result:
    """Loss and gradients times the factor of an equality."""
    loss, gradients = run(objective, batch)
    if factor == r.LENGTH:
        totals, lengths = objective.totals(batch), batch.lengths
        shares = [run(objective, batch, [[i]], totals)[0] * lengths[i] for i in range(batch.num_sequences)]
        return torch.stack(shares).sum(), {n: g * lengths[batch.sequence] for n, g in gradients.items()}
    size = batch.num_sequences // len(batch.group.unique())
    number = {
        r.ONE: 1.0,
        r.PER_LENGTH: batch.num_sequences / batch.num_tokens,
        r.LEAVE_ONE_OUT: size / (size - 1),
        r.MINUS_ONE: -1.0,
        r.HALF_BETA: 0.1 * size / 2,
    }[factor]
    return loss * number, {name: gradient * number for name, gradient in gradients.items()}


def compare(equality: r.Equality, batch: TokenBatch, seed: int) -> None:
    left, right = equality.left.build(), equality.right.build()
    got = run(left, prepare(left, batch, seed))
    expected = scaled(right, prepare(right, batch, seed), equality.factor)
    loss: Tensor = got[0] if equality.of == r.GRADIENT else expected[0]
    assert_same(got, (loss, expected[1]), str(equality))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("equality", EQUALITIES, ids=str)
def test_equality_holds(equality: r.Equality, seed: int) -> None:
    for batch in fulfilling(equality.condition, seed):
        if not (equality.factor == r.LEAVE_ONE_OUT and batch.advantages is not None):
            compare(equality, batch, seed)


@pytest.mark.parametrize("equality", CONDITIONAL, ids=str)
def test_condition_is_needed(equality: r.Equality) -> None:
    with pytest.raises(AssertionError, match="not close"):
        compare(equality, breaking(equality.condition, 0), 0)


@pytest.mark.parametrize("equality", [e for e in EQUALITIES if e.of == r.GRADIENT], ids=str)
def test_losses_differ_where_only_gradients_are_said_to_be_equal(equality: r.Equality) -> None:
    batch = fulfilling(equality.condition, 0)[0]
    with pytest.raises(AssertionError, match="not close"):
        compare(dataclasses.replace(equality, of=r.BOTH), batch, 0)


def test_sides_can_be_written_in_a_recipe_as_they_are_shown() -> None:
    specs = {str(spec): spec for equality in EQUALITIES for spec in (equality.left, equality.right)}
    for spec in specs.values():
        options = [f"objective.{option}={r.as_yaml(value)}" for option, value in spec.options.items()]
        built = load_recipe(None, [f"objective.name={spec.name}", *options]).objective.build()
        assert type(built.surrogate) is type(spec.build().surrogate)
        assert built.terms == spec.build().terms


def test_words_are_all_explained_and_used() -> None:
    assert {e.condition for e in EQUALITIES} == r.CONDITIONS.keys()
    assert {e.factor for e in EQUALITIES} == r.FACTORS.keys()
    assert len({str(e) for e in EQUALITIES}) == len(EQUALITIES)
