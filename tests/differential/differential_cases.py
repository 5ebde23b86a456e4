"""The tables: what our library and TRL or verl both have. To add a row, write our call beside theirs.

`note` names the difference of convention that the row handles. Rows of names in PENDING wait for our side.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from foreign import Advantages, Loss, Step, Window
from foreign_trl import GMPO, GRPO, RLOO, trl, trl_advantages, trl_dpo, trl_orpo
from foreign_verl import NO_DUAL_CLIP, verl, verl_advantages, verl_gae_advantages
from torch import Tensor

PENDING: frozenset[str] = frozenset()
"""Objectives whose rows wait for our side: take a name out once `list_objectives()` has it, and its rows run."""

NO_COUNTERPART = frozenset({
    "entropy_advantage", "aent", "em_ft", "em_rl_sequence", "em_rl_token", "gtpo", "grpo_s", "policy_kl",
})  # fmt: skip
"""Objectives that neither TRL nor verl has."""

OWN_ADVANTAGES = frozenset({"segment", "shared_prefix", "best_against_worst"})
"""Kinds of advantages that neither has, though it has the losses that go with them."""

ROUNDING = 1e-12
LENGTH_EPSILON = 3e-8
"""verl adds 1e-8 to the length of a response before it divides by it."""


@dataclass(frozen=True)
class Case:
    """One objective as both sides have it: `get_objective(ours, **overrides)` and `theirs`.

    per_token: also run with advantages that vary inside a response. split: also run in two parts, the gradients
    accumulated. empty: what theirs does with responses without a token, which ours leaves out: "left_out" as well,
    "counted" among the responses that it divides by, or "not_compared".
    """

    ours: str
    theirs: Loss
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    tolerance: float = ROUNDING
    per_token: bool = True
    split: bool = True
    empty: Literal["left_out", "counted", "not_compared"] = "left_out"


@dataclass(frozen=True)
class AdvantageCase:
    """One kind of advantages: those of `get_objective(ours, **overrides)` and `theirs`."""

    ours: str
    theirs: Advantages
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    tolerance: float = ROUNDING


def over_selected(theirs: Loss, share: float) -> Loss:
    """TRL divides the loss of the tokens of high entropy by all N; the paper by how many they are."""

    def loss(part: Step, whole: Window) -> Tensor:
        entropy = part.entropy[part.mask.bool()]
        selected = int((entropy >= torch.quantile(entropy, 1 - share)).sum())
        return theirs(part, whole) * whole.tokens / selected

    return loss


def by_level(prefix: Loss, rest: Loss, share: float = 0.5) -> Loss:
    """SKPO's loss from those of its levels, each a mean over its own tokens."""

    def loss(part: Step, whole: Window) -> Tensor:
        levels = [dataclasses.replace(part, mask=part.mask * level) for level in (part.shared, ~part.shared)]
        return share * prefix(levels[0], whole) + (1 - share) * rest(levels[1], whole)

    return loss


def with_the_papers_alpha(theirs: Advantages) -> Advantages:
    """GPG's alpha is B / (B - M), M responses in groups of equal rewards; verl's is B / number of non-zero scores."""

    def advantages(step: Step) -> Tensor:
        verls = len(step.rewards) / int(torch.count_nonzero(step.rewards))
        groups = step.groups.unique()
        useful = sum(int((step.groups == g).sum()) for g in groups if len(step.rewards[step.groups == g].unique()) > 1)
        return theirs(step) * (len(step.rewards) / useful) / verls

    return advantages


SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence"}
PLAIN_KL: dict[str, Any] = {"use_bias_correction_kl": False}
BIAS = "use_bias_correction_kl is on by default: it multiplies the KL by the ratio, with a gradient through it"
SINGLE: dict[str, Any] = {"clip_ratio_c": NO_DUAL_CLIP}
DUAL = "verl's dual clip is always on: clip_ratio_c=1e9 puts it out of reach"
LENGTHS = "verl adds 1e-8 to lengths"
EMPTY = "TRL's mean over responses counts those without a token"
WHITENED = "whitened over tokens; 1e-8 is added to the variance (verl) or its root (ours); gamma 1"
PAIRED = "a mean over pairs, ours over prompts: compared where each prompt gives a pair"
NLL = "TRL's NLL is a mean over the tokens of a batch, prompts included; its odds are in float32"
FLOAT32 = 1e-5
COUNTED = "verl adds 1e-8 to the number of tokens in a mean"
CRITIC = "the critic's loss is a call of its own: their sum"
SEQ_MEAN = "seq-mean-token-mean"
NORM = "seq-mean-token-sum-norm"

TRL_CASES = {
    "tepo_v1": Case("tepo_v1", trl("dapo", epsilon=2e-3, epsilon_high=2.5e-3, **SEQUENCE)),
    "tepo_v1_wide": Case("tepo_v1", trl("dapo", epsilon=0.2, **SEQUENCE), {"clip_low": 0.2, "clip_high": 0.2}),
    "tepo_without_mask": Case(
        "tepo", trl("dapo", epsilon=2e-3, epsilon_high=2.5e-3, **SEQUENCE), {"kl_mask": None}, "neither has the KL mask"
    ),
    "grpo": Case("grpo", trl("grpo", beta=0.04, **PLAIN_KL), {}, f"{BIAS}; {EMPTY}", empty="counted"),
    "grpo_no_kl": Case("grpo", trl("grpo"), {"ref_kl": None}, EMPTY, empty="counted"),
    "dr_grpo": Case(
        "dr_grpo", trl("dr_grpo", max_completion_length=3000), {}, f"L is max_completion_length; {EMPTY}",
        empty="counted",
    ),
    "dapo": Case("dapo", trl("dapo", epsilon_high=0.28)),
    "dapo_dual_clip": Case("dapo", trl("dapo", epsilon_high=0.28, delta=3.0), {"dual_clip": 3}, "dual clip is `delta`"),
    "dapo_kl": Case("dapo", trl("dapo", epsilon_high=0.28, beta=0.1, **PLAIN_KL), {"ref_kl": 0.1}, BIAS),
    "dapo_entropy_bonus": Case(
        "dapo", trl("dapo", epsilon_high=0.28, entropy_coef=0.02), {"entropy_bonus": 0.02},
        "TRL's bonus is a mean over each micro-batch", split=False,
    ),
    "grpo_entropy_bonus": Case(
        "grpo", trl("grpo", entropy_coef=0.02), {"ref_kl": None, "entropy_bonus": 0.02},
        f"TRL's bonus is a mean over each micro-batch; {EMPTY} (not in the bonus)", split=False,
        empty="not_compared",
    ),
    "bnpo": Case(
        "dapo", trl("bnpo", epsilon_high=0.28), {}, "bnpo divides by the tokens of each micro-batch", split=False
    ),
    "gspo": Case("gspo", trl("grpo", epsilon=3e-4, epsilon_high=4e-4, **SEQUENCE), {}, EMPTY, empty="counted"),
    "gspo_token": Case(
        "gspo_token", trl("grpo", epsilon=3e-4, epsilon_high=4e-4, **SEQUENCE), {},
        f"TRL has the plain form, with the same gradient where advantages are constant; {EMPTY}",
        per_token=False, empty="counted",
    ),
    "gmpo": Case(
        "gmpo", trl("grpo", GMPO, epsilon=0.4), {}, "the loss of a response without a token is -A, a constant",
        per_token=False, empty="not_compared",
    ),
    "cispo": Case("cispo", trl("cispo", epsilon_high=1.28), {}, "epsilon_high is the cap itself, 1.28"),
    "sapo": Case("sapo", trl("sapo"), {}, EMPTY, empty="counted"),
    "luspo": Case(
        "luspo", trl("luspo", epsilon=0.2, **SEQUENCE), {"clip_low": 0.2, "clip_high": 0.2}, EMPTY, empty="counted"
    ),
    "luspo_narrow": Case(
        "luspo", trl("luspo", epsilon=3e-4, epsilon_high=4e-4, **SEQUENCE), {}, EMPTY, empty="counted"
    ),
    "hoelder_p0": Case(
        "hoelder", trl("grpo", **SEQUENCE), {}, f"p = 0 is the geometric mean; {EMPTY}", empty="counted"
    ),
    "hoelder_token_p1": Case(
        "hoelder_token", trl("grpo"), {"p": 1}, f"p = 1 is the arithmetic mean; {EMPTY}", per_token=False,
        empty="counted",
    ),
    "reinforce_pp": Case("reinforce_pp", trl("dapo")),
    "reinforce_pp_baseline": Case("reinforce_pp_baseline", trl("dapo")),
    "forking_tokens": Case(
        "forking_tokens", over_selected(trl("dapo", epsilon_high=0.28, top_entropy_quantile=0.2), 0.2), {},
        "TRL divides by all tokens, the paper by the selected ones", split=False,
    ),
    "prpo": Case(
        "prpo", trl("grpo", beta=0.001, **PLAIN_KL), {}, f"as GRPO, with advantages of its own; {EMPTY}",
        empty="counted",
    ),
    "dpo": Case("dpo", trl_dpo(0.1), {}, PAIRED, per_token=False, split=False, empty="not_compared"),
    "dpo_beta": Case("dpo", trl_dpo(0.5), {"beta": 0.5}, PAIRED, per_token=False, split=False, empty="not_compared"),
    "orpo": Case(
        "orpo", trl_orpo(0.1), {}, f"{NLL}; {PAIRED}", FLOAT32, per_token=False, split=False, empty="not_compared"
    ),
    "orpo_beta": Case(
        "orpo", trl_orpo(1.0), {"beta": 1.0}, f"{NLL}; {PAIRED}", FLOAT32, per_token=False, split=False,
        empty="not_compared",
    ),
}  # fmt: skip

VERL_CASES = {
    "tepo_v1_per_token_gradient": Case(
        "tepo_v1", verl("gspo", "token-mean", 2e-3, 2.5e-3), {"ratio": "sequence_token"},
        "verl's gspo is the stop-gradient form",
    ),
    "tepo_v1": Case(
        "tepo_v1", verl("gspo", "token-mean", 2e-3, 2.5e-3), {},
        "verl's gspo is the stop-gradient form: the same gradient where advantages are constant", per_token=False,
    ),
    "grpo": Case(
        "grpo", verl("vanilla", SEQ_MEAN, kl=(0.04, "low_var_kl"), **SINGLE), {}, f"{DUAL}; {LENGTHS}", LENGTH_EPSILON
    ),
    "grpo_no_kl": Case("grpo", verl("vanilla", SEQ_MEAN, **SINGLE), {"ref_kl": None}, DUAL, LENGTH_EPSILON),
    **{
        f"grpo_{kind}": Case(
            "grpo", verl("vanilla", SEQ_MEAN, kl=(0.1, kind), **SINGLE), {"ref_kl": {"beta": 0.1, "estimator": kind}},
            DUAL, LENGTH_EPSILON,
        )
        for kind in ("k1", "k2", "k3", "abs")
    },
    "dr_grpo": Case("dr_grpo", verl("vanilla", NORM, length=3000, **SINGLE), {}, f"{DUAL}; L is loss_scale_factor"),
    "dr_grpo_short": Case("dr_grpo", verl("vanilla", NORM, length=7, **SINGLE), {"length_normalizer": 7}, DUAL),
    "dr_grpo_padded_width": Case(
        "dr_grpo", verl("vanilla", NORM, **SINGLE), {"length_normalizer": 9}, "without loss_scale_factor: padded width"
    ),
    "dapo": Case("dapo", verl("vanilla", clip_high=0.28, **SINGLE), {}, DUAL),
    "dapo_dual_clip": Case("dapo", verl("vanilla", clip_high=0.28), {"dual_clip": 3}, "verl's default clip_ratio_c=3"),
    "dapo_dual_clip_narrow": Case("dapo", verl("vanilla", clip_high=0.28, clip_ratio_c=1.1), {"dual_clip": 1.1}),
    "dapo_sequence_mean": Case(
        "dapo", verl("vanilla", SEQ_MEAN, clip_high=0.28, **SINGLE), {"aggregate": "sequence_mean"}, DUAL,
        LENGTH_EPSILON,
    ),
    "dapo_constant_length": Case(
        "dapo", verl("vanilla", NORM, clip_high=0.28, length=20, **SINGLE),
        {"aggregate": "constant_length", "length_normalizer": 20}, DUAL,
    ),
    "dapo_entropy_bonus": Case(
        "dapo", verl("vanilla", clip_high=0.28, entropy=0.02, **SINGLE), {"entropy_bonus": 0.02},
        f"verl aggregates the bonus like the loss, ours is a mean over tokens: equal for token-mean; {DUAL}",
    ),
    "gspo": Case(
        "gspo", verl("gspo", SEQ_MEAN, 3e-4, 4e-4), {},
        "verl's gspo is the stop-gradient form: the same gradient where advantages are constant", LENGTH_EPSILON,
        per_token=False,
    ),
    "gspo_wide": Case(
        "gspo", verl("gspo", SEQ_MEAN), {"clip_low": 0.2, "clip_high": 0.2}, LENGTHS, LENGTH_EPSILON, per_token=False
    ),
    "gspo_token": Case("gspo_token", verl("gspo", SEQ_MEAN, 3e-4, 4e-4), {}, LENGTHS, LENGTH_EPSILON),
    "gpg": Case("gpg", verl("gpg"), {}, "the loss; alpha is part of the advantages"),
    "gmpo": Case(
        "gmpo", verl("geo_mean", clip_low=0.4, clip_high=0.4), {},
        "1e-8 is added to the length three times; divides by the responses of each micro-batch, whatever the aggregate",
        1e-7, per_token=False, split=False, empty="counted",
    ),
    "cispo": Case("cispo", verl("cispo", clip_low=1.0, clip_high=0.28), {}, "clip_high is the offset, .28"),
    "sapo": Case("sapo", verl("sapo"), {}, LENGTHS, LENGTH_EPSILON),
    "rloo": Case("rloo", verl("gpg", "seq-mean-token-sum"), {}, "as verl's gpg loss, without a ratio"),
    "reinforce_pp": Case("reinforce_pp", verl("vanilla", **SINGLE), {}, DUAL),
    "reinforce_pp_baseline": Case("reinforce_pp_baseline", verl("vanilla", **SINGLE), {}, DUAL),
    "hoelder_token_p1": Case(
        "hoelder_token", verl("vanilla", SEQ_MEAN, **SINGLE), {"p": 1}, f"{DUAL}; {LENGTHS}", LENGTH_EPSILON,
        per_token=False,
    ),
    "clip_cov": Case(
        "clip_cov", verl("clip_cov", policy={"clip_cov_ratio": 1.0}), {"share": 1.0},
        "random choice among the tokens with cov in (1, 5): compared where all of them are chosen", split=False,
    ),
    "clip_cov_range": Case(
        "clip_cov", verl("clip_cov", policy={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.5}),
        {"share": 1.0, "cov_low": 0.1, "cov_high": 0.5}, split=False,
    ),
    "kl_cov": Case(
        "kl_cov", verl("kl_cov", policy={"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}), {"share": 0.3},
        "verl selects within each micro-batch; its ppo_kl_coef is .1, the paper's beta 1", split=False,
    ),
    "ppo": Case("ppo", verl("vanilla", value_clip=0.2, **SINGLE), {}, f"{CRITIC}; {DUAL}"),
    "ppo_value_clip": Case(
        "ppo", verl("vanilla", value_clip=0.5, **SINGLE), {"value_loss": {"clip": 0.5}}, f"{CRITIC}; {DUAL}"
    ),
    "ppo_no_value_clip": Case(
        "ppo", verl("vanilla", value_clip=1e9, **SINGLE), {"value_loss": {"clip": None}}, f"{CRITIC}; {DUAL}"
    ),
    "prpo": Case(
        "prpo", verl("vanilla", SEQ_MEAN, kl=(0.001, "low_var_kl"), **SINGLE), {},
        f"as GRPO, with advantages of its own; {DUAL}; {LENGTHS}", LENGTH_EPSILON,
    ),
    "skpo": Case(
        "skpo", by_level(verl("vanilla", **SINGLE), verl("cispo", clip_low=0.2, clip_high=0.28)), {},
        f"its levels are two calls, each on its own tokens; {DUAL}", split=False,
    ),
    "kl_cov_one_token": Case(
        "kl_cov", verl("kl_cov", policy={"kl_cov_ratio": 2e-3, "ppo_kl_coef": 0.5}), {"cov_kl": 0.5}, split=False
    ),
}  # fmt: skip

VERL_ADVANTAGES = {
    "grpo": AdvantageCase("grpo", verl_advantages("grpo"), {}, "std with ddof 1, + 1e-6"),
    "grpo_vectorized": AdvantageCase("grpo", verl_advantages("grpo_vectorized"), {}, "in float32", 1e-6),
    "grpo_epsilon": AdvantageCase("grpo", verl_advantages("grpo", epsilon=1e-2), {"advantage_epsilon": 1e-2}),
    "dr_grpo": AdvantageCase("dr_grpo", verl_advantages("grpo", norm_adv_by_std_in_grpo=False)),
    "rloo": AdvantageCase("rloo", verl_advantages("rloo")),
    "rloo_vectorized": AdvantageCase("rloo", verl_advantages("rloo_vectorized")),
    "reinforce_pp": AdvantageCase("reinforce_pp", verl_advantages("reinforce_plus_plus"), {}, WHITENED, LENGTH_EPSILON),
    "reinforce_pp_baseline": AdvantageCase(
        "reinforce_pp_baseline", verl_advantages("reinforce_plus_plus_baseline"), {}, WHITENED, LENGTH_EPSILON
    ),
    "ppo": AdvantageCase("ppo", verl_gae_advantages(1.0, 0.95), {}, COUNTED, 1e-9),
    "ppo_lambda_1": AdvantageCase("ppo", verl_gae_advantages(1.0, 1.0), {"lam": 1}, COUNTED, 1e-9),
    "ppo_discounted": AdvantageCase(
        "ppo", verl_gae_advantages(0.9, 0.5), {"gamma": 0.9, "lam": 0.5}, COUNTED, 1e-9
    ),
    "gpg": AdvantageCase(
        "gpg", with_the_papers_alpha(verl_advantages("gpg")), {}, "verl's alpha counts non-zero scores"
    ),
}  # fmt: skip

TRL_ADVANTAGES = {
    "grpo": AdvantageCase("grpo", trl_advantages(GRPO), {"advantage_epsilon": 1e-4}, "std with ddof 1, + 1e-4"),
    "dr_grpo": AdvantageCase("dr_grpo", trl_advantages(GRPO, scale_rewards="none")),
    "rloo": AdvantageCase("rloo", trl_advantages(RLOO, beta=0.0), {}, "its default KL in the reward is switched off"),
}

Row = TypeVar("Row", Case, AdvantageCase)


def active(table: dict[str, Row]) -> dict[str, Row]:
    """The rows of objectives that our library has."""
    return {name: case for name, case in table.items() if case.ours not in PENDING}


def pending(table: dict[str, Row]) -> dict[str, Row]:
    """The rows that wait for our side."""
    return {name: case for name, case in table.items() if case.ours in PENDING}
