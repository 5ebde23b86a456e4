"""Where objectives send the gradient: the derivative of each loss by the log-prob of each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.errors import TepoError
from tepo.objectives import Objective, TokenBatch, get_objective
from tepo.policy import Policy
from tepo.report.inspect_subject import Subject
from tepo.train.microbatch import plan_microbatches

GIVEN = frozenset(
    {
        "logp",
        "old_logp",
        "entropy",
        "entropy_gradient",
        "old_entropy",
        "entropy_direction",
        "ref_logp",
        "shared",
        "selected",
    }
)
"""What a batch made from stored tokens can have (`TokenBatch`)."""

CHUNK = 2**24
"""Logits computed at once for the likeliest tokens."""


@dataclass(frozen=True)
class View:
    """What a policy says of the N scored tokens of all responses, row after row; logp and entropy [N] float64.

    top_ids, top_probs: [N, K] the likeliest tokens at each place.
    """

    logp: Tensor
    entropy: Tensor
    entropy_direction: Tensor
    top_ids: Tensor
    top_probs: Tensor


@dataclass(frozen=True)
class Credit:
    """What an objective does with N tokens; NaN and False where a token is not in its loss.

    weight: -N dL/dlogp of the loss L of the step that these responses make: above 0, the update makes the token
        likelier. It is the token's advantage where the ratio is 1 and all tokens weigh the same.
    log_ratio, advantage: as the objective takes them. clipped, masked: [N] bool.
    """

    weight: Tensor
    log_ratio: Tensor
    advantage: Tensor
    clipped: Tensor
    masked: Tensor


def view(policy: Policy, subject: Subject, top: int) -> View:
    """One forward pass over all responses."""
    rows = [shown.row for shown in subject.shown]
    parts: dict[int, tuple[Tensor, ...]] = {}
    with policy.evaluating():
        for part in plan_microbatches(rows, subject.recipe.trainer.tokens_per_microbatch, padded=not policy.packs):
            scores = policy.score([rows[i] for i in part], entropy_direction=True)
            assert scores.entropy_direction is not None
            found = (
                scores.logp.double(), scores.entropy.double(), scores.entropy_direction.double(),
                *_likeliest(policy, scores.hidden, top),
            )  # fmt: skip
            lengths = [len(rows[i].response) for i in part]
            split = [torch.split(values.cpu(), lengths) for values in found]
            parts |= {i: tuple(values[place] for values in split) for place, i in enumerate(part)}
    return View(*(torch.cat([parts[i][field] for i in range(len(rows))]) for field in range(5)))


def _likeliest(policy: Policy, hidden: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities [N, K] of the likeliest tokens, at the policy's temperature."""
    ids, probs = [], []
    for part in torch.split(hidden, max(1, CHUNK // policy.vocabulary)):
        distribution = torch.softmax(policy.head(part) / policy.temperature, dim=-1)
        best = distribution.topk(min(top, policy.vocabulary), dim=-1)
        ids.append(best.indices)
        probs.append(best.values)
    return torch.cat(ids), torch.cat(probs)


def make_batch(subject: Subject, seen: View, reference: Sequence[Tensor] | None) -> TokenBatch:
    """The shown responses as one optimizer step, without advantages. reference: log-probs by the frozen reference.

    Where training kept no old scores the sampled log-probs stand for them, and the entropy counts as unchanged.
    """
    shown = subject.shown
    lengths = torch.tensor([len(one.logp) for one in shown])
    sampled = torch.cat([one.logp for one in shown]).double()
    old_logp = torch.cat([one.old_logp for one in shown]).double()
    old_entropy = torch.cat([one.old_entropy for one in shown]).double()
    cuts: dict[int, int] = {}
    for one in shown:
        cuts[one.group] = max(one.given, cuts.get(one.group, 0))
    # The response of a group that its prefix is scored with is the one that it was not given to.
    shared = [torch.arange(len(one.logp)) < cuts[one.group] - one.given for one in shown]
    return TokenBatch(
        logp=seen.logp,
        old_logp=torch.where(old_logp.isnan(), sampled, old_logp),
        sequence=torch.arange(len(shown)).repeat_interleave(lengths),
        group=torch.tensor([one.group for one in shown]),
        entropy=seen.entropy,
        old_entropy=torch.where(old_entropy.isnan(), seen.entropy, old_entropy),
        entropy_direction=seen.entropy_direction,
        ref_logp=None if reference is None else torch.cat(list(reference)),
        shared=torch.cat(shared),
    )


def objectives(names: Sequence[str], own: Objective | None) -> dict[str, Objective]:
    """By the name to show: the run's own, then those named. Raises TepoError for what cannot be looked at."""
    found: dict[str, Objective] = {}
    if own is not None:
        found[f"{own.name} (this run)"] = _without_values(own)
    for name in names:
        try:
            objective = get_objective(name)
        except ValueError as error:
            raise TepoError(f"--objectives {name}: {error}") from None
        if own is None or objective != own:
            found[objective.name] = objective
    for label, objective in found.items():
        needed = objective.needs if label.endswith("(this run)") else objective.reads
        if lacking := needed - GIVEN:
            raise TepoError(
                f"objective {label}: reads {', '.join(sorted(lacking))}, which no run keeps; --objectives names others"
            )
    return found


def _without_values(objective: Objective) -> Objective:
    """Without the loss of a critic, which no log-prob of the policy is in."""
    return dataclasses.replace(objective, terms=tuple(t for t in objective.terms if "values" not in t.needs))


def credit(label: str, objective: Objective, batch: TokenBatch, subject: Subject) -> Credit:
    """The weights of one objective, by autograd on its own loss."""
    count, nan = batch.num_tokens, torch.full_like(batch.logp, torch.nan)
    advantages = _advantages(label.endswith("(this run)"), objective, batch, subject)
    assert subject.lengths is not None
    assert subject.chosen is not None
    counted = (subject.lengths[subject.chosen] > 0)[batch.sequence]  # overlong filtering leaves responses out
    logp = batch.logp.clone().requires_grad_()
    assert batch.entropy is not None
    whole = dataclasses.replace(
        batch, logp=logp, entropy=batch.entropy.clone().requires_grad_(), advantages=advantages
    ).keep(counted)
    torch.manual_seed(0)  # for objectives that draw tokens
    prepared = objective.prepare(whole)
    out = objective(prepared)
    gradient = torch.autograd.grad(out.loss, logp, allow_unused=True)[0]
    gradient = torch.zeros_like(logp) if gradient is None else gradient
    kept = torch.arange(count)[counted]
    if objective.selection is not None and objective.selection.use == "keep":
        assert prepared.selected is not None
        kept = kept[prepared.selected]
    in_loss = torch.zeros(count, dtype=torch.bool).index_fill(0, kept, True)

    def spread(name: str, blank: Tensor) -> Tensor:
        values = out.tokens.get(name)
        return blank if values is None else blank.index_copy(0, kept, values.to(blank.dtype))

    return Credit(
        weight=torch.where(in_loss, -len(kept) * gradient, nan),
        log_ratio=spread("log_ratio", nan),
        advantage=spread("advantage", nan),
        clipped=spread("clipped", torch.zeros(count, dtype=torch.bool)),
        masked=spread("kl_mask", torch.zeros(count, dtype=torch.bool)),
    )


def _advantages(own: bool, objective: Objective, batch: TokenBatch, subject: Subject) -> Tensor:
    """[N]: those that the run trained with for its own objective; else from the rewards of the whole rollout."""
    stored = [one.advantages for one in subject.shown if one.advantages is not None]
    if own and len(stored) == len(subject.shown):
        return torch.cat(stored).double().nan_to_num()
    assert subject.rewards is not None
    assert subject.groups is not None
    assert subject.chosen is not None
    if objective.advantage.needs:
        rewards = subject.rewards[subject.chosen]
        return objective.token_advantages(dataclasses.replace(batch, rewards=rewards))
    whole = objective.advantages(subject.rewards, subject.groups, subject.lengths)
    return whole[subject.chosen][batch.sequence].to(batch.old_logp.dtype)


def all_credits(batch: TokenBatch, subject: Subject, chosen: Mapping[str, Objective]) -> dict[str, Credit]:
    """The weights of each objective, by the name to show."""
    return {label: credit(label, objective, batch, subject) for label, objective in chosen.items()}
