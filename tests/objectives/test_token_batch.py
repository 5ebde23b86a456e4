"""The input of the objectives: what it counts, refuses and selects."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from objective_cases import LENGTHS, PER_TOKEN, ragged_batch
from torch import Tensor

from tepo.objectives import TokenBatch, Totals, get_objective


def ones(*shape: int) -> Tensor:
    """A tensor of ones."""
    return torch.ones(*shape)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logp": ones(6)}, r"logp has shape \[6\]"),
        ({"mask": ones(2, 4)}, r"mask has shape \[2, 4\]"),
        ({"mask": ones(2)}, r"mask has shape \[2\]"),
        ({"old_logp": ones(2, 4)}, r"old_logp has shape \[2, 4\]"),
        ({"advantages": ones(3)}, r"advantages has shape \[3\]"),
        ({"advantages": ones(2, 4)}, r"advantages has shape \[2, 4\]"),
        ({"advantages": None}, "give advantages, or rewards and groups"),
        ({"advantages": None, "rewards": ones(2)}, "rewards need groups"),
        ({"advantages": None, "rewards": ones(3), "groups": ones(2)}, r"rewards has shape \[3\]"),
        ({"advantages": None, "rewards": ones(2), "groups": ones(3)}, r"groups has shape \[3\]"),
        *(({name: ones(2, 4)}, rf"{name} has shape \[2, 4\]") for name in PER_TOKEN[2:]),
    ],
)
def test_from_padded_refuses_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments = {"logp": ones(2, 3), "old_logp": ones(2, 3), "mask": ones(2, 3), "advantages": ones(2)} | changed
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_padded(**arguments)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, math.nan, math.inf])
def test_mask_with_other_values_than_0_and_1_is_refused(value: float) -> None:
    """Bug 4: another tensor, such as the advantages, in the mask's place."""
    mask = ones(2, 3)
    mask[1, 2] = value
    with pytest.raises(ValueError, match="mask holds values other than 0 and 1"):
        TokenBatch.from_padded(ones(2, 3), ones(2, 3), mask, advantages=ones(2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_of_any_dtype_is_the_same_mask(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    values = torch.arange(6.0).reshape(2, 3)
    batch = TokenBatch.from_padded(values, values, mask.to(dtype), advantages=torch.tensor([1.0, 2.0]))
    assert batch.logp.tolist() == [0, 1, 4]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [1, 1, 2]


def test_totals_count_tokens_responses_and_prompts_with_a_token() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    zeros = torch.zeros(4, 2)
    batch = TokenBatch.from_padded(zeros, zeros, mask, advantages=zeros[:, 0], groups=torch.tensor([5, 5, 5, 8]))
    assert batch.totals == Totals(tokens=3, sequences=2, groups=1)
    assert batch.totals + batch.totals == Totals(tokens=6, sequences=4, groups=2)
    assert (batch.num_tokens, batch.num_sequences, batch.lengths.tolist()) == (3, 4, [2, 1, 0, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"old_logp": ones(2)}, r"old_logp has shape \[2\]"),
        ({"sequence": torch.tensor([0, 1])}, r"sequence has shape \[2\]"),
        ({"sequence": torch.tensor([0, 1, 2])}, "sequence must hold indices from 0 to 1"),
        ({"sequence": torch.tensor([-1, 0, 1])}, "sequence must hold indices from 0 to 1"),
        ({"rewards": ones(3)}, r"rewards has shape \[3\]"),
        ({"group": torch.zeros(2, 1)}, r"group has shape \[2, 1\]"),
        ({"entropy": ones(2)}, r"entropy has shape \[2\]"),
    ],
)
def test_flat_batch_refuses_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    sequence, group = torch.tensor([0, 0, 1]), torch.zeros(2)
    arguments = {"logp": ones(3), "old_logp": ones(3), "sequence": sequence, "group": group, "advantages": ones(3)}
    with pytest.raises(ValueError, match=message):
        TokenBatch(**(arguments | changed))


def test_flat_batch_of_padded_tensors_is_refused() -> None:
    square = ones(2, 3)
    with pytest.raises(ValueError, match="from_padded"):
        TokenBatch(logp=square, old_logp=square, sequence=square.long(), group=torch.zeros(2))


def test_select_takes_responses_in_the_order_given() -> None:
    padded = ragged_batch(27)
    whole = dataclasses.replace(padded.batch(), rewards=torch.arange(8.0), group=torch.arange(8) * 10)
    part = whole.select(torch.tensor([6, 0, 3]))
    assert part.group.tolist() == [60, 0, 30]
    assert part.rewards is not None
    assert part.rewards.tolist() == [6, 0, 3]
    assert part.lengths.tolist() == [LENGTHS[6], LENGTHS[0], LENGTHS[3]]
    for name in PER_TOKEN:
        for new, old in enumerate([6, 0, 3]):
            expected = padded.tokens[name][old, : LENGTHS[old]]
            assert getattr(part, name)[part.sequence == new].equal(expected)


def test_select_nothing_and_everything() -> None:
    whole = ragged_batch(28).batch()
    nothing = whole.select(torch.tensor([], dtype=torch.long))
    assert (nothing.num_tokens, nothing.num_sequences) == (0, 0)
    assert get_objective("tepo")(nothing).loss == 0
    assert whole.select(torch.arange(8)).logp.equal(whole.logp)


def test_select_refuses_a_response_named_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        ragged_batch(28).batch().select(torch.tensor([1, 1]))
