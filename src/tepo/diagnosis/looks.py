"""What the rules see: small functions from the evidence to numbers and steps in words, or None when all is well."""

from __future__ import annotations

import math

from tepo.diagnosis.evidence import RECENT, Evidence

GOLDS = 0.02
JUDGING = 0.05
KL = 0.5
NOISE = 0.1
STILL = 1e-6
TRUNCATED = 0.3
FORMAT, FORMAT_ROLLOUTS = 0.05, 20
UNREADABLE = 0.3
HACKED = 0.1
EPOCHS = 20
FLAT = 0.95
CLIPPED, BEYOND = 0.4, 50
EMPTY, FULL = 0.01, 0.98
COLLAPSED, SOLVED = 0.1, 0.9
EXPLODED, NATS = 3.0, 0.1
LONGER = 1.5
"""Thresholds; the table of the rules says what each is compared with, and why it is what it is."""


def unreadable_golds(run: Evidence) -> str | None:
    lost = {reason: count for reason, count in run.dropped.items() if reason.startswith("gold answers")}
    total = sum(lost.values()) + (run.problems or 0)
    if not total or sum(lost.values()) / total < GOLDS:
        return None
    return f"{sum(lost.values())} of {total} training problems were left out: {'; '.join(lost)}"


def judging_fails(run: Evidence) -> str | None:
    error, timeout = run.recent("verdict/error") or 0.0, run.recent("verdict/timeout") or 0.0
    if error + timeout < JUDGING:
        return None
    return f"{error:.0%} of the answers since step {run.since()} ended the verifier in an error, {timeout:.0%} in time"


def gradient_not_finite(run: Evidence) -> str | None:
    steps = [int(row["step"]) for row in run.rows(run.rollouts[-RECENT:]) if row.get("skipped")]
    return f"the gradient was not finite at {_some(steps)}; those steps were skipped" if steps else None


def kl_explodes(run: Evidence) -> str | None:
    """At some step, and what the policy could do then has not come back."""
    steps = [
        (int(row["step"]), row["approx_kl"])
        for row in run.rows()
        if not row.get("approx_kl", 0.0) <= KL  # a NaN too
    ]
    if not steps:
        return None
    before, now = run.early("reward"), run.recent("reward")
    if steps[-1][0] < run.since() and before is not None and now is not None and now >= before:
        return None
    step, most = max(steps, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
    return (
        f"the policy moved {most:.3g} nats a token away from the one that sampled at step {step} (first at step "
        f"{steps[0][0]}, {len(steps)} steps in all); reward {before:.2f} at the start, {now:.2f} now"
    )


def ratio_noise(run: Evidence) -> str | None:
    beyond = run.recent("mismatch_beyond")
    bounds = run.objective.clip_range
    if beyond is None or bounds is None or beyond <= NOISE:
        return None
    return (
        f"for {beyond:.0%} of the tokens the policy that sampled differs from the one that is trained by more than an "
        f"update may change it (mean difference of log-probs {run.recent('mismatch'):.1e}, clip range -{bounds[0]:g} "
        f"to +{bounds[1]:g}; rollout.correction={run.recipe.rollout.correction})"
    )


def too_few_updates(run: Evidence) -> str | None:
    if run.recipe.trainer.updates_per_rollout > 1 or not run.objective.name.startswith("tepo"):
        return None
    return (
        "with trainer.updates_per_rollout = 1 the policy is still the one that sampled: every ratio is 1, nothing is "
        "clipped, the entropy has not changed and the KL mask is empty. TEPO is then DAPO without clip-higher"
    )


def nothing_moves(run: Evidence) -> str | None:
    """While the learning rate is at its height and there is a gradient."""
    highest = max((row["learning_rate"] for row in run.rows()), default=0.0)
    moved, norm, noise = run.moved("log_ratio_abs"), run.recent("grad_norm"), run.recent("mismatch") or 0.0
    full = (run.recent("learning_rate") or 0.0) >= highest / 2
    if not run.enough or not full or moved is None or not norm or moved > max(STILL, noise):
        return None
    return (
        f"at a learning rate of {highest:.1e} and gradient norms of {norm:.2g}, log-probs changed by {moved:.1e} "
        f"between the updates of one rollout since step {run.since()}; fp32 keeps 6e-8 of a weight's size, bf16 4e-3"
    )


def truncated(run: Evidence) -> str | None:
    share, first = run.recent("response/truncated"), run.early("response/truncated")
    if not run.enough or share is None or first is None or min(share, first) < TRUNCATED:
        return None
    return (
        f"{share:.0%} of the responses since step {run.since()} have no end token after "
        f"rollout.max_response_tokens={run.recipe.rollout.max_response_tokens}, {first:.0%} at the start"
    )


def format_never_learned(run: Evidence) -> str | None:
    found = run.recent("formatted")
    if run.recipe.reward.format is None or found is None or not run.enough:
        return None
    never = not any(row.get("formatted") for row in run.rows())
    if not never and (found > FORMAT or len(run.rollouts) < FORMAT_ROLLOUTS):
        return None
    seen = "none of the responses" if never else f"{found:.1%} of the responses since step {run.since()}"
    return f"{seen} in {len(run.rollouts)} rollouts matched {run.recipe.reward.format.pattern!r}"


def unreadable_answers(run: Evidence) -> str | None:
    unparsable, missing = run.recent("verdict/unparsable") or 0.0, run.recent("verdict/no_answer") or 0.0
    cut = run.recent("response/truncated") or 0.0
    if not run.enough or unparsable + missing - cut < UNREADABLE:
        return None
    return (
        f"{unparsable:.0%} of the answers since step {run.since()} could not be read and {missing:.0%} of the "
        f"responses have none, while {cut:.0%} are truncated"
    )


def reward_hacked(run: Evidence) -> str | None:
    """The held-out accuracy fell from its best, and the training reward rose meanwhile."""
    curve = [(entry["step"], entry["sampled"]) for entry in run.evaluations if "sampled" in entry]
    if len(curve) < 2 or not run.enough:
        return None
    (best_step, best), (last_step, last) = max(curve, key=lambda pair: float(pair[1]["accuracy"])), curve[-1]
    first = run.rollouts[0][-1]["step"]
    then = [row["reward"] for row in run.rows() if row["step"] <= max(best_step, first)]
    before, now = then[-1], run.recent("reward")
    fell = best["accuracy"] - last["accuracy"] > HACKED and best["interval"][0] > last["interval"][1]
    if not fell or now is None or now <= before:
        return None
    return (
        f"held-out accuracy fell from {best['accuracy']:.1%} at step {best_step} to {last['accuracy']:.1%} at step "
        f"{last_step}, while the training reward rose from {before:.2f} to {now:.2f}"
    )


def data_repeated(run: Evidence) -> str | None:
    if not run.problems:
        return None
    asked = len(run.rollouts) * run.recipe.trainer.prompts_per_rollout
    if asked / run.problems < EPOCHS:
        return None
    return f"the {run.problems} training problems were asked {asked / run.problems:.0f} times each by step {run.step}"


def all_wrong(run: Evidence) -> str | None:
    share = run.recent("groups/all_wrong")
    if not run.enough or share is None or share < FLAT:
        return None
    return f"in {share:.0%} of the groups since step {run.since()} every answer was wrong: nothing tells good from bad"


def all_right(run: Evidence) -> str | None:
    share = run.recent("groups/all_correct")
    if not run.enough or share is None or share < FLAT:
        return None
    return f"in {share:.0%} of the groups since step {run.since()} every answer was right: nothing is left to learn"


def reward_constant(run: Evidence) -> str | None:
    same, wrong, right = (run.recent(f"groups/{name}") for name in ("zero_variance", "all_wrong", "all_correct"))
    if not run.enough or same is None or wrong is None or right is None or same < FLAT or wrong + right >= same / 2:
        return None
    reward = run.recipe.reward
    return (
        f"in {same:.0%} of the groups since step {run.since()} all rewards are equal, though right and wrong answers "
        f"are in them: reward.correct={reward.correct:g}, reward.wrong={reward.wrong:g}"
    )


def no_difference(run: Evidence) -> str | None:
    same, wrong, right = (run.recent(f"groups/{name}") for name in ("zero_variance", "all_wrong", "all_correct"))
    if not run.enough or same is None or wrong is None or right is None or same < FLAT:
        return None
    if max(wrong, right) >= FLAT or wrong + right < same / 2:  # other rules say what it is
        return None
    return (
        f"in {same:.0%} of the groups since step {run.since()} all rewards are equal: every answer is right in "
        f"{right:.0%} of the groups, wrong in {wrong:.0%}"
    )


def everything_clipped(run: Evidence) -> str | None:
    share, bounds, moved = run.moved("clip_fraction"), run.objective.clip_range, run.moved("log_ratio_abs")
    if not run.enough or share is None or bounds is None or moved is None:
        return None
    if share < CLIPPED or moved < BEYOND * max(bounds):
        return None
    return (
        f"{share:.0%} of the tokens are clipped in the later updates of the rollouts since step {run.since()} (about "
        f"half is all there can be): log ratios of {moved:.1e} on average, clip range -{bounds[0]:g} to +{bounds[1]:g}"
    )


def _masked(run: Evidence) -> tuple[float, float] | None:
    """Of the tokens in the later updates: the share in the KL mask, and that with an advantage above 0."""
    share, positive = run.moved("kl_mask_fraction"), run.moved("positive_fraction")
    return None if not run.enough or share is None or not positive else (share, positive)


def mask_empty(run: Evidence) -> str | None:
    masked = _masked(run)
    if masked is None or masked[0] > EMPTY * masked[1]:
        return None
    return _mask_text(masked, run)


def mask_full(run: Evidence) -> str | None:
    masked = _masked(run)
    if masked is None or masked[0] < FULL * masked[1]:
        return None
    return _mask_text(masked, run)


def _mask_text(masked: tuple[float, float], run: Evidence) -> str:
    return (
        f"of the {masked[1]:.0%} of tokens with an advantage above 0 the KL mask held {masked[0] / masked[1]:.1%}, "
        f"in the later updates since step {run.since()}"
    )


def entropy_collapses(run: Evidence) -> str | None:
    first, now, accuracy = run.early("entropy"), run.recent("entropy"), run.recent("accuracy")
    if not run.enough or first is None or now is None or accuracy is None:
        return None
    if now > COLLAPSED * first or accuracy >= SOLVED:
        return None
    return (
        f"{first:.3g} nats a token at the start, {now:.2g} since step {run.since()}, at an accuracy of {accuracy:.0%}"
    )


def entropy_explodes(run: Evidence) -> str | None:
    first, now = run.early("entropy"), run.recent("entropy")
    if not run.enough or first is None or now is None or now < max(EXPLODED * first, first + NATS):
        return None
    return f"{first:.3g} nats a token at the start, {now:.3g} since step {run.since()}"


def length_runs_away(run: Evidence) -> str | None:
    first, now = run.early("response/tokens"), run.recent("response/tokens")
    cut, cut_first = run.recent("response/truncated") or 0.0, run.early("response/truncated") or 0.0
    before, accuracy = run.early("accuracy") or 0.0, run.recent("accuracy") or 0.0
    if not run.enough or first is None or now is None:
        return None
    longer = now >= LONGER * first and accuracy <= before
    if not longer and cut - cut_first < TRUNCATED:
        return None
    return (
        f"{first:.0f} tokens a response at the start, {now:.0f} since step {run.since()}; truncated {cut_first:.0%} "
        f"and {cut:.0%}; accuracy {before:.0%} and {accuracy:.0%}"
    )


def _some(steps: list[int], most: int = 5) -> str:
    shown = ", ".join(map(str, steps[:most]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (
        f" and {len(steps) - most} more" if len(steps) > most else ""
    )
