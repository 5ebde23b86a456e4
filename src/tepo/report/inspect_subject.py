"""What is inspected: some responses with all that is known of them, and the policy that looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tepo.config import Recipe
from tepo.data import Problem, render_prompt
from tepo.errors import TepoError
from tepo.evaluate.plan import recipe_for
from tepo.evaluate.session import AUTOCAST, pick_device
from tepo.objectives import Objective, at_rollout
from tepo.policy import Policy, Row, load_model
from tepo.report.run import Record, Run
from tepo.rewards import judge_math
from tepo.rollout import Sampling, open_engine
from tepo.seeds import derive_seed

TOKENS = 2**18
"""That one page shows at most; whole groups, the first of them in any case."""


@dataclass(frozen=True)
class Shown:
    """One response. given: leading tokens that were given to it, and are not scored. group: its prompt.

    Tensors [scored tokens] float32 from the time of sampling: logp as sampled; old_logp and old_entropy by the policy
    before its updates, NaN where training did not need them; advantages as trained with, where they vary within it.
    """

    record: Record
    group: int
    prompt: list[int]
    ids: list[int]
    given: int
    logp: Tensor
    old_logp: Tensor
    old_entropy: Tensor
    advantages: Tensor | None = None

    @property
    def row(self) -> Row:
        """What is given and what is scored."""
        return Row([*self.prompt, *self.ids[: self.given]], self.ids[self.given :])


@dataclass(frozen=True)
class Subject:
    """Responses to look at.

    rewards, groups, lengths: [R] of the whole rollout, from which advantages are made; chosen: [S] which of them are
        shown. None without rewards. objective: of the run.
    """

    title: str
    lead: str
    recipe: Recipe
    policy: Policy
    shown: list[Shown]
    rewards: Tensor | None = None
    groups: Tensor | None = None
    lengths: Tensor | None = None
    chosen: Tensor | None = None
    objective: Objective | None = None


def of_run(run: Run, rollout: int | None, checkpoint: int | None, count: int) -> Subject:
    """Responses of a stored rollout, looked at by the first checkpoint after it unless another one is named.

    rollout: the last one that its run kept tokens of and that has a checkpoint after it, if none is named. count:
    responses; whole groups, those with different rewards first. Raises TepoError when something of it is not stored.
    """
    rollout, step = _place(run, rollout, checkpoint)
    records, tokens = list(run.responses(rollout)), run.tokens(rollout)
    if len(records) != len(tokens.lengths):
        raise TepoError(
            f"{run.folder}: rollout {rollout} has {len(records)} texts and {len(tokens.lengths)} rows of tokens"
        )
    lengths: list[int] = (tokens.lengths - tokens.prefixes).tolist()
    if run.recipe.trainer.overlong_filtering:
        lengths = [0 if record["finish_reason"] == "length" else n for record, n in zip(records, lengths, strict=True)]
    rewards = torch.tensor([float(record["reward"]) for record in records], dtype=torch.float64)
    chosen = choose(rewards.tolist(), tokens.groups.tolist(), tokens.lengths.tolist(), count)
    shown = []
    for index in chosen:
        where, given = tokens.response(index), int(tokens.prefixes[index])
        measured = {name: values[where][given:] for name, values in tokens.measured.items()}
        missing = torch.full((int(tokens.lengths[index]) - given,), torch.nan)
        shown.append(
            Shown(
                records[index],
                int(tokens.groups[index]),
                tokens.prompt(index),
                tokens.ids[where].tolist(),
                given,
                tokens.logp[where][given:],
                measured.get("old_logp", missing),
                measured.get("old_entropy", missing),
                measured.get("token_advantages"),
            )
        )
    sampled = run.step_of(rollout)
    return Subject(
        run.name,
        f"Rollout {rollout}, sampled by the policy after step {sampled}, as the policy after step {step} sees it. "
        f"{len(shown)} of its {len(records)} responses.",
        run.recipe,
        _policy(run.recipe, str(run.checkpoints()[step])),
        shown,
        rewards,
        tokens.groups,
        torch.tensor(lengths),
        torch.tensor(chosen),
        at_rollout(run.recipe.objective.build(), rollout + 1),
    )


def of_prompt(model: str, prompt: str, answer: str | None, count: int, overrides: Sequence[str]) -> Subject:
    """Responses of a model to a prompt, sampled now; judged as mathematics where an answer is given.

    A checkpoint brings its run's settings. Raises TepoError for whatever cannot be used.
    """
    recipe = recipe_for(model, None, None, overrides)
    policy = _policy(recipe, None)
    data, rollout = recipe.data, recipe.rollout
    ids = render_prompt(
        Problem("prompt", prompt, answer or ""),
        policy.tokenizer,
        data.template or "auto",
        data.system,
        data.instruction,
    )
    engine = open_engine(recipe, policy, len(ids))
    sampling = Sampling(rollout.temperature, rollout.max_response_tokens, stop=tuple(rollout.stop))
    responses = engine.generate([ids], count, sampling, derive_seed(recipe.seed, "inspect"))[0]
    engine.close()
    shown, rewards = [], []
    for response in responses:
        text = str(policy.tokenizer.decode(list(response.ids), skip_special_tokens=True))
        record: Record = {
            "problem": prompt,
            "response": text,
            "finish_reason": response.finish_reason,
            "tokens": len(response.ids),
        }
        if answer is not None:
            verdict = judge_math(text, answer)
            rewards.append(recipe.reward.correct if verdict.correct else recipe.reward.wrong)
            record |= {
                "status": str(verdict.status),
                "answer": answer,
                "extracted": verdict.extracted,
                "reward": rewards[-1],
            }
        unknown = torch.full((len(response.ids),), torch.nan)
        shown.append(Shown(record, 0, ids, list(response.ids), 0, torch.tensor(response.logps), unknown, unknown))
    subject = Subject(
        Path(model).name,
        f"{count} responses to one prompt, sampled at temperature {rollout.temperature:g}.",
        recipe,
        policy,
        shown,
    )
    if answer is None or count < 2:
        return subject
    return Subject(
        subject.title, subject.lead, recipe, policy, shown,
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(count, dtype=torch.long),
        torch.tensor([len(one.ids) for one in shown]), torch.arange(count),
    )  # fmt: skip


def choose(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], count: int) -> list[int]:
    """Indices of whole groups, in order: those with different rewards first, up to `count` responses and TOKENS."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    order = sorted(members.values(), key=lambda part: len({rewards[i] for i in part}) == 1)
    chosen: list[int] = []
    tokens = 0
    for part in order:
        more = sum(lengths[i] for i in part)
        if chosen and (len(chosen) + len(part) > count or tokens + more > TOKENS):
            break
        chosen += part
        tokens += more
    return sorted(chosen)


def _place(run: Run, rollout: int | None, checkpoint: int | None) -> tuple[int, int]:
    """The rollout, and the step of the checkpoint that looks at it."""
    steps, kept = list(run.checkpoints()), [r for r in run.rollouts() if run.tokens_path(r).is_file()]
    if not steps or not kept:
        what = "a checkpoint" if not steps else "the tokens of a rollout (rollout.save_tokens)"
        raise TepoError(f"{run.folder}: does not hold {what}")
    if checkpoint is not None and checkpoint not in steps:
        raise TepoError(f"--checkpoint {checkpoint}: not stored; those that are: {', '.join(map(str, steps))}")
    if rollout is None:
        newest = steps[-1] if checkpoint is None else checkpoint
        before = [r for r in kept if run.step_of(r) < newest]
        rollout = before[-1] if before else kept[0]
    if checkpoint is None:
        checkpoint = next((step for step in steps if step > run.step_of(rollout)), steps[-1])
    return rollout, checkpoint


def _policy(recipe: Recipe, checkpoint: str | None) -> Policy:
    config = recipe.model if checkpoint is None else recipe.model.model_copy(update={"name": checkpoint})
    model, tokenizer = load_model(config, trainable=False)
    model.to(pick_device(recipe.model.device))  # type: ignore[arg-type]
    return Policy(model, tokenizer, recipe.rollout.temperature, AUTOCAST[recipe.model.dtype])
