"""The table of the rules: what each finding means and what to try, causes before what they lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tepo.diagnosis import looks
from tepo.diagnosis.evidence import ENOUGH, Evidence

Look = Callable[[Evidence], str | None]
Which = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Rule:
    """look: what is seen, with numbers and steps, or None. says: what that means; when: the condition in words; why: of
    the threshold; advice: what to try. which: the responses that show it."""

    name: str
    says: str
    when: str
    why: str
    advice: tuple[str, ...]
    look: Look
    which: Which | None = None


@dataclass(frozen=True)
class Finding:
    """A rule that applies, and what it saw."""

    rule: Rule
    evidence: str

    @property
    def text(self) -> str:
        """One paragraph."""
        return f"{self.rule.says}: {self.evidence}. Try: {'; '.join(self.rule.advice)}"


def diagnose(evidence: Evidence) -> list[Finding]:
    """What is wrong now, the most likely cause first."""
    seen = ((rule, rule.look(evidence)) for rule in RULES)
    return [Finding(rule, what) for rule, what in seen if what is not None]


def _is(*statuses: str) -> Which:
    return lambda response: response["status"] in statuses


RULES: tuple[Rule, ...] = (
    Rule(
        "unreadable_golds", "Gold answers cannot be read",
        f"at least {looks.GOLDS:.0%} of the training problems were left out for it",
        "public data sets have some in a thousand; more means another column, or another verifier",
        ("data.columns.answer: is it the final answer alone?", "the verifier that fits them, reward.verifier="),
        looks.unreadable_golds,
    ),
    Rule(
        "judging_fails", "Judging fails",
        f"error or timeout for at least {looks.JUDGING:.0%} of the answers",
        "a hostile answer now and then is expected; one in twenty is a fault of the verifier or its limits",
        ("the reasons below", "reward.timeout and reward.memory_mb", "your own verifier on these responses"),
        looks.judging_fails, _is("error", "timeout"),
    ),
    Rule(
        "gradient_not_finite", "Gradients are not finite", "a step of the newest rollouts was skipped for it",
        "a healthy run has none",
        ("a lower trainer.learning_rate", "model.dtype=fp32", "trainer.warmup_steps"), looks.gradient_not_finite,
    ),
    Rule(
        "kl_explodes", "The policy jumps away from the one that sampled",
        f"approx_kl above {looks.KL:g} nats a token at some step, and the reward is not back since",
        "healthy runs stay below 0.02; at half a nat a token the samples say nothing of the policy any more",
        ("trainer.learning_rate a tenth of what it is", "trainer.warmup_steps=10", "a smaller trainer.max_grad_norm",
         "objective.ref_kl"),
        looks.kl_explodes,
    ),
    Rule(
        "ratio_noise", "Rounding weighs as much as learning",
        f"for more than {looks.NOISE:.0%} of the tokens sampling and scoring differ by more than the clip range",
        "the clip then decides by noise which tokens learn",
        ("model.dtype=fp32", "a wider objective.clip_low and objective.clip_high",
         "rollout.correction=truncated, which weighs tokens by the difference"),
        looks.ratio_noise,
    ),
    Rule(
        "too_few_updates", "Too few updates per rollout for TEPO", "trainer.updates_per_rollout is 1",
        "ratio, clip and mask act from the second update of a rollout on",
        ("trainer.updates_per_rollout=4: 2 or more updates make the difference",), looks.too_few_updates,
    ),
    Rule(
        "nothing_moves", "The weights do not move",
        f"log-probs change by at most {looks.STILL:g} between updates, or by less than sampling and scoring differ",
        "updates below half the spacing of floating-point numbers are lost: Adam moves a weight by about the rate",
        ("a learning rate ten or a hundred times as large", "trainer.warmup_steps and the schedule: is the rate ever "
         "reached?"),
        looks.nothing_moves,
    ),
    Rule(
        "reward_hacked", "The reward rises and the accuracy falls",
        f"held-out accuracy more than {looks.HACKED:.0%} below its best, intervals apart, "
        "training reward above what it was",
        "ten points are more than chance between evaluations; the policy is paid for something else than being right",
        ("what the reward pays besides the answer: reward.format, reward.partial, reward.overlong, your own verifier",
         "golds of the training data", "an earlier checkpoint", "objective.ref_kl"),
        looks.reward_hacked,
    ),
    Rule(
        "truncated", "Answers are cut off", f"at least {looks.TRUNCATED:.0%} of the responses, from the start on",
        "what is cut off is not paid: with a third of them the reward is about length first",
        ("a larger rollout.max_response_tokens", "an instruction to be brief (data.instruction)",
         "trainer.overlong_filtering=true"),
        looks.truncated, lambda response: response["finish_reason"] == "length",
    ),
    Rule(
        "format_never_learned", "The format is never learned",
        f"no response matched it in {ENOUGH} rollouts, or at most {looks.FORMAT:.0%} after {looks.FORMAT_ROLLOUTS}",
        "what never happens is never paid, and cannot be learned by sampling",
        ("reward.format.pattern: does it match an answer that you wrote yourself?",
         "say in data.instruction what is wanted, with an example", "a few demonstrations first (fine-tuning)"),
        looks.format_never_learned,
    ),
    Rule(
        "unreadable_answers", "Answers cannot be read",
        f"unparsable or missing in at least {looks.UNREADABLE:.0%} of the responses, truncated ones not counted",
        "the reward is then about the form of the answer first",
        ("data.instruction: say how the answer is to be given", "the verifier that fits it, reward.verifier=",
         "reward.format: a small bonus for the form"),
        looks.unreadable_answers, _is("unparsable", "no_answer"),
    ),
    Rule(
        "data_repeated", "The same problems come again and again", f"each was asked {looks.EPOCHS} times or more",
        "answers are then remembered rather than found; runs on a handful of problems are the exception",
        ("more problems (data.max_problems, another data set)", "fewer trainer.steps",
         "watch the held-out accuracy: evaluation.every"),
        looks.data_repeated,
    ),
    Rule(
        "entropy_explodes", "The entropy explodes",
        f"{looks.EXPLODED:g} times that of the start, and {looks.NATS:g} nats more",
        "a policy that learns gets surer; this one forgets how to write",
        ("a smaller objective.entropy_bonus, or none", "a lower trainer.learning_rate",
         "objective.clip_high: a smaller one"),
        looks.entropy_explodes,
    ),
    Rule(
        "length_runs_away", "Responses run away in length",
        f"{looks.LONGER:g} times those of the start without being right more often, "
        f"or {looks.TRUNCATED:.0%} more are truncated",
        "longer answers that are right more often are fine (and how reasoning grows); these are not",
        ("reward.overlong, a soft punishment", "objective.aggregate=token_mean or constant_length",
         "a lower trainer.learning_rate"),
        looks.length_runs_away, lambda response: response["finish_reason"] == "length",
    ),
    Rule(
        "reward_constant", "The reward does not tell right from wrong",
        f"in at least {looks.FLAT:.0%} of the groups all rewards are equal, though they hold right and wrong answers",
        "without a difference within a group there is no advantage",
        ("reward.correct and reward.wrong: do they differ?", "reward.missing_end, reward.overlong"),
        looks.reward_constant,
    ),
    Rule(
        "all_wrong", "The reward is flat: every answer is wrong",
        f"so it is in at least {looks.FLAT:.0%} of the groups",
        "advantages are differences within a group; one group in twenty is too little to learn from",
        ("easier problems, or a stronger model", "more trainer.responses_per_prompt, so that one may be right",
         "the golds: are the answers below really wrong?", "reward.partial=true where the verifier has scores",
         "trainer.stop_without_signal=N ends such a run"),
        looks.all_wrong, _is("wrong"),
    ),
    Rule(
        "no_difference", "The reward is flat: every prompt is all right or all wrong",
        f"so it is in at least {looks.FLAT:.0%} of the groups, with some of both",
        "a policy learns from prompts that it gets right now and then; these are solved, or out of its reach",
        ("problems between the two", "more trainer.responses_per_prompt", "trainer.dynamic_sampling=true",
         "rollout.temperature: do the responses differ at all?", "trainer.stop_without_signal=N ends such a run"),
        looks.no_difference,
    ),
    Rule(
        "everything_clipped", "Nearly everything is clipped",
        f"at least {looks.CLIPPED:.0%} of the tokens in the later updates of a rollout, and log ratios {looks.BEYOND} "
        "times the clip range",
        "only what moves on in the direction of its advantage is clipped, about half at most; GSPO as published is "
        "at 20 times its range: it is the first update alone that then teaches",
        ("a wider objective.clip_low and objective.clip_high (a ratio of single tokens needs 0.2, one of whole "
         "responses 2e-3)", "a lower trainer.learning_rate", "fewer trainer.updates_per_rollout"),
        looks.everything_clipped,
    ),
    Rule(
        "mask_empty", "The KL mask is always empty",
        f"at most {looks.EMPTY:.0%} of the tokens with an advantage above 0",
        "the term then does nothing; entropy falls on a third or more of them in healthy runs",
        ("more trainer.updates_per_rollout", "a higher trainer.learning_rate",
         "objective.kl_mask.entropy_test=measured"),
        looks.mask_empty,
    ),
    Rule(
        "mask_full", "The KL mask holds everything",
        f"at least {looks.FULL:.0%} of the tokens with an advantage above 0",
        "the term then is a KL to the old policy on every success, and no choice of tokens",
        ("a smaller objective.kl_mask.beta", "a lower trainer.learning_rate: the entropy falls everywhere"),
        looks.mask_full,
    ),
    Rule(
        "entropy_collapses", "The entropy collapses",
        f"below {looks.COLLAPSED:.0%} of that of the start, at an accuracy below {looks.SOLVED:.0%}",
        "a solved task needs no entropy; an unsolved one needs samples that differ",
        ("a larger objective.clip_high (0.28, DAPO)", "objective.entropy_bonus=0.001", "objective.kl_mask.beta=0.1",
         "a lower trainer.learning_rate"),
        looks.entropy_collapses,
    ),
    Rule(
        "all_right", "The reward is flat: every answer is right",
        f"so it is in at least {looks.FLAT:.0%} of the groups",
        "a group that is all right has no advantage: time goes into nothing",
        ("stop here, or harder problems", "trainer.dynamic_sampling=true", "the verifier: does it accept anything?"),
        looks.all_right, _is("correct"),
    ),
)  # fmt: skip
"""Causes before consequences: a run whose answers are all cut off has a flat reward too."""
