"""What must not change a loss or its gradient, for every objective of the table with every override it takes.

Numbers of bugs are those of the specification's list "What real implementations got wrong".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import definition_settings
import pytest
import torch
from objective_cases import (
    DIFFERENTIABLE,
    LENGTHS,
    OVERRIDES,
    PER_TOKEN,
    VARIANTS,
    Padded,
    assert_same,
    known,
    loss_and_gradients,
    prepared,
    ragged_batch,
)
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, Totals, combine_metrics, get_objective, list_objectives

OF_TOKENS = {label: variant for label, variant in VARIANTS.items() if not variant.surrogate.pairs}
each_variant = pytest.mark.parametrize("objective", OF_TOKENS.values(), ids=OF_TOKENS)

SPLITS = {
    "two of 4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "four of 2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "eight of 1": [[row] for row in range(8)],
    "unequal": [[0], [7, 2, 4, 1, 3], [6, 5]],
    "reversed": [[7, 6, 5, 4, 3, 2, 1, 0]],
}
EIGHT = list(range(8))


@pytest.mark.parametrize("name", definition_settings.SETTINGS)
def test_rows_take_every_override_that_they_have_a_use_for(name: str) -> None:
    """So that none of the combinations below goes untested because an objective refuses it by mistake."""
    taken = {label for label, overrides in OVERRIDES.items() if not definition_settings.unused(name, overrides)}
    assert {label for label in OVERRIDES if f"{name}-{label}" in VARIANTS} == taken


def test_every_row_and_every_override_is_among_the_variants() -> None:
    assert {f"{name}-defaults" for name in list_objectives()} <= VARIANTS.keys()
    assert {variant.split("-", 1)[1] for variant in VARIANTS} == OVERRIDES.keys()


CLIPPED = ["tepo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "luspo", "gmpo", "hoelder", "hoelder_token"]
CLIPPED += ["cispo", "reinforce_pp", "clip_cov", "entropy_advantage", "aent", "gtpo", "grpo_s"]
"""Objectives with a clip; four that are too wide for these batches are looked at in their variant `narrow_clip`."""


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("seed", [2, 3, 5, 6, 7, 8, 10, 11, 13, 14, 15, 16, 21, 22, 23, 25])
def test_batches_of_these_tests_hold_clipped_and_unclipped_tokens_of_both_signs(name: str, seed: int) -> None:
    """So that no property below holds for want of a case."""
    batch = ragged_batch(seed).batch()
    objective = get_objective(
        name, **(OVERRIDES["narrow_clip"] if name in ("gmpo", "hoelder", "cispo", "grpo_s") else {})
    )
    out = objective(batch)
    signs, clipped = out.tokens["advantage"].sign().int().tolist(), out.tokens["clipped"].tolist()
    assert set(zip(signs, clipped, strict=True)) == {(1, False), (1, True), (-1, False), (-1, True), (0, False)}
    if objective.ratio.name == "token" and "dual_clip" not in definition_settings.unused(name, {"dual_clip": 1.1}):
        assert get_objective(name, dual_clip=1.1)(batch).loss != out.loss


def in_parts(
    objective: Objective, padded: Padded, parts: list[list[int]], totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients accumulated over micro-batches, with the totals of the whole (and its selection)."""
    padded = padded.fresh()
    loss = torch.zeros((), dtype=padded.tokens["logp"].dtype)
    for rows in parts:
        out = objective(padded.batch(rows), totals)
        out.loss.backward()
        loss += out.loss.detach()
    return loss, padded.gradients()


@each_variant
@pytest.mark.parametrize("vary_advantages", [False, True], ids=["", "advantages vary"])
def test_micro_batches_give_the_same_sum(objective: Objective, vary_advantages: bool) -> None:
    """Bugs 1 and 2: one batch of 8 = two of 4 = four of 2 = reversed order, with unequal lengths (SPLITS)."""
    padded = ragged_batch(21, vary_advantages=vary_advantages).selected_by(objective)
    whole, totals = loss_and_gradients(objective, padded), objective.totals(padded.batch())
    for parts in SPLITS.values():
        assert_same(in_parts(objective, padded, parts, totals), whole)


@each_variant
def test_select_gives_the_same_micro_batches(objective: Objective) -> None:
    """Bugs 1 and 2, the way of a trainer that cuts one flat batch."""
    padded = ragged_batch(2).fresh()
    whole = prepared(objective, padded.batch())
    totals = objective.totals(whole)
    loss = sum(objective(whole.select(torch.tensor(rows)), totals).loss for rows in SPLITS["unequal"])
    assert isinstance(loss, Tensor)
    loss.backward()
    assert_same((loss.detach(), padded.gradients()), loss_and_gradients(objective, padded))


@each_variant
def test_two_ranks_give_the_same_sum(objective: Objective) -> None:
    """Bug 1: each rank counts its own responses, and the totals are added; what is selected is so over all ranks."""
    padded = ragged_batch(3).selected_by(objective)
    ranks = [padded.fresh(), padded.fresh()]
    rows = [[0, 1, 2], [3, 4, 5, 6, 7]]
    totals = functools.reduce(
        operator.add, [objective.totals(rank.batch(r)) for rank, r in zip(ranks, rows, strict=True)]
    )
    assert totals == objective.totals(padded.batch())
    losses = []
    for rank, r in zip(ranks, rows, strict=True):
        out = objective(rank.batch(r), totals)
        out.loss.backward()
        losses.append(out.loss.detach())
    gradients = {name: ranks[0].gradients()[name] + ranks[1].gradients()[name] for name in DIFFERENTIABLE}
    assert_same((losses[0] + losses[1], gradients), loss_and_gradients(objective, padded))


REWARDS = torch.tensor([1.0, 0.0, 0.3, 0.3, 0.3, 2.0, 0.0, 1.0], dtype=torch.float64)
LABELS = torch.tensor([5, 5, 5, 0, 0, -3, -3, -3])
GROUPS = [[0, 1, 2], [3, 4], [5, 6, 7]]


def with_rewards(leaves: Padded, rows: list[int]) -> TokenBatch:
    """The batch of some rows with the rewards above in the advantages' place."""
    return dataclasses.replace(leaves.batch(rows), advantages=None, rewards=REWARDS[rows], group=LABELS[rows])


@each_variant
def test_rewards_of_whole_groups_give_the_same_sum(objective: Objective) -> None:
    """Bug 1 with advantages made by the objective: three groups, in one batch or one group at a time.

    Where advantages depend on the whole rollout, one group of it is refused.
    """
    padded = ragged_batch(22)
    whole = padded.fresh()
    plain = prepared(objective, with_rewards(whole, EIGHT))
    if objective.advantage.needs:  # one value a token, that the rewards alone do not tell
        advantages = torch.zeros_like(padded.tokens["logp"])
        advantages[padded.mask] = known(plain.advantages)
    else:
        advantages = objective.advantages(REWARDS, LABELS, padded.mask.sum(1))
    given = padded.fresh(advantages=advantages)
    out = objective(plain)
    out.loss.backward()
    assert_same((out.loss.detach(), whole.gradients()), loss_and_gradients(objective, given))
    totals = objective.totals(with_rewards(padded, EIGHT))
    parts = given.selected_by(objective)
    if objective.advantage.across_groups:
        with pytest.raises(ValueError, match=r"counts the whole rollout.*2 of its 8 responses"):
            objective(with_rewards(parts, [3, 4]), totals)
        return
    parts = parts.fresh()
    losses = [objective(with_rewards(parts, rows), totals).loss for rows in GROUPS]
    sum(losses, torch.zeros(())).backward()
    assert_same((torch.stack(losses).sum().detach(), parts.gradients()), loss_and_gradients(objective, given))


@pytest.mark.parametrize("name", definition_settings.SETTINGS)
def test_rows_whose_advantages_depend_on_the_whole_rollout_say_so(name: str) -> None:
    """`across_groups` is what the refusal above goes by: another group, other advantages of the first."""
    objective = get_objective(name)
    rewards, groups = torch.tensor([1.0, 0.0, 0.25, 3.0, 3.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    whole = dataclasses.replace(
        ragged_batch(0, lengths=(2, 1, 3, 1, 4)).batch(), advantages=None, rewards=rewards, group=groups
    )
    alone = objective.token_advantages(whole.select(torch.tensor([0, 1, 2])))
    beside = objective.token_advantages(whole)[:6]
    if not objective.advantage.needs:
        assert objective.advantages(rewards, groups, whole.lengths)[whole.sequence[:6]].equal(beside)
        alone, beside = objective.advantages(rewards[:3], groups[:3]), objective.advantages(rewards, groups)[:3]
    assert objective.advantage.across_groups == (not torch.allclose(alone, beside, rtol=1e-12, atol=0))
    assert objective.advantage.across_groups == (name in ("gpg", "reinforce_pp", "reinforce_pp_baseline", "ppo"))


@each_variant
def test_order_of_tokens_is_of_no_account(objective: Objective) -> None:
    """Bug 2: the tokens of a flat batch shuffled, across responses too."""
    padded = ragged_batch(5)
    shuffled = padded.fresh()
    batch = prepared(objective, shuffled.batch())
    order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    names = ("sequence", "advantages", *PER_TOKEN, *(() if batch.selected is None else ("selected",)))
    batch = dataclasses.replace(batch, **{name: getattr(batch, name)[order] for name in names})
    out = objective(batch)
    out.loss.backward()
    assert_same((out.loss.detach(), shuffled.gradients()), loss_and_gradients(objective, padded))


@each_variant
def test_padding_is_never_read(objective: Objective) -> None:
    """Bugs 3, 7 and 11: any value in the padding of any tensor leaves every bit as it was, its gradient exactly 0."""
    clean = ragged_batch(6, width=9)
    expected_loss, expected_gradients = loss_and_gradients(objective, clean)
    expected_metrics = objective(prepared(objective, clean.batch())).metrics
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        poisoned = clean.fresh(
            **{
                name: torch.where(clean.mask, value, True if value.dtype == torch.bool else poison)
                for name, value in clean.tokens.items()
            },
            advantages=torch.where(clean.mask, clean.advantages[:, None], poison),
        )
        loss, gradients = loss_and_gradients(objective, poisoned)
        assert loss.equal(expected_loss)
        for name in DIFFERENTIABLE:
            assert gradients[name].equal(expected_gradients[name])
            assert gradients[name][~clean.mask].eq(0).all()
        assert objective(prepared(objective, poisoned.batch())).metrics == expected_metrics


@each_variant
def test_width_of_the_padding_is_of_no_account(objective: Objective) -> None:
    """Bug 3: the same responses in wider tensors, on the left or the right."""
    narrow = ragged_batch(7)
    expected_loss, expected = loss_and_gradients(objective, narrow)
    for left, right in ((0, 5), (4, 0)):
        wide = narrow.fresh(
            mask=torch.nn.functional.pad(narrow.mask, (left, right)),
            **{name: torch.nn.functional.pad(value, (left, right)) for name, value in narrow.tokens.items()},
        )
        loss, gradients = loss_and_gradients(objective, wide)
        assert loss.equal(expected_loss)
        for name in DIFFERENTIABLE:
            assert gradients[name][:, left : left + max(LENGTHS)].equal(expected[name])


@each_variant
def test_everything_masked_is_zero(objective: Objective) -> None:
    """Bug 7: loss 0, gradient 0 and finite metrics; alone, and as a micro-batch of a step with other responses."""
    padded = ragged_batch(8)
    empty = padded.fresh(mask=torch.zeros_like(padded.mask))
    for totals in (None, objective.totals(padded.batch())):
        loss, gradients = loss_and_gradients(objective, empty, totals)
        assert loss == 0
        assert all(gradient.eq(0).all() for gradient in gradients.values())
        assert all(
            math.isfinite(value) for value in objective(prepared(objective, empty.batch()), totals).metrics.values()
        )


@each_variant
def test_masked_responses_count_nowhere(objective: Objective) -> None:
    """Bug 6: with two responses masked out, the loss is that of the other six alone."""
    padded = ragged_batch(23)
    kept = [0, 2, 3, 4, 6, 7]
    masked = padded.mask.clone()
    masked[[1, 5]] = False
    masked_out = padded.fresh(mask=masked)
    assert objective.totals(masked_out.batch()) == objective.totals(padded.batch(kept))
    loss, gradients = loss_and_gradients(objective, masked_out)
    alone = padded.fresh()
    out = objective(prepared(objective, alone.batch(kept)))
    out.loss.backward()
    assert_same((loss, gradients), (out.loss.detach(), alone.gradients()))


@each_variant
def test_groups_with_zero_advantage_can_be_left_out_exactly(objective: Objective) -> None:
    """`touches_zero_advantage` is False where dropping them, not from the totals, changes nothing, and only there.

    Where a term treats the selected tokens, one may be among those of zero advantage: all are selected.
    """
    padded = ragged_batch(10)
    dropped, kept = [2, 3, 6], [0, 1, 4, 5, 7]
    advantages = padded.advantages.clone()
    advantages[dropped] = 0
    padded = padded.fresh(advantages=advantages).selected_by(objective)
    if objective.selection is not None and objective.selection.use == "mark":
        padded = padded.fresh(selected=padded.mask)
    whole = loss_and_gradients(objective, padded)
    touched = any(gradient[dropped].ne(0).any() for gradient in whole[1].values())
    assert touched == objective.touches_zero_advantage
    if not objective.touches_zero_advantage:
        assert_same(in_parts(objective, padded, [kept], objective.totals(padded.batch())), whole)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_nothing(objective: Objective, dtype: torch.dtype) -> None:
    """Bug 8: rewards [.1]*8 give the advantage 0 exactly, and no gradient from the surrogate.

    Where advantages are made of other values too, those of all responses are equal, and those of a process reward
    model neither good nor bad. Those that are not relative to a group are nothing of the kind.
    """
    padded = ragged_batch(11, dtype=dtype)
    rewards, groups = torch.full((8,), 0.1, dtype=dtype), torch.zeros(8, dtype=torch.long)
    if not objective.advantage.relative_to_group and objective.advantage.needs:
        advantages = torch.zeros(8, dtype=dtype)
    elif objective.advantage.needs:
        even = ragged_batch(11, lengths=(7,) * 8, dtype=dtype)
        alike = {name: even.tokens[name][:1].expand(8, 7) for name in objective.advantage.needs}
        alike |= {"process_reward": torch.full((8, 7), 0.5, dtype=dtype)}
        made = dataclasses.replace(even.fresh(**alike).batch(), advantages=None, rewards=rewards, group=groups)
        advantages = objective.token_advantages(made).reshape(8, 7)[:, 0]
        assert objective.token_advantages(made).eq(0).all()
    else:
        advantages = objective.advantages(rewards, groups)
    assert advantages.dtype == dtype
    assert advantages.eq(0).all()
    bare = dataclasses.replace(objective, terms=())
    loss, gradients = loss_and_gradients(bare, padded.fresh(advantages=advantages))
    assert gradients["logp"].eq(0).all()
    assert bool(loss == 0) == (not bare.touches_zero_advantage)
    assert all(gradient.eq(0).all() for gradient in gradients.values()) == (not bare.touches_zero_advantage)


@each_variant
def test_extreme_log_ratios_stay_finite(objective: Objective) -> None:
    """float32, one token of each response moved very far, up or down, with either sign of the advantage."""
    padded = ragged_batch(25, dtype=torch.float32)
    for log_ratio in (1e4, -1e4, 100.0, -100.0):
        moved = padded.tokens["logp"].detach().clone()
        moved[:, 0] += log_ratio
        there = padded.fresh(logp=moved)
        out = objective(prepared(objective, there.batch()))
        out.loss.backward()
        assert out.loss.isfinite()
        assert all(gradient.isfinite().all() for gradient in there.gradients().values())
        assert all(math.isfinite(value) for value in out.metrics.values())


@each_variant
def test_metrics_of_micro_batches_combine_to_those_of_the_whole(objective: Objective) -> None:
    """Bug 1 for what is reported; an empty micro-batch too."""
    padded = ragged_batch(13).selected_by(objective)
    whole = prepared(objective, padded.batch())
    totals = objective.totals(whole)
    nothing = padded.fresh(mask=torch.zeros_like(padded.mask)).batch()
    parts = [*(whole.select(torch.tensor(rows)) for rows in SPLITS["unequal"]), nothing]
    outs = [objective(part, totals) for part in parts]
    in_loss = padded.in_loss(objective)
    assert [out.num_tokens for out in outs] == [int(in_loss[rows].sum()) for rows in SPLITS["unequal"]] + [0]
    combined = combine_metrics((out.metrics, out.num_tokens) for out in outs)
    assert combined == pytest.approx(objective(whole, totals).metrics, rel=1e-12, abs=1e-12)
    assert all(type(value) is float for value in combined.values())
