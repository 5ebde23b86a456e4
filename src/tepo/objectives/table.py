"""The objectives: each a row of parts. To add one, add a row."""

from __future__ import annotations

from tepo.objectives.adaptive import AdaptiveEntropy, PolicyKL
from tepo.objectives.advantages import (
    BatchAdvantage,
    CenteredAdvantage,
    InformativeAdvantage,
    LeaveOneOutAdvantage,
    StandardizedAdvantage,
)
from tepo.objectives.aggregates import ConstantLength, SequenceMean, SequenceSum, TokenMean
from tepo.objectives.entropy_advantages import EntropyShare, SelfReward
from tepo.objectives.objective import Objective
from tepo.objectives.pairs import DPO, ORPO, BestAgainstWorst, GroupMean
from tepo.objectives.ratios import HoelderRatio, NoRatio, SequenceRatio, SequenceTokenRatio, TokenRatio
from tepo.objectives.segments import SegmentAdvantage
from tepo.objectives.selections import RandomCovariance, TopCovariance, TopEntropy
from tepo.objectives.shaping import EntropyShaping
from tepo.objectives.shared_prefix import LevelMean, PrefixAndRest, SharedPrefixAdvantage
from tepo.objectives.surrogates import (
    Clip,
    ClippedWeight,
    HoelderClip,
    LogSpaceClip,
    NegativeEntropy,
    ScoreFunction,
    SoftGate,
    Unclipped,
)
from tepo.objectives.terms import CovarianceKL, KLMask, ReferenceKL
from tepo.objectives.values import GAEAdvantage, ValueLoss

TABLE = (
    Objective(
        "tepo", "TEPO: sequence ratio, token mean, KL mask", "2604.12736 (revision of 2510.09369)",
        StandardizedAdvantage(), SequenceRatio(), Clip(2e-3, 2.5e-3), TokenMean(), (KLMask(beta=0.01),),
    ),
    Objective(
        "tepo_v1", "TEPO, first version: no KL mask", "2510.09369",
        StandardizedAdvantage(), SequenceRatio(), Clip(2e-3, 2.5e-3), TokenMean(),
    ),
    Objective(
        "grpo", "GRPO", "2402.03300",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.2), SequenceMean(), (ReferenceKL(0.04, "k3"),),
    ),
    Objective(
        "dr_grpo", "Dr.GRPO", "2503.20783",
        CenteredAdvantage(), TokenRatio(), Clip(0.2, 0.2), ConstantLength(3000),
    ),
    Objective(
        "dapo", "DAPO", "2503.14476",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.28), TokenMean(),
    ),
    Objective(
        "gspo", "GSPO", "2507.18071",
        StandardizedAdvantage(), SequenceRatio(), Clip(3e-4, 4e-4), SequenceMean(),
    ),
    Objective(
        "gspo_token", "GSPO-token: advantages may vary inside a response", "2507.18071",
        StandardizedAdvantage(), SequenceTokenRatio(), Clip(3e-4, 4e-4), SequenceMean(),
    ),
    Objective(
        "luspo", "LUSPO: GSPO without the length bias", "2602.05261",
        StandardizedAdvantage(), SequenceRatio(), Clip(3e-4, 4e-4), SequenceSum(),
    ),
    Objective(
        "gmpo", "GMPO: geometric mean of clipped token ratios", "2507.20673",
        StandardizedAdvantage(), TokenRatio(), LogSpaceClip(0.4, 0.4), SequenceMean(),
    ),
    Objective(
        "hoelder", "HoelderPO: power mean of the token ratios", "2605.12058",
        StandardizedAdvantage(1e-8), HoelderRatio(0.0), Clip(0.2, 0.2), SequenceMean(),
    ),
    Objective(
        "hoelder_token", "HoelderPO, token variant: power mean of clipped token ratios", "2605.12058",
        StandardizedAdvantage(1e-8), TokenRatio(), HoelderClip(0.0, 0.2, 0.2), SequenceMean(),
    ),
    Objective(
        "cispo", "CISPO: clipped weights, no clipped gradients", "2506.13585",
        StandardizedAdvantage(), TokenRatio(), ClippedWeight(1.0, 0.28), TokenMean(),
    ),
    Objective(
        "sapo", "SAPO: a soft gate in place of the clip", "2511.20347",
        StandardizedAdvantage(), TokenRatio(), SoftGate(1.0, 1.05), SequenceMean(),
    ),
    Objective(
        "gpg", "GPG: group policy gradient", "2504.02546",
        InformativeAdvantage(), NoRatio(), ScoreFunction(), TokenMean(),
    ),
    Objective(
        "rloo", "RLOO: leave-one-out REINFORCE", "2402.14740",
        LeaveOneOutAdvantage(), NoRatio(), ScoreFunction(), SequenceSum(),
    ),
    Objective(
        "reinforce_pp", "REINFORCE++", "2501.03262",
        BatchAdvantage(), TokenRatio(), Clip(0.2, 0.2), TokenMean(),
    ),
    Objective(
        "reinforce_pp_baseline", "REINFORCE++ with the group's mean as baseline", "2501.03262",
        BatchAdvantage(baseline=True), TokenRatio(), Clip(0.2, 0.2), TokenMean(),
    ),
    Objective(
        "clip_cov", "Clip-Cov: some tokens of high covariance get no gradient", "2505.22617",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.2), TokenMean(), (), RandomCovariance(2e-4, 1.0, 5.0),
    ),
    Objective(
        "kl_cov", "KL-Cov: a KL penalty on the tokens of highest covariance", "2505.22617",
        StandardizedAdvantage(), TokenRatio(), Unclipped(), TokenMean(), (CovarianceKL(1.0),), TopCovariance(2e-3),
    ),
    Objective(
        "forking_tokens", "80/20: DAPO on the tokens of highest entropy", "2506.01939",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.28), TokenMean(), (), TopEntropy(0.2),
    ),
    Objective(
        "entropy_advantage", "GRPO with entropy-shaped advantages", "2506.14758",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.2), SequenceMean(), shaping=EntropyShaping(0.4, 2.0),
    ),
    Objective(
        "aent", "AEnt: GRPO with an adaptive bonus on a clamped entropy", "2509.03493",
        StandardizedAdvantage(), TokenRatio(), Clip(0.2, 0.2), SequenceMean(), (AdaptiveEntropy(),),
    ),
    Objective(
        "em_ft", "EM-FT: entropy minimisation on own samples", "2505.15134",
        CenteredAdvantage(), NoRatio(), NegativeEntropy(), TokenMean(),
    ),
    Objective(
        "em_rl_sequence", "EM-RL: the response's likelihood as its reward", "2505.15134",
        SelfReward("logp"), NoRatio(), ScoreFunction(), SequenceSum(), (ReferenceKL(0.001, "k3"),),
    ),
    Objective(
        "em_rl_token", "EM-RL: the response's certainty as its reward", "2505.15134",
        SelfReward("entropy"), NoRatio(), ScoreFunction(), SequenceSum(), (ReferenceKL(0.001, "k3"),),
    ),
    Objective(
        "gtpo", "GTPO: token rewards by share of entropy", "2508.04349",
        EntropyShare("token"), TokenRatio(), Clip(0.2, 0.2), TokenMean(),
    ),
    Objective(
        "grpo_s", "GRPO-S: response rewards by share of entropy", "2508.04349",
        EntropyShare("response"), SequenceRatio(), Clip(0.2, 0.2), SequenceMean(),
    ),
    Objective(
        "policy_kl", "Surrogate with an adaptive KL penalty (TRPO's constraint)", "1707.06347, section 4",
        StandardizedAdvantage(), TokenRatio(), Unclipped(), TokenMean(), (PolicyKL(1.0, 0.01),),
    ),
    Objective(
        "ppo", "PPO with a critic and GAE", "1707.06347, 1506.02438",
        GAEAdvantage(1.0, 0.95), TokenRatio(), Clip(0.2, 0.2), TokenMean(), (ValueLoss(1.0, 0.2),),
    ),
    Objective(
        "prpo", "PRPO: process rewards of segments beside the outcome", "2601.07182",
        SegmentAdvantage(), TokenRatio(), Clip(0.2, 0.2), SequenceMean(), (ReferenceKL(0.001, "k3"),),
    ),
    Objective(
        "skpo", "SKPO: a shared prefix and what follows it, each with a credit of its own", "2604.08690",
        SharedPrefixAdvantage(), TokenRatio(), PrefixAndRest(0.2, 0.28, 0.2, 0.2), LevelMean(0.5),
    ),
    Objective(
        "dpo", "DPO on the best and the worst response of a group", "2305.18290",
        BestAgainstWorst(), NoRatio(), DPO(0.1), GroupMean(),
    ),
    Objective(
        "orpo", "ORPO on the best and the worst response of a group", "2403.07691",
        BestAgainstWorst(), NoRatio(), ORPO(0.1), GroupMean(),
    ),
)  # fmt: skip
