"""How far the policy has moved from where it began, measured afterwards on the responses that a run keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from tepo.errors import TepoError
from tepo.evaluate.session import AUTOCAST, pick_device
from tepo.files import replace_text
from tepo.policy import Policy, Row, load_model
from tepo.report.run import Run
from tepo.train.microbatch import plan_microbatches

ROLLOUTS, RESPONSES, TOKENS = 20, 128, 2**14
"""Of a run that are measured at most; and of each of them."""

SAVED = "kl_to_start.json"


@dataclass(frozen=True)
class Drift:
    """kl: KL(policy || policy before training) of the rollout sampled after `step`, nats a response, with its
    standard error. responses: how many it was measured on."""

    step: int
    kl: float
    error: float
    responses: int


def measured(run: Run) -> list[Drift]:
    """What was measured before and lies in the run folder."""
    path = run.folder / SAVED
    if not path.is_file():
        return []
    return [Drift(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def measure(run: Run) -> list[Drift]:
    """The divergence at some rollouts of a run, evenly spread, those before its evaluations among them.

    The mean over responses of log pi(response) - log pi_start(response), under the policy that sampled them: Monte
    Carlo, without bias, one forward pass of the starting model. (The sum of k3 has no bias either, but rare tokens
    that only the start finds likely give it a variance without bound.) Kept in the run folder: nothing is measured
    twice. Empty when the run keeps no tokens (rollout.save_tokens). Raises TepoError when its model cannot be loaded.
    """
    known = {drift.step: drift for drift in measured(run)}
    missing = [rollout for rollout in _chosen(run) if run.step_of(rollout) not in known]
    if missing:
        policy = starting_policy(run)
        for rollout in missing:
            known[run.step_of(rollout)] = _of_rollout(run, rollout, policy)
        replace_text(run.folder / SAVED, json.dumps([asdict(known[step]) for step in sorted(known)]) + "\n")
    return [known[step] for step in sorted(known)]


def starting_policy(run: Run) -> Policy:
    """The policy before training, frozen."""
    recipe = run.recipe
    config = recipe.model.model_copy(update={"lora": None, "gradient_checkpointing": False})
    model, tokenizer = load_model(config, trainable=False)
    model.to(pick_device(recipe.model.device))  # type: ignore[arg-type]
    return Policy(model, tokenizer, recipe.rollout.temperature, AUTOCAST[recipe.model.dtype])


def _chosen(run: Run) -> list[int]:
    stored = [rollout for rollout in run.rollouts() if run.tokens_path(rollout).is_file()]
    if not stored:
        return []
    before = [[r for r in stored if run.step_of(r) <= entry["step"]] for entry in run.evaluations]
    return sorted({*_spread(stored), *_spread([rollouts[-1] for rollouts in before if rollouts])})


def _spread(rollouts: Sequence[int]) -> Sequence[int]:
    """At most ROLLOUTS of them, the first and the last among them."""
    if len(rollouts) <= ROLLOUTS:
        return rollouts
    return [rollouts[i * (len(rollouts) - 1) // (ROLLOUTS - 1)] for i in range(ROLLOUTS)]


def _of_rollout(run: Run, rollout: int, policy: Policy) -> Drift:
    tokens = run.tokens(rollout)
    count = len(tokens.lengths)
    most = max(2, min(RESPONSES, TOKENS * count // max(int(tokens.lengths.sum()), 1)))
    kept = sorted({i * count // most for i in range(most)}) if count > most else list(range(count))
    rows = [Row(tokens.prompt(i), tokens.ids[tokens.response(i)].tolist()) for i in kept]
    if any(token >= policy.vocabulary for row in rows for token in row.response):
        raise TepoError(f"{run.folder}: the tokens of its rollouts are not those of model {run.recipe.model.name!r}")
    start = score(policy, rows, run.recipe.trainer.tokens_per_microbatch)
    now = [float(tokens.logp[tokens.response(i)].double().sum()) for i in kept]
    sums = torch.tensor([here - float(there.sum()) for here, there in zip(now, start, strict=True)])
    error = float(sums.std() / len(sums) ** 0.5) if len(sums) > 1 else 0.0
    return Drift(run.step_of(rollout), float(sums.mean()), error, len(sums))


def score(policy: Policy, rows: Sequence[Row], budget: int) -> list[torch.Tensor]:
    """Log-probs [tokens] float64 of each row's response, without a gradient."""
    out: dict[int, torch.Tensor] = {}
    with policy.evaluating():
        for part in plan_microbatches(rows, budget, padded=not policy.packs):
            logp = policy.score([rows[i] for i in part]).logp.double().cpu()
            out |= dict(zip(part, torch.split(logp, [len(rows[i].response) for i in part]), strict=True))
    return [out[i] for i in range(len(rows))]
