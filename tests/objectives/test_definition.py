"""Every objective against an independent implementation of its formula (definition.py), in loss and in gradient."""

from __future__ import annotations

from typing import Any

import definition
import definition_settings
import pytest
import torch
from definition_settings import Token
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from objective_cases import DIFFERENTIABLE, PER_TOKEN, Padded, as_leaf, ragged_batch

from tepo.objectives import get_objective, list_objectives

IN_LOSS = [name for name in PER_TOKEN if name in Token.__dataclass_fields__]
"""Fields of a batch with advantages that a loss may read."""
ESTIMATORS = ["abs", "k1", "k2", "k3", "exact"]


def test_every_objective_has_a_definition() -> None:
    assert list(definition_settings.SETTINGS) == list_objectives()


def to_padded(responses: list[list[Token]], groups: list[int] | None = None) -> Padded:
    """The same tokens as tensors, with advantages [S, T]."""
    width = max(1, *(len(response) for response in responses))

    def table(name: str) -> torch.Tensor:
        rows = [[getattr(t, name) for t in response] + [0.0] * (width - len(response)) for response in responses]
        return torch.tensor(rows, dtype=torch.bool if name == "shared" else torch.float64)

    lengths = torch.tensor([len(response) for response in responses])
    mask = torch.arange(width) < lengths[:, None]
    tokens = {name: as_leaf(name, table(name)) for name in IN_LOSS}
    return Padded(mask, table("advantage"), tokens, groups=None if groups is None else torch.tensor(groups))


def to_tokens(padded: Padded) -> list[list[Token]]:
    """The real tokens of padded tensors."""
    responses = []
    for row in range(len(padded.mask)):
        columns = range(int(padded.mask[row].sum()))
        responses.append(
            [
                Token(
                    **{name: padded.tokens[name][row, t].item() for name in IN_LOSS},  # type: ignore[arg-type]
                    advantage=padded.advantages.reshape(len(padded.mask), -1).expand_as(padded.mask)[row, t].item(),
                    frozen_logp=padded.tokens["logp"][row, t].item(),
                    frozen_entropy=padded.tokens["entropy"][row, t].item(),
                    selected=padded.selected is not None and bool(padded.selected[row, t]),
                )
                for t in columns
            ]
        )
    return responses


@st.composite
def token_lists(draw: st.DrawFn) -> list[list[Token]]:
    """Up to four responses of up to five tokens (none at all too); advantages constant or varying in a response."""
    value = st.floats(-3, 3, width=32)
    responses = []
    for _ in range(draw(st.integers(1, 4))):
        constant = draw(st.none() | value)
        response = []
        for _ in range(draw(st.integers(0, 5))):
            old, step, ref, entropy, change, exact, direction, top, v, old_v, earned = draw(st.tuples(*[value] * 11))
            logp = -abs(old) + step * draw(st.sampled_from([1.0, 0.1, 1e-3, 0.0]))
            advantage = draw(value) if constant is None else constant
            response.append(
                Token(
                    logp=logp,
                    old_logp=-abs(old),
                    ref_logp=-abs(ref),
                    entropy=abs(entropy),
                    old_entropy=abs(entropy) + change * draw(st.sampled_from([1.0, 0.0])),
                    exact_kl=abs(exact),
                    entropy_direction=direction,
                    top_entropy=abs(top),
                    values=v,
                    old_values=old_v,
                    returns=earned,
                    shared=draw(st.booleans()),
                    advantage=advantage,
                    frozen_logp=logp,
                    frozen_entropy=abs(entropy),
                )
            )
        responses.append(response)
    return responses


def as_pairs(responses: list[list[Token]], size: int) -> list[int]:
    """Labels of groups of `size`; in each, the first response with a token is chosen, the last rejected, or reversed.

    The advantages of the others become 0, and those of all where there is one response alone.
    """
    groups = [i // size for i in range(len(responses))]
    for label in set(groups):
        members = [r for r, group in zip(responses, groups, strict=True) if group == label and r]
        first = 1.0 if members and members[0][0].advantage >= 0 else -1.0
        for i, response in enumerate(members):
            sign = 0.0 if len(members) == 1 else first if i == 0 else -first if i == len(members) - 1 else 0.0
            for token in response:
                token.advantage = sign
    return groups


@st.composite
def overrides(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination of overrides that go together."""
    betas = st.sampled_from([0.1, 1.0, 0.0])
    mask_fields = {
        "beta": betas,
        "target": st.sampled_from(["reference", "old"]),
        "estimator": st.sampled_from(ESTIMATORS),
        "entropy_test": st.sampled_from(["measured", "first_order"]),
        "normalizer": st.sampled_from(["tokens", "masked"]),
    }
    ref_fields = {"beta": betas, "estimator": st.sampled_from(ESTIMATORS)}
    kl_mask = st.fixed_dictionaries(mask_fields) | st.fixed_dictionaries({}, optional=mask_fields)
    ref_kl = st.fixed_dictionaries(ref_fields) | st.fixed_dictionaries({}, optional=ref_fields)
    options = {
        "clip_low": st.sampled_from([0.0, 0.1, 0.2, 1.0]),
        "clip_high": st.sampled_from([0.0, 0.28, 5.0]),
        "dual_clip": st.sampled_from([None, 1.1, 3.0]),
        "p": st.sampled_from([-3, -1.0, 0, 0.5, 1, 2.5]),
        "tau": st.sampled_from([0.5, 1, 3.0]),
        "tau_negative": st.sampled_from([0.7, 1, 2.0]),
        "ratio": st.sampled_from(["token", "sequence", "sequence_token", "hoelder"]),
        "aggregate": st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant_length"]),
        "kl_mask": kl_mask | st.sampled_from([None, 0.0, 0.5]),
        "ref_kl": ref_kl | st.sampled_from([None, 0.0, 0.5]),
        "entropy_bonus": st.none() | st.sampled_from([0.0, 0.02]),
        "adaptive_entropy": st.sampled_from([None, 0.0, 0.3]),
        "policy_kl": st.sampled_from([None, 0.0, 0.5]),
        "share": st.sampled_from([1e-3, 0.3, 0.5, 1]),
        "cov_low": st.sampled_from([-2, 0.0]),
        "cov_high": st.sampled_from([0.5, 3]),
        "alpha": st.sampled_from([0, 0.1, 3.0]),
        "kappa": st.sampled_from([1.1, 4]),
        "a1": st.just(2.0),
        "a2": st.just(0.5),
        "prefix_clip_low": st.sampled_from([0.0, 0.5]),
        "prefix_clip_high": st.sampled_from([0.1, 2.0]),
        "prefix_share": st.sampled_from([0, 0.3, 1]),
        "beta": st.sampled_from([0.5, 2]),
        "lam": st.just(0.5),
        "cuts": st.just(2),
        "value_loss": st.sampled_from([0.5, {"clip": None}, {"coefficient": 2.0, "clip": 1.0}]),
    }
    chosen: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=options))
    if chosen.get("aggregate") == "constant_length" and draw(st.booleans()):
        chosen["length_normalizer"] = draw(st.sampled_from([1, 17, 20.5]))
    if chosen.get("cov_high") == 0.5:
        chosen.setdefault("cov_low", -2)  # the range begins at 1 otherwise
    kl_mask_value, ref_kl_value = chosen.get("kl_mask"), chosen.get("ref_kl")
    both = [value.get("estimator") for value in (kl_mask_value, ref_kl_value) if isinstance(value, dict)]
    if both == ["exact", "exact"]:
        chosen["kl_mask"] = {**chosen["kl_mask"], "target": "reference"}  # one exact KL for both
    return chosen


@hypothesis_settings(max_examples=800, deadline=None)
@given(
    name=st.sampled_from(list(definition_settings.SETTINGS)),
    chosen=overrides(),
    responses=token_lists(),
    size=st.integers(2, 4),
)
def test_loss_equals_the_definition(name: str, chosen: dict[str, Any], responses: list[list[Token]], size: int) -> None:
    """Any objective with any overrides on any ragged batch: loss of the loop over tokens.

    Those that it has no use for are refused, and left out.
    """
    unused = definition_settings.unused(name, chosen)
    if unused:
        with pytest.raises(ValueError, match=f"objective {name} does not use ({'|'.join(unused)}): its "):
            get_objective(name, **chosen)
        chosen = {option: value for option, value in chosen.items() if option not in unused}
    objective, row = get_objective(name, **chosen), definition_settings.settings(name, chosen)
    groups = as_pairs(responses, size) if objective.surrogate.pairs else None
    padded = to_padded(responses, groups).selected_by(objective)
    responses = to_tokens(padded)
    definition.check_selection(row, responses)
    got = objective(padded.batch()).loss.item()
    assert got == pytest.approx(definition.loss(row, responses, groups), rel=1e-10, abs=1e-10)


GRADIENT_OVERRIDES: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.15},
    {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2},
    {"clip_low": 0.1, "clip_high": 0.15, "ratio": "token", "aggregate": "token_mean"},
    {"clip_low": 0.1, "clip_high": 0.15, "ratio": "sequence", "aggregate": "sequence_mean"},
    {
        "clip_low": 0.1,
        "clip_high": 0.15,
        "ratio": "sequence_token",
        "aggregate": "constant_length",
        "length_normalizer": 5,
    },
    {"aggregate": "sequence_sum"},
    {"tau": 3.0, "tau_negative": 0.5},
    *({"p": p} for p in (-2.0, 0.5, 2)),
    {"ratio": "hoelder", "p": -1.0},
    {"ratio": "hoelder", "p": 3.0, "aggregate": "token_mean"},
    {"ratio": "sequence", "aggregate": "sequence_sum"},
    *({"kl_mask": {"beta": 0.7, "estimator": estimator}} for estimator in ESTIMATORS),
    *({"kl_mask": {"beta": 0.7, "estimator": estimator, "target": "reference"}} for estimator in ESTIMATORS),
    {"kl_mask": {"beta": 0.7, "normalizer": "masked", "entropy_test": "first_order"}},
    *({"kl_mask": None, "ref_kl": {"beta": 0.7, "estimator": estimator}} for estimator in ESTIMATORS),
    {"kl_mask": 0.3, "ref_kl": 0.2, "entropy_bonus": 0.5},
    {"kl_mask": None, "adaptive_entropy": 0.7, "policy_kl": 0.7},
    {"share": 0.3},
    {"share": 0.3, "cov_low": -1, "cov_high": 1},
    {"share": 0.6, "aggregate": "sequence_mean"},
    {"alpha": 0.1, "kappa": 1.5},
    {"prefix_clip_low": 0.05, "prefix_clip_high": 0.1, "prefix_share": 0.7},
    {"value_loss": {"coefficient": 0.5, "clip": 0.1}},
    {"value_loss": {"clip": None}},
    {"beta": 2.0},
]


def gradient_cases() -> list[Any]:
    """Every objective with those of the overrides that it has a use for."""
    return [
        pytest.param(name, chosen, id=f"{name}-{chosen}")
        for name in definition_settings.SETTINGS
        for chosen in GRADIENT_OVERRIDES
        if not definition_settings.unused(name, chosen)
    ]


@pytest.mark.parametrize(("name", "chosen"), gradient_cases())
@pytest.mark.parametrize("varying", [False, True], ids=["", "advantages vary"])
def test_gradient_equals_finite_differences_of_the_definition(name: str, chosen: dict[str, Any], varying: bool) -> None:
    """Central differences of the loop in logp, entropy and exact KL, away from clip boundaries and corners of |.|."""
    objective, row = get_objective(name, **chosen), definition_settings.settings(name, chosen)
    seed, lengths = -1, (3, 1, 4, 2)
    responses: list[list[Token]] = []
    while not responses or definition.distance_to_a_kink(row, responses) < 3e-5:
        seed += 1
        padded = ragged_batch(seed, lengths, vary_advantages=varying).selected_by(objective)
        responses, groups = to_tokens(padded), None
        if objective.surrogate.pairs:
            groups = as_pairs(responses, 2 + 2 * varying)
            padded = to_padded(responses, groups)
    objective(padded.batch()).loss.backward()
    gradients = padded.gradients()
    for field in DIFFERENTIABLE:
        expected = [definition.derivative(row, responses, groups, t, field) for response in responses for t in response]
        got = gradients[field][padded.mask]
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
