"""An objective: one advantage, one ratio, one surrogate, one aggregate and some terms, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo.objectives.advantages import Advantage
from tepo.objectives.aggregates import Aggregate
from tepo.objectives.batch import TokenBatch, Totals, widest
from tepo.objectives.ratios import NoRatio, Ratio
from tepo.objectives.schedule import Linear
from tepo.objectives.selections import Selection
from tepo.objectives.shaping import EntropyShaping
from tepo.objectives.surrogates import Surrogate
from tepo.objectives.terms import KLMask, Term, TermOutput


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective gives for a batch.

    loss: scalar, to be minimised.
    metrics: plain floats; means over the batch's tokens, unless the name ends in `_max` or `loss` (`combine_metrics`).
    tokens: detached [N] values to look at: log_ratio, advantage, clipped, and those of the terms.
    num_tokens: N, the tokens in the loss (all of the batch, unless the objective keeps some alone).
    """

    loss: Tensor
    metrics: dict[str, float]
    tokens: dict[str, Tensor]
    num_tokens: int


@dataclass(frozen=True)
class Objective:
    """L = - sum_t w_t surrogate(ratio_t, A_t) + sum of terms, with weights w that sum over the whole optimizer step.

    `objective(batch)` takes the batch for the whole step; `objective(batch, totals)` takes it for a micro-batch of a
    step whose totals were made by `objective.totals(whole)` (or, without statistics, `whole.totals`).
    """

    name: str
    title: str
    paper: str
    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    aggregate: Aggregate
    terms: tuple[Term, ...] = ()
    selection: Selection | None = None
    shaping: EntropyShaping | None = None
    schedules: tuple[tuple[str, Linear], ...] = ()

    def __post_init__(self) -> None:
        if len({type(term) for term in self.terms}) < len(self.terms):
            raise ValueError(f"objective {self.name} has two terms of one kind")
        if self.selection is None and "selected" in self.needs:
            raise ValueError(f"objective {self.name} has a term for selected tokens (cov_kl) and selects none")
        if len(self._exact_targets) > 1:
            raise ValueError("ref_kl and kl_mask ask for the exact KL to two different targets; one is possible")

    @property
    def _exact_targets(self) -> set[str]:
        exact = [term for term in self.terms if "exact_kl" in term.needs]
        return {term.target if isinstance(term, KLMask) else "reference" for term in exact}

    @property
    def exact_kl_target(self) -> str | None:
        """Whose distribution TokenBatch.exact_kl is measured against: "old", "reference", or None when not needed."""
        return next(iter(self._exact_targets), None)

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of TokenBatch that the objective reads ("entropy_gradient": H must carry a gradient)."""
        parts = [
            *self.terms,
            self.surrogate,
            self.aggregate,
            *(part for part in (self.selection, self.shaping) if part is not None),
        ]
        return frozenset().union(*(part.needs for part in parts))

    @property
    def reads(self) -> frozenset[str]:
        """`needs`, and what its advantage reads of a whole rollout."""
        return self.needs | self.advantage.needs

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy must be kept."""
        return "ref_logp" in self.reads or self.exact_kl_target == "reference"

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far the ratio may fall and rise, where the objective has a ratio and clips it."""
        low, high = (getattr(self.surrogate, side, None) for side in ("low", "high"))
        if low is None or high is None or isinstance(self.ratio, NoRatio):
            return None
        return float(low), float(high)

    @property
    def statistics(self) -> frozenset[str]:
        """Sums that need a pass over the whole step before its micro-batches, besides the counts (`totals`)."""
        return frozenset().union(*(term.statistics for term in self.terms))

    @property
    def needs_whole_step(self) -> bool:
        """Whether a pass over the whole step must come before its micro-batches (`prepare`, `totals`)."""
        return bool(self.statistics) or self.selection is not None

    @property
    def touches_zero_advantage(self) -> bool:
        """Whether a response with zero advantage can have a gradient."""
        return self.surrogate.touches_zero_advantage or any(term.touches_zero_advantage for term in self.terms)

    def advantages(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """rewards [S], groups [S] -> advantages [S], of a whole rollout (`token_advantages` for those that vary).

        lengths: tokens of each response [S], for the objectives that weigh responses by them (equal when not given).
        Raises ValueError for rewards that are not finite, and for a group of one where the group is the baseline.
        """
        return self.advantage(rewards, groups, lengths)

    def token_advantages(self, batch: TokenBatch) -> Tensor:
        """[N] advantages of a whole rollout: those of the batch if it has them, else made from its rewards."""
        if batch.advantages is not None:
            return batch.advantages
        return self.advantage.per_token(batch).to(batch.old_logp.dtype)

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """The batch of a whole step with its advantages and its selected tokens filled in.

        It is cut into micro-batches afterwards (`TokenBatch.select`), so that no choice depends on the cut.
        """
        self._check(batch, prepared=False)
        returns = self.advantage.returns(batch) if "returns" in self.needs and batch.returns is None else batch.returns
        batch = dataclasses.replace(batch, advantages=self.token_advantages(batch), returns=returns)
        if self.selection is None or batch.selected is not None:
            return batch
        advantages = self._shaped(batch)
        _, clipped = self.surrogate(batch, self.ratio(batch), advantages)
        return dataclasses.replace(batch, selected=self.selection(batch, advantages, clipped))

    def totals(self, batch: TokenBatch) -> Totals:
        """The totals of a step from its whole batch, with the statistics that the terms ask for."""
        kept = self._kept(self.prepare(batch))
        statistics: dict[str, float] = {}
        for term in self.terms:
            statistics |= term.count(kept, self._shaped(kept))
        return dataclasses.replace(kept.totals, statistics=statistics)

    def adapted(self, metrics: Mapping[str, float]) -> Objective:
        """The objective for the next optimizer step, given the metrics of this one (adaptive coefficients)."""
        terms = tuple(term.adapted(metrics) for term in self.terms)
        return self if terms == self.terms else dataclasses.replace(self, terms=terms)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """The fields of its terms, by name, as plain values; adaptive coefficients among them."""
        return {term.name: dataclasses.asdict(term) for term in self.terms}

    def with_state(self, terms: Mapping[str, Mapping[str, Any]]) -> Objective:
        """The objective with the fields of its terms as they were saved (`state`)."""
        restored = tuple(dataclasses.replace(term, **terms.get(term.name, {})) for term in self.terms)
        return dataclasses.replace(self, terms=restored)

    def __call__(self, batch: TokenBatch, totals: Totals | None = None) -> ObjectiveOutput:
        """The loss of a batch, or of one micro-batch of the step that `totals` counts.

        Raises ValueError when the batch lacks a field that the objective reads or a gradient that it needs, when the
        totals lack a statistic, and when a micro-batch brings the rewards of part of a group.
        """
        if totals is None:
            batch = self.prepare(batch)
            totals = self.totals(batch)
        self._check(batch)
        self._check_totals(batch, totals)
        batch = self._kept(dataclasses.replace(batch, advantages=self.token_advantages(batch)))
        advantages = self._shaped(batch)
        weights = self.aggregate(batch, totals)
        log_ratio = self.ratio(batch)
        surrogate, clipped = self.surrogate(batch, log_ratio, advantages)
        if self.selection is not None and self.selection.use == "drop":
            assert batch.selected is not None
            surrogate = torch.where(batch.selected, 0.0, surrogate)
        surrogate_loss = -(weights * surrogate).sum()
        outputs = {term.name: term(batch, advantages, weights, totals) for term in self.terms}
        loss = surrogate_loss + sum(output.cost for output in outputs.values())
        tokens = {"log_ratio": log_ratio.detach(), "advantage": advantages, "clipped": clipped}
        if batch.selected is not None:
            tokens["selected"] = batch.selected
        for output in outputs.values():
            tokens |= output.tokens
        return ObjectiveOutput(loss, _metrics(batch, loss, surrogate_loss, tokens, outputs), tokens, batch.num_tokens)

    def _shaped(self, batch: TokenBatch) -> Tensor:
        assert batch.advantages is not None
        advantages = batch.advantages.to(batch.old_logp.dtype)
        return advantages if self.shaping is None else self.shaping(batch, advantages)

    def _kept(self, batch: TokenBatch) -> TokenBatch:
        """The tokens that are in the loss and its denominators."""
        if self.selection is None or self.selection.use != "keep":
            return batch
        assert batch.selected is not None
        return batch.keep(batch.selected)

    def _check(self, batch: TokenBatch, prepared: bool = True) -> None:
        needs = self.needs | ({"selected"} if self.selection is not None else set())
        ignored = {"entropy_gradient"} if prepared else {"entropy_gradient", "selected", "returns"}
        missing = sorted(name for name in needs - ignored if getattr(batch, name) is None)
        if missing:
            raise ValueError(f"objective {self.name} reads {', '.join(missing)}, which the batch does not have")
        if torch.is_grad_enabled() and batch.logp.requires_grad:
            others = ("exact_kl", "top_entropy", "values")
            wanted = {"entropy": "entropy_gradient" in needs} | {name: name in needs for name in others}
            for name in (name for name, needed in wanted.items() if needed and not getattr(batch, name).requires_grad):
                raise ValueError(f"objective {self.name} needs {name} to carry a gradient, as logp does")

    def _check_totals(self, batch: TokenBatch, totals: Totals) -> None:
        if missing := self.statistics - totals.statistics.keys():
            raise ValueError(
                f"objective {self.name} divides by {', '.join(sorted(missing))} of the whole step, which the "
                "totals do not have: make them with objective.totals(whole_batch)"
            )
        if batch.advantages is None and totals.group_sizes:
            held, all_of_them = batch.totals.group_sizes, totals.group_sizes
            if self.advantage.across_groups and held != all_of_them:
                raise ValueError(
                    f"the advantage of objective {self.name} counts the whole rollout, and the micro-batch holds the "
                    f"rewards of {sum(held.values())} of its {sum(all_of_them.values())} responses: make the "
                    "advantages first (objective.advantages) and hand them in"
                )
            for label, size in batch.totals.group_sizes.items():
                if size != totals.group_sizes.get(label):
                    raise ValueError(
                        f"the micro-batch holds {size} of the {totals.group_sizes.get(label, 0)} responses of group "
                        f"{label}: make the advantages of whole groups first (objective.advantages) and hand them in"
                    )


def _metrics(
    batch: TokenBatch,
    loss: Tensor,
    surrogate_loss: Tensor,
    tokens: dict[str, Tensor],
    outputs: Mapping[str, TermOutput],
) -> dict[str, float]:
    """One transfer from the device for all of them."""
    log_ratio = (batch.logp - batch.old_logp).detach()
    means = {
        "clip_fraction": tokens["clipped"],
        "clip_fraction_positive": tokens["clipped"] & (tokens["advantage"] > 0),
        "clip_fraction_negative": tokens["clipped"] & (tokens["advantage"] < 0),
        "positive_fraction": tokens["advantage"] > 0,
        "approx_kl": torch.expm1(log_ratio.clamp(max=40)) - log_ratio,
        "log_ratio_abs": tokens["log_ratio"].abs(),
    }
    if batch.entropy is not None:
        means["entropy"] = batch.entropy.detach()
    for output in outputs.values():
        means |= {f"{name}_fraction" if x.dtype == torch.bool else name: x for name, x in output.tokens.items()}
    precise = widest(loss.device)
    values = {
        name: value.to(precise).mean() if batch.num_tokens else loss.new_zeros(()) for name, value in means.items()
    }
    if batch.num_tokens:
        values["log_ratio_max"] = tokens["log_ratio"].abs().max()
    values["loss"] = loss.detach()
    values["surrogate_loss"] = surrogate_loss.detach()
    for name, output in outputs.items():
        values[f"{name}_loss"] = output.cost.detach()
    numbers = torch.stack([value.to(precise) for value in values.values()]).tolist()
    settings = {name: value for output in outputs.values() for name, value in output.settings.items()}
    return dict(zip(values, numbers, strict=True)) | settings


def combine_metrics(parts: Iterable[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Metrics of a step from those of its micro-batches, each with its number of tokens.

    Losses add up, maxima take the maximum, everything else is the mean over tokens: the same numbers as one batch.
    """
    combined: dict[str, float] = {}
    weight: dict[str, int] = {}
    for metrics, tokens in parts:
        for name, value in metrics.items():
            if name.endswith("loss"):
                combined[name] = combined.get(name, 0.0) + value
            elif name.endswith("_max"):
                combined[name] = max(combined.get(name, value), value)
            elif tokens:
                weight[name] = weight.get(name, 0) + tokens
                combined[name] = combined.get(name, 0.0) + (value - combined.get(name, 0.0)) * tokens / weight[name]
    return combined
