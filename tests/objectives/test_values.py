"""PPO with a critic: generalized advantage estimation, and the loss of the values."""

from __future__ import annotations

import dataclasses
from typing import Any

import definition_advantages
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.values import GAEAdvantage, discounted_advantages


def rollout(values: list[list[float]], rewards: list[float], kl: list[list[float]] | None = None) -> TokenBatch:
    """A flat batch of responses with these old values, rewards and old_logp - ref_logp (0 when not given)."""
    old_values = torch.tensor([value for row in values for value in row], dtype=torch.float64)
    old_logp = torch.full_like(old_values, -1.0)
    moved = torch.tensor([value for row in kl or values for value in row], dtype=torch.float64)
    return TokenBatch(
        logp=old_logp.clone().requires_grad_(),
        old_logp=old_logp,
        sequence=torch.tensor([i for i, row in enumerate(values) for _ in row], dtype=torch.long),
        group=torch.zeros(len(values), dtype=torch.long),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        ref_logp=old_logp - moved * (kl is not None),
        values=old_values.clone().requires_grad_(),
        old_values=old_values,
    )


def rows_of(batch: TokenBatch, flat: torch.Tensor) -> list[list[float]]:
    """[N] -> the values of each response."""
    return [flat[batch.sequence == i].tolist() for i in range(batch.num_sequences)]


def test_numbers_of_the_specification() -> None:
    batch = rollout([[0.2, 0.4, 0.7]], [1.0])
    assert GAEAdvantage().estimate(batch).tolist() == pytest.approx([0.75575, 0.585, 0.3], abs=1e-12)
    assert GAEAdvantage().returns(batch).tolist() == pytest.approx([0.95575, 0.985, 1.0], abs=1e-12)


def test_lambda_1_is_reward_less_value_and_lambda_0_the_one_step_error() -> None:
    batch = rollout([[0.2, 0.4, 0.7], [0.5, -0.1]], [1.0, -2.0])
    assert GAEAdvantage(lam=1.0).estimate(batch).tolist() == pytest.approx([0.8, 0.6, 0.3, -2.5, -1.9], abs=1e-12)
    assert GAEAdvantage(lam=1.0).returns(batch).tolist() == pytest.approx([1.0] * 3 + [-2.0] * 2, abs=1e-12)
    assert GAEAdvantage(lam=0.0).estimate(batch).tolist() == pytest.approx([0.2, 0.3, 0.3, -0.6, -1.9], abs=1e-12)
    discounted = GAEAdvantage(gamma=0.5, lam=0.0).estimate(batch)
    assert discounted.tolist() == pytest.approx([0.0, -0.05, 0.3, -0.55, -1.9], abs=1e-12)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[list[float]], list[float], list[list[float]]]:
    """Values and old_logp - ref_logp of up to five responses of up to six tokens (none too), and rewards."""
    number = st.floats(-3, 3, width=32)
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda found: sum(found) > 1))
    values, kl = ([draw(st.lists(number, min_size=n, max_size=n)) for n in lengths] for _ in range(2))
    return values, draw(st.lists(number, min_size=len(lengths), max_size=len(lengths))), kl


SOME = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@hypothesis_settings(max_examples=200, deadline=None)
@given(case=rollouts(), gamma=SOME, lam=SOME, kl=st.sampled_from([0.0, 0.1, 2.0]), order=st.randoms())
def test_advantages_and_returns_equal_the_definition(
    case: Any, gamma: float, lam: float, kl: float, order: Any
) -> None:
    """A loop over responses, in whatever order these stand; whitened over all tokens."""
    values, rewards, moved = case
    batch = rollout(values, rewards, moved)
    objective = get_objective("ppo", gamma=gamma, lam=lam, reward_kl=kl)
    per_token = [[-kl * m for m in row] for row in moved]
    for row, reward in zip(per_token, rewards, strict=True):
        if row:
            row[-1] += reward
    expected, returns = definition_advantages.gae(per_token, values, gamma, lam)
    advantage = objective.advantage
    assert isinstance(advantage, GAEAdvantage)
    for got, wanted in ((advantage.estimate(batch), expected), (advantage.returns(batch), returns)):
        for row, in_python in zip(rows_of(batch, got), wanted, strict=True):
            assert row == pytest.approx(in_python, rel=1e-9, abs=1e-9)
    flat = [value for row in expected for value in row]
    if max(flat) - min(flat) > 1e-6:
        whitened = [value for row in definition_advantages.whitened(expected) for value in row]
        assert objective.token_advantages(batch).tolist() == pytest.approx(whitened, rel=1e-8, abs=1e-8)
    rows = list(range(len(values)))
    order.shuffle(rows)
    shuffled = batch.select(torch.tensor(rows))
    made = rows_of(shuffled, advantage.estimate(shuffled))
    assert made == [pytest.approx(rows_of(batch, advantage.estimate(batch))[row], abs=1e-12) for row in rows]


def test_advantages_have_mean_0_and_variance_1() -> None:
    batch = rollout([[0.2, 0.4, 0.7], [0.5, -0.1]], [1.0, -2.0])
    made = get_objective("ppo").token_advantages(batch)
    assert made.mean().item() == pytest.approx(0, abs=1e-15)
    assert made.var().item() == pytest.approx(1, rel=1e-7)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8])
def test_equal_estimates_and_single_tokens_give_exactly_0(reward: float) -> None:
    """Bug 8: the mean of equal numbers may be a rounding away from them."""
    equal = rollout([[0.0] * 3, [0.0] * 4], [reward, reward])
    assert get_objective("ppo", lam=1.0).token_advantages(equal).eq(0).all()
    assert get_objective("ppo").token_advantages(rollout([[0.3]], [reward])).eq(0).all()


def test_the_penalty_stands_at_each_token_and_goes_back_to_those_before_it() -> None:
    batch = rollout([[0.0, 0.0, 0.0]], [1.0], kl=[[1.0, 2.0, 4.0]])
    made = GAEAdvantage(lam=1.0, kl=0.1).estimate(batch)
    assert made.tolist() == pytest.approx([0.3, 0.4, 0.6], abs=1e-12)


def test_prepare_fills_returns_in_and_micro_batches_keep_them() -> None:
    batch = rollout([[0.2, 0.4, 0.7], [0.5, -0.1]], [1.0, -2.0])
    prepared = get_objective("ppo").prepare(batch)
    assert prepared.returns is not None
    assert prepared.returns.equal(GAEAdvantage().returns(batch))
    part = prepared.select(torch.tensor([1])).returns
    assert part is not None
    assert part.equal(prepared.returns[3:])


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (0.5, 0.4, 1.0, 0.2, 0.125, -0.5),  # inside
        (0.9, 0.4, 1.0, 0.2, 0.08, 0.0),  # nearer to the return than the clip allows: (0.6 - 1)^2 / 2, no gradient
        (0.1, 0.4, 1.0, 0.2, 0.405, -0.9),  # moved the wrong way: its own square is the larger one
        (1.5, 0.4, 1.0, 0.2, 0.125, 0.5),  # overshot beyond the clip: 0.5^2 > 0.4^2
        (0.9, 0.4, 1.0, None, 0.005, -0.1),
    ],
)
def test_value_clip(value: float, old: float, target: float, clip: float | None, loss: float, slope: float) -> None:
    batch = rollout([[old]], [0.0])
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero, returns = torch.zeros(1, dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    batch = dataclasses.replace(batch, values=values, advantages=zero, returns=returns)
    for coefficient in (1.0, 0.5):
        out = get_objective("ppo", value_loss={"clip": clip, "coefficient": coefficient})(batch)
        (gradient,) = torch.autograd.grad(out.loss, values)
        assert out.loss.item() == pytest.approx(coefficient * loss, rel=1e-12)
        assert gradient.item() == pytest.approx(coefficient * slope, rel=1e-12, abs=1e-15)
        assert out.metrics["value_error"] == pytest.approx(abs(value - target))


def test_values_and_policy_have_gradients_of_their_own() -> None:
    """The surrogate sends none to the values, the value loss none to the policy."""
    batch = rollout([[0.2, 0.4, 0.7], [0.5, -0.1]], [1.0, -2.0])
    objective = get_objective("ppo")
    assert batch.values is not None
    surrogate = dataclasses.replace(objective, terms=())(objective.prepare(batch))
    logp, values = torch.autograd.grad(surrogate.loss, (batch.logp, batch.values), allow_unused=True)
    assert logp is not None
    assert values is None
    whole = objective(objective.prepare(batch))
    with_values = torch.autograd.grad(whole.loss, (batch.logp, batch.values))
    assert with_values[0].equal(logp)
    assert with_values[1].ne(0).any()


@pytest.mark.parametrize("option", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_discounts_are_between_0_and_1(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}; 0 to 1 is allowed"):
        get_objective("ppo", **{option: value})


@pytest.mark.parametrize("clip", [0, -0.1, float("nan")])
def test_value_clip_is_above_0(clip: float) -> None:
    with pytest.raises(ValueError, match=r"value_loss\.clip is"):
        get_objective("ppo", value_loss={"clip": clip})


@pytest.mark.parametrize("value", [None, 0.0])
def test_a_critic_that_nothing_trains_is_refused(value: float | None) -> None:
    with pytest.raises(ValueError, match="objective ppo needs value_loss"):
        get_objective("ppo", value_loss=value)


@pytest.mark.parametrize("missing", ["rewards", "old_values", "ref_logp"])
def test_what_is_missing_is_named(missing: str) -> None:
    absent: dict[str, Any] = {missing: None}
    batch = dataclasses.replace(rollout([[0.2, 0.4]], [1.0]), **absent)
    with pytest.raises(ValueError, match=f"reads .*{missing}"):
        GAEAdvantage(kl=0.1).estimate(batch)


def test_tokens_may_stand_in_any_order_across_responses() -> None:
    """Within a response in theirs: here two are interleaved."""
    batch = rollout([[0.2, 0.4, 0.7], [0.5, -0.1]], [1.0, -2.0])
    order = torch.tensor([3, 0, 1, 4, 2])
    assert batch.old_values is not None
    interleaved = dataclasses.replace(batch, sequence=batch.sequence[order])
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, -2.0], dtype=torch.float64)
    made = discounted_advantages(batch, rewards, batch.old_values, 1.0, 0.95)
    again = discounted_advantages(interleaved, rewards[order], batch.old_values[order], 1.0, 0.95)
    assert again.equal(made[order])
