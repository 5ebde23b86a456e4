"""The settings of the objectives a second time, straight from the specification, and the options that each can use."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Token:
    """What the loss knows of one token.

    frozen_logp, frozen_entropy: the values of logp and entropy inside a stop-gradient. selected: whether the objective
    chose it, over the whole step.
    """

    logp: float
    old_logp: float
    ref_logp: float
    entropy: float
    old_entropy: float
    exact_kl: float
    entropy_direction: float
    top_entropy: float
    values: float
    old_values: float
    returns: float
    shared: bool
    advantage: float
    frozen_logp: float
    frozen_entropy: float
    selected: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings of one objective, as the specification gives them; `kl_mask` and `ref_kl` None when absent.

    p: of the ratio "hoelder". power: of the surrogate "power_clip". selection: which tokens are chosen over the step,
    the highest `share` by "entropy" or "covariance", or "drawn" of those of covariance between cov_low and cov_high.
    alpha, kappa: of the advantages' shaping; None: none. cov_kl, adaptive_entropy, policy_kl: coefficients, or None.
    prefix_clip_low, prefix_clip_high, prefix_share: of shared prefixes. beta: of pairs.
    """

    ratio: str
    surrogate: str
    clip_low: float
    clip_high: float
    aggregate: str
    dual_clip: float | None = None
    p: float = 0
    power: float = 0
    tau: float = 1.0
    tau_negative: float = 1.05
    length_normalizer: float = 3000
    kl_mask: dict[str, Any] | None = None
    ref_kl: dict[str, Any] | None = None
    entropy_bonus: float | None = None
    selection: str | None = None
    share: float = 1.0
    cov_low: float = 1.0
    cov_high: float = 5.0
    alpha: float | None = None
    kappa: float = 2.0
    cov_kl: float | None = None
    adaptive_entropy: float | None = None
    policy_kl: float | None = None
    value_loss: dict[str, Any] | None = None
    prefix_clip_low: float = 0.2
    prefix_clip_high: float = 0.2
    prefix_share: float = 0.5
    beta: float = 0.1


KL_MASK = {"beta": 0.01, "target": "old", "estimator": "abs", "entropy_test": "measured", "normalizer": "tokens"}
REF_KL = {"beta": 0.04, "estimator": "k3"}
VALUE_LOSS = {"coefficient": 1.0, "clip": 0.2}
NO_CLIP = math.inf

SETTINGS = {
    "tepo": Settings("sequence", "clip", 2e-3, 2.5e-3, "token_mean", kl_mask=KL_MASK),
    "tepo_v1": Settings("sequence", "clip", 2e-3, 2.5e-3, "token_mean"),
    "grpo": Settings("token", "clip", 0.2, 0.2, "sequence_mean", ref_kl=REF_KL),
    "dr_grpo": Settings("token", "clip", 0.2, 0.2, "constant_length"),
    "dapo": Settings("token", "clip", 0.2, 0.28, "token_mean"),
    "gspo": Settings("sequence", "clip", 3e-4, 4e-4, "sequence_mean"),
    "gspo_token": Settings("sequence_token", "clip", 3e-4, 4e-4, "sequence_mean"),
    "luspo": Settings("sequence", "clip", 3e-4, 4e-4, "sequence_sum"),
    "gmpo": Settings("token", "log_clip", 0.4, 0.4, "sequence_mean"),
    "hoelder": Settings("hoelder", "clip", 0.2, 0.2, "sequence_mean"),
    "hoelder_token": Settings("token", "power_clip", 0.2, 0.2, "sequence_mean"),
    "cispo": Settings("token", "weight", 1.0, 0.28, "token_mean"),
    "sapo": Settings("token", "gate", NO_CLIP, NO_CLIP, "sequence_mean"),
    "gpg": Settings("none", "score", NO_CLIP, NO_CLIP, "token_mean"),
    "rloo": Settings("none", "score", NO_CLIP, NO_CLIP, "sequence_sum"),
    "reinforce_pp": Settings("token", "clip", 0.2, 0.2, "token_mean"),
    "reinforce_pp_baseline": Settings("token", "clip", 0.2, 0.2, "token_mean"),
    "clip_cov": Settings("token", "clip", 0.2, 0.2, "token_mean", selection="drawn", share=2e-4),
    "kl_cov": Settings("token", "none", NO_CLIP, NO_CLIP, "token_mean", selection="covariance", share=2e-3, cov_kl=1.0),
    "forking_tokens": Settings("token", "clip", 0.2, 0.28, "token_mean", selection="entropy", share=0.2),
    "entropy_advantage": Settings("token", "clip", 0.2, 0.2, "sequence_mean", alpha=0.4),
    "aent": Settings("token", "clip", 0.2, 0.2, "sequence_mean", adaptive_entropy=0.002),
    "em_ft": Settings("none", "entropy", NO_CLIP, NO_CLIP, "token_mean"),
    "em_rl_sequence": Settings("none", "score", NO_CLIP, NO_CLIP, "sequence_sum", ref_kl={**REF_KL, "beta": 0.001}),
    "em_rl_token": Settings("none", "score", NO_CLIP, NO_CLIP, "sequence_sum", ref_kl={**REF_KL, "beta": 0.001}),
    "gtpo": Settings("token", "clip", 0.2, 0.2, "token_mean"),
    "grpo_s": Settings("sequence", "clip", 0.2, 0.2, "sequence_mean"),
    "policy_kl": Settings("token", "none", NO_CLIP, NO_CLIP, "token_mean", policy_kl=1.0),
    "ppo": Settings("token", "clip", 0.2, 0.2, "token_mean", value_loss=VALUE_LOSS),
    "prpo": Settings("token", "clip", 0.2, 0.2, "sequence_mean", ref_kl={**REF_KL, "beta": 0.001}),
    "skpo": Settings("token", "prefix_and_rest", 0.2, 0.28, "level_mean"),
    "dpo": Settings("none", "dpo", NO_CLIP, NO_CLIP, "group_mean"),
    "orpo": Settings("none", "orpo", NO_CLIP, NO_CLIP, "group_mean"),
}
PAIRS = ("dpo", "orpo")
"""Surrogates of one response that is chosen and one that is rejected."""

OPTIONS_OF_SURROGATES: dict[str, set[str]] = {
    "clip": {"clip_low", "clip_high", "dual_clip"},
    "log_clip": {"clip_low", "clip_high"},
    "power_clip": {"clip_low", "clip_high", "p"},
    "weight": {"clip_low", "clip_high"},
    "gate": {"tau", "tau_negative"},
    "score": set(),
    "none": set(),
    "entropy": set(),
    "prefix_and_rest": {"clip_low", "clip_high", "prefix_clip_low", "prefix_clip_high"},
    "dpo": {"beta"},
    "orpo": {"beta"},
}
OPTIONS_OF_SELECTIONS: dict[str | None, set[str]] = {
    None: set(),
    "entropy": {"share"},
    "covariance": {"share"},
    "drawn": {"share", "cov_low", "cov_high"},
}
OPTIONS_OF_ADVANTAGES: dict[str, set[str]] = {
    "gtpo": {"a1", "a2"},
    "grpo_s": {"a1", "a2"},
    "ppo": {"gamma", "lam", "reward_kl"},
    "prpo": {"cuts", "gap"},
}
OWN_ADVANTAGE = ("ppo", "skpo", "dpo", "orpo")
"""Objectives whose advantages no others can stand in for."""
OPTIONS_OF_SOME = {"clip_low", "clip_high", "dual_clip", "p", "tau", "tau_negative", "length_normalizer", "ratio"}
OPTIONS_OF_SOME |= {"share", "cov_low", "cov_high", "alpha", "kappa", "a1", "a2", "gamma", "lam", "reward_kl", "cuts"}
OPTIONS_OF_SOME |= {"gap", "prefix_clip_low", "prefix_clip_high", "prefix_share", "beta", "advantage", "aggregate"}
OPTIONS_OF_SOME |= {"value_loss"}
"""Options that not every objective has a use for."""


def unused(name: str, overrides: dict[str, Any]) -> set[str]:
    """Those of the overrides that the objective, with the others in place, has no use for."""
    row = SETTINGS[name]
    used = OPTIONS_OF_SURROGATES[row.surrogate] | OPTIONS_OF_SELECTIONS[row.selection]
    if row.alpha is not None:
        used |= {"alpha", "kappa"}
    if row.value_loss is not None:
        used.add("value_loss")
    if "advantage" not in overrides or name in OWN_ADVANTAGE:
        used |= OPTIONS_OF_ADVANTAGES.get(name, set())
    if name not in OWN_ADVANTAGE:
        used.add("advantage")
    aggregate = row.aggregate
    if row.surrogate not in PAIRS:
        used.add("aggregate")
        aggregate = overrides.get("aggregate", aggregate)
    if row.ratio != "none":
        used.add("ratio")
        if overrides.get("ratio", row.ratio) == "hoelder":
            used.add("p")
    if aggregate == "constant_length":
        used.add("length_normalizer")
    if aggregate == "level_mean":
        used.add("prefix_share")
    return (overrides.keys() & OPTIONS_OF_SOME) - used


def settings(name: str, overrides: dict[str, Any]) -> Settings:
    """The settings of an objective with overrides; a mapping changes the fields it names, a number is the beta."""
    row = SETTINGS[name]
    of_advantages = {"advantage", "advantage_epsilon"}.union(*OPTIONS_OF_ADVANTAGES.values())
    changed = {option: value for option, value in overrides.items() if option not in of_advantages}
    for option, defaults in (("kl_mask", KL_MASK), ("ref_kl", REF_KL), ("value_loss", VALUE_LOSS)):
        value = overrides.get(option)
        if isinstance(value, float):
            changed[option] = {**(getattr(row, option) or defaults), next(iter(defaults)): value}
        elif value is not None:
            changed[option] = {**(getattr(row, option) or defaults), **value}
    if "p" in changed and overrides.get("ratio", row.ratio) != "hoelder":
        changed["power"] = changed.pop("p")
    return dataclasses.replace(row, **changed)
