"""The objectives a second time, straight from the specification: plain Python, one response and one token at a time."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Token:
    """What the loss knows of one token. `frozen_logp`: the value of logp inside a stop-gradient."""

    logp: float
    old_logp: float
    ref_logp: float
    entropy: float
    old_entropy: float
    exact_kl: float
    entropy_direction: float
    advantage: float
    frozen_logp: float


@dataclass(frozen=True)
class Settings:
    """The settings of one objective, as the specification gives them; `kl_mask` and `ref_kl` None when absent."""

    ratio: str
    clip_low: float
    clip_high: float
    aggregate: str
    dual_clip: float | None = None
    length_normalizer: float = 3000
    kl_mask: dict[str, Any] | None = None
    ref_kl: dict[str, Any] | None = None
    entropy_bonus: float | None = None


KL_MASK = {"beta": 0.01, "target": "old", "estimator": "abs", "entropy_test": "measured", "normalizer": "tokens"}
REF_KL = {"beta": 0.04, "estimator": "k3"}

SETTINGS = {
    "tepo": Settings("sequence", 2e-3, 2.5e-3, "token_mean", kl_mask=KL_MASK),
    "tepo_v1": Settings("sequence", 2e-3, 2.5e-3, "token_mean"),
    "grpo": Settings("token", 0.2, 0.2, "sequence_mean", ref_kl=REF_KL),
    "dr_grpo": Settings("token", 0.2, 0.2, "constant_length"),
    "dapo": Settings("token", 0.2, 0.28, "token_mean"),
    "gspo": Settings("sequence", 3e-4, 4e-4, "sequence_mean"),
    "gspo_token": Settings("sequence_token", 3e-4, 4e-4, "sequence_mean"),
}


def settings(name: str, overrides: dict[str, Any]) -> Settings:
    """The settings of an objective with overrides; a mapping changes the fields it names, a number is the beta."""
    row = SETTINGS[name]
    changed = dict(overrides)
    for option, defaults in (("kl_mask", KL_MASK), ("ref_kl", REF_KL)):
        value = overrides.get(option)
        if isinstance(value, float):
            changed[option] = {**(getattr(row, option) or defaults), "beta": value}
        elif value is not None:
            changed[option] = {**(getattr(row, option) or defaults), **value}
    return dataclasses.replace(row, **changed)


def kl(estimator: str, token: Token, target_logp: float) -> float:
    """Estimate of KL(pi || target) at one token."""
    d = target_logp - token.logp
    return {
        "abs": abs(d),
        "k1": -d,
        "k2": 0.5 * d**2,
        "k3": math.exp(d) - d - 1,
        "exact": token.exact_kl,
    }[estimator]


def ratio(kind: str, response: list[Token], token: Token) -> float:
    """The importance ratio of one token."""
    if kind == "token":
        return math.exp(token.logp - token.old_logp)
    if kind == "sequence":
        return math.prod(math.exp(t.logp - t.old_logp) for t in response) ** (1 / len(response))
    frozen = math.prod(math.exp(t.frozen_logp - t.old_logp) for t in response) ** (1 / len(response))
    return frozen * math.exp(token.logp) / math.exp(token.frozen_logp)


def surrogate(s: Settings, r: float, advantage: float) -> float:
    """min(r A, clip(r) A); with dual clip max(that, c A) where A < 0."""
    value = min(r * advantage, min(max(r, 1 - s.clip_low), 1 + s.clip_high) * advantage)
    if s.dual_clip is not None and advantage < 0:
        value = max(value, s.dual_clip * advantage)
    return value


def weight(s: Settings, response: list[Token], num_tokens: int, num_sequences: int) -> float:
    """What one token of a response is multiplied with."""
    if s.aggregate == "token_mean":
        return 1 / num_tokens
    if s.aggregate == "sequence_mean":
        return 1 / num_sequences / len(response)
    return 1 / num_sequences / s.length_normalizer


def in_mask(token: Token, entropy_test: str) -> bool:
    """M: the advantage is positive and the entropy falls."""
    if token.advantage <= 0:
        return False
    return token.entropy < token.old_entropy if entropy_test == "measured" else token.entropy_direction < 0


def loss(s: Settings, responses: list[list[Token]]) -> float:
    """L = -J + terms over the responses of one optimizer step; a response without tokens counts nowhere."""
    responses = [response for response in responses if response]
    num_tokens = sum(len(response) for response in responses)
    if num_tokens == 0:
        return 0.0
    masked = 0
    total = mask_sum = 0.0
    for response in responses:
        w = weight(s, response, num_tokens, len(responses))
        for token in response:
            total -= w * surrogate(s, ratio(s.ratio, response, token), token.advantage)
            if s.ref_kl is not None:
                total += w * s.ref_kl["beta"] * kl(s.ref_kl["estimator"], token, token.ref_logp)
            if s.entropy_bonus is not None:
                total -= s.entropy_bonus * token.entropy / num_tokens
            if s.kl_mask is not None and in_mask(token, s.kl_mask["entropy_test"]):
                target = token.old_logp if s.kl_mask["target"] == "old" else token.ref_logp
                mask_sum += kl(s.kl_mask["estimator"], token, target)
                masked += 1
    if s.kl_mask is not None and masked:
        total += s.kl_mask["beta"] * mask_sum / (num_tokens if s.kl_mask["normalizer"] == "tokens" else masked)
    return total


def derivative(s: Settings, responses: list[list[Token]], token: Token, name: str, step: float = 1e-5) -> float:
    """Central difference of the loss in one value of one token."""
    value = getattr(token, name)
    sides = []
    for moved in (value + step, value - step):
        setattr(token, name, moved)
        sides.append(loss(s, responses))
    setattr(token, name, value)
    return (sides[0] - sides[1]) / (2 * step)


def distance_to_a_kink(s: Settings, responses: list[list[Token]]) -> float:
    """How far the nearest ratio is from a clip boundary, or log-ratio from the corner of |.|."""
    bounds = [1 - s.clip_low, 1 + s.clip_high, s.dual_clip or 1e9]
    distances = []
    for response in responses:
        for token in response:
            distances += [abs(ratio(s.ratio, response, token) - bound) for bound in bounds]
            distances += [abs(token.logp - token.old_logp), abs(token.logp - token.ref_logp)]
    return min(distances)
