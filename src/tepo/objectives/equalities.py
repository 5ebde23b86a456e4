"""Which settings make one objective another: equalities as data, each verified on random batches by a test."""

from __future__ import annotations

import math
from typing import Any

from tepo.objectives.relatives import (
    ALWAYS,
    AT_OLD,
    AT_REFERENCE,
    CONSTANT,
    EQUAL_LENGTHS,
    EVEN_PROCESS,
    GRADIENT,
    HALF_BETA,
    LEAVE_ONE_OUT,
    LENGTH,
    MINUS_ONE,
    NO_ADVANTAGE,
    NO_PREFIX,
    NO_SILENT_GROUP,
    OLD_IS_REFERENCE,
    PAIRS_AT_REFERENCE,
    PER_LENGTH,
    SAME_ADVANTAGES,
    TRUE_VALUES,
    Equality,
    Spec,
)


def _spec(name: str, **options: Any) -> Spec:
    return Spec(name, options)


UNBOUNDED: dict[str, Any] = {"clip_low": 1.0, "clip_high": math.inf}
SYMMETRIC: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
NARROW: dict[str, Any] = {"clip_low": 2e-3, "clip_high": 2.5e-3}
TINY: dict[str, Any] = {"advantage_epsilon": 1e-8}


def equalities() -> list[Equality]:
    """Every equality of the page, TEPO's first."""
    return [
        *_of_tepo(), *_of_clipped_ratios(), *_of_sequence_ratios(), *_of_score_functions(), *_of_selections(),
        *_of_structure(),
    ]  # fmt: skip


def _of_tepo() -> list[Equality]:
    v1 = _spec("tepo_v1")
    return [
        Equality(_spec("tepo", kl_mask=None), v1, ALWAYS, "The KL mask is all that the revision adds."),
        Equality(
            _spec("tepo"), v1, AT_OLD,
            "No entropy has fallen yet, so the mask is empty: with one update per rollout it never acts.",
        ),
        Equality(
            v1, _spec("dapo"), AT_OLD,
            "Where all ratios are 1 it does not matter whether a token or a sequence has them, nor where they are "
            "clipped: both are the policy gradient, averaged over tokens.",
        ),
        Equality(
            _spec("tepo_v1", ratio="token", clip_low=0.2, clip_high=0.28), _spec("dapo"), ALWAYS,
            "TEPO is DAPO with the likelihood ratio of the response in the token's place, and a clip that fits it.",
        ),
        Equality(
            _spec("tepo_v1", aggregate="sequence_mean"), _spec("gspo", **NARROW), ALWAYS,
            "TEPO is GSPO averaged over tokens and not over responses.",
        ),
        Equality(
            v1, _spec("gspo", **NARROW), EQUAL_LENGTHS,
            "Averages over tokens and over responses differ in how long responses weigh, and in nothing else.",
        ),
        Equality(
            v1, _spec("luspo", **NARROW), ALWAYS,
            "Both weigh a response by its length; the constant between them is lost on an optimizer that normalises.",
            factor=PER_LENGTH,
        ),
        Equality(
            _spec("tepo", ratio="sequence_token"), _spec("tepo"), CONSTANT,
            "Whether the gradient of the sequence ratio is spread over its tokens or taken at each is the same here.",
        ),
        Equality(_spec("tepo", ratio="hoelder"), _spec("tepo"), ALWAYS, "A power mean at p = 0 is the geometric mean."),
    ]  # fmt: skip


def _of_clipped_ratios() -> list[Equality]:
    bare = _spec("grpo", ref_kl=None)
    dapo = _spec("dapo", clip_high=0.2)
    return [
        Equality(_spec("grpo"), bare, AT_REFERENCE, "The KL to the reference has its minimum, 0, there."),
        Equality(
            _spec("dapo", clip_high=0.2, aggregate="sequence_mean"), bare, ALWAYS,
            "DAPO's loss is GRPO's without the KL, averaged over tokens, its clip higher above than below.",
        ),
        Equality(dapo, bare, EQUAL_LENGTHS, "The two averages are one where responses are equally long."),
        Equality(
            _spec("dr_grpo"), _spec("grpo", ref_kl=None, advantage="centered", aggregate="constant_length"), ALWAYS,
            "Dr.GRPO takes two divisors out of GRPO: the standard deviation and the response's length.",
        ),
        Equality(
            _spec("dr_grpo", length_normalizer=6), _spec("dapo", clip_high=0.2, advantage="centered"), EQUAL_LENGTHS,
            "A constant that is everyone's length is the token mean.",
        ),
        Equality(
            _spec("sapo"), bare, AT_OLD, "The soft gate has the slope 1 where the ratio is 1.", of=GRADIENT,
        ),
        Equality(
            _spec("cispo"), _spec("dapo"), AT_OLD,
            "Weights and ratios are the same where they are 1; CISPO differs once tokens are clipped.", of=GRADIENT,
        ),
        Equality(
            _spec("cispo", **UNBOUNDED), _spec("dapo", **UNBOUNDED), ALWAYS,
            "r grad log pi is grad r: without bounds there is no clipped token to treat otherwise.", of=GRADIENT,
        ),
        Equality(
            _spec("reinforce_pp"), _spec("dapo", clip_high=0.2, advantage="batch"), ALWAYS,
            "REINFORCE++ is in its advantages: whitened over the rollout and not within each group.",
        ),
        Equality(
            _spec("reinforce_pp_baseline"), dapo, SAME_ADVANTAGES, "The rest of REINFORCE++ is PPO's clip over tokens."
        ),
        Equality(_spec("gtpo"), dapo, SAME_ADVANTAGES, "GTPO is in its token rewards alone."),
        Equality(
            _spec("entropy_advantage", alpha=0.0), bare, ALWAYS,
            "Without its bonus the shaped advantage is the plain one.",
        ),
        Equality(
            _spec("aent", adaptive_entropy=None), bare, ALWAYS, "AEnt adds an entropy bonus, whose coefficient adapts."
        ),
        Equality(
            _spec("policy_kl", policy_kl=None), _spec("dapo", **UNBOUNDED), ALWAYS,
            "The penalty stands in the place of a clip.",
        ),
        Equality(
            _spec("policy_kl"), _spec("dapo"), AT_OLD, "Neither the penalty nor the clip acts before the first update."
        ),
    ]  # fmt: skip


def _of_sequence_ratios() -> list[Equality]:
    bare = _spec("grpo", ref_kl=None, **TINY)
    return [
        Equality(
            _spec("gspo_token"), _spec("gspo"), CONSTANT,
            "The token form exists for advantages that vary inside a response.",
        ),
        Equality(
            _spec("luspo"), _spec("gspo"), ALWAYS,
            "LUSPO gives back to each response the length that GSPO divides by.", factor=LENGTH,
        ),
        Equality(
            _spec("grpo_s"), _spec("gspo", **SYMMETRIC), SAME_ADVANTAGES,
            "GRPO-S has GSPO's loss, with advantages shaped by the response's mean entropy.",
        ),
        Equality(
            _spec("hoelder"), _spec("gspo", **SYMMETRIC, **TINY), ALWAYS,
            "The power mean at p = 0 is the geometric one; HoelderPO clips it as wide as token ratios.",
        ),
        Equality(
            _spec("hoelder_token", p=1.0), bare, CONSTANT,
            "The arithmetic mean of clipped ratios is GRPO's mean over the tokens of a response.",
        ),
        Equality(
            _spec("hoelder_token", p=0.0), _spec("gmpo", clip_low=-math.log(0.8), clip_high=math.log(1.2), **TINY),
            CONSTANT, "Both take the geometric mean of clipped ratios; GMPO writes its bounds in log space.",
        ),
        Equality(
            _spec("hoelder", p=1.5, **UNBOUNDED), _spec("hoelder_token", p=1.5, **UNBOUNDED), ALWAYS,
            "The variants differ in whether the clip comes before the mean or after.",
        ),
        Equality(
            _spec("gmpo", clip_low=math.inf, clip_high=math.inf), _spec("gspo", **UNBOUNDED), CONSTANT,
            "GMPO and GSPO are one without a clip: a geometric mean is the ratio of the response's likelihoods.",
        ),
        Equality(
            _spec("gmpo"), _spec("grpo", ref_kl=None), AT_OLD,
            "Geometric and arithmetic mean have the same slope where all ratios are 1.",
        ),
    ]  # fmt: skip


def _of_score_functions() -> list[Equality]:
    return [
        Equality(
            _spec("gpg"), _spec("dapo", advantage="informative"), AT_OLD,
            "The score function is the gradient of the ratio where that is 1.", of=GRADIENT,
        ),
        Equality(
            _spec("gpg"), _spec("gpg", advantage="centered"), NO_SILENT_GROUP,
            "GPG's alpha makes up for the groups that say nothing.",
        ),
        Equality(
            _spec("rloo"), _spec("rloo", advantage="centered"), ALWAYS,
            "Leaving a response out of its own baseline scales the centred advantage, and nothing else.",
            factor=LEAVE_ONE_OUT,
        ),
        Equality(
            _spec("rloo"), _spec("dapo", aggregate="sequence_sum", advantage="leave_one_out"), AT_OLD,
            "REINFORCE is the first update of PPO, with the response as the unit.", of=GRADIENT,
        ),
        Equality(
            _spec("em_rl_sequence", ref_kl=None), _spec("rloo"), SAME_ADVANTAGES,
            "EM-RL is RLOO on the policy's own likelihood in the place of a verified reward.",
        ),
        Equality(
            _spec("em_rl_token", ref_kl=None), _spec("rloo"), SAME_ADVANTAGES,
            "And the same with its certainty.",
        ),
        Equality(
            _spec("em_ft"), _spec("dapo", entropy_bonus=1.0), NO_ADVANTAGE,
            "Entropy minimisation is the entropy bonus with its sign turned, and no reward.", factor=MINUS_ONE,
        ),
    ]  # fmt: skip


def _of_selections() -> list[Equality]:
    return [
        Equality(
            _spec("forking_tokens", share=1.0), _spec("dapo"), ALWAYS,
            "80/20 is DAPO on part of the tokens: here, on all.",
        ),
        Equality(
            _spec("clip_cov", cov_high=1e7, cov_low=1e6), _spec("dapo", clip_high=0.2), ALWAYS,
            "Clip-Cov is the symmetric clip with some further tokens left out: here, none has such a covariance.",
        ),
        Equality(
            _spec("kl_cov", cov_kl=None), _spec("dapo", **UNBOUNDED), ALWAYS,
            "KL-Cov's penalty stands in the place of a clip.",
        ),
        Equality(
            _spec("kl_cov", share=1.0), _spec("dapo", **UNBOUNDED, ref_kl={"beta": 1.0, "estimator": "abs"}),
            OLD_IS_REFERENCE, "On all tokens the penalty is a KL to the sampling policy.",
        ),
        Equality(
            _spec("kl_cov"), _spec("dapo"), AT_OLD,
            "|log r| is 0 before the first update, and so is its slope as it is taken there.",
        ),
    ]  # fmt: skip


def _of_structure() -> list[Equality]:
    return [
        Equality(
            _spec("ppo"), _spec("dapo", clip_high=0.2), TRUE_VALUES,
            "Beside PPO's clip over tokens stands the loss of its critic, and nothing else.",
        ),
        Equality(
            _spec("prpo"), _spec("grpo", advantage="centered", ref_kl=0.001), EVEN_PROCESS,
            "What PRPO adds to the outcome is what a process reward model says above or below 1/2.",
        ),
        Equality(
            _spec("skpo", prefix_share=0.0), _spec("cispo", clip_low=0.2), NO_PREFIX,
            "How responses go on after a prefix is CISPO's loss, with a lower bound.",
        ),
        Equality(
            _spec("skpo", prefix_share=0.0), _spec("skpo", aggregate="token_mean"), NO_PREFIX,
            "The two levels are two token means.",
        ),
        Equality(
            _spec("dpo"), _spec("rloo"), PAIRS_AT_REFERENCE,
            "At its start DPO is REINFORCE on the best and the worst response of a group.", of=GRADIENT,
            factor=HALF_BETA,
        ),
    ]  # fmt: skip
