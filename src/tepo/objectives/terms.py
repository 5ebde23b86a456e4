"""What is added to the surrogate: the KL to a reference, TEPO's KL mask, the entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, Totals
from tepo.objectives.ratios import LOG_RATIO_LIMIT


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1, to full precision near 0; beyond LOG_RATIO_LIMIT held there, with no gradient."""
    d = d.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": k3,
}
"""Per-token estimates of KL(pi || target) from d = target_logp - logp: [N] -> [N] (k1 to k3: Schulman 2020)."""

EXACT = "exact"
"""The estimator that sums over the vocabulary; the policy computes it (TokenBatch.exact_kl)."""


def check_choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_coefficient(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}; a number of 0 or more is allowed")


def token_kl(batch: TokenBatch, target_logp: Tensor | None, estimator: str, mask: Tensor | None = None) -> Tensor:
    """[N] differentiable estimate of the KL divergence (nats) to the policy with `target_logp` [N]; 0 outside the mask.

    Selected before anything is computed: a log-prob of -inf outside the mask must not become 0 * inf.
    """
    if estimator == EXACT:
        assert batch.exact_kl is not None
        return batch.exact_kl if mask is None else torch.where(mask, batch.exact_kl, 0.0)
    assert target_logp is not None
    d = target_logp - batch.logp
    return KL_ESTIMATORS[estimator](d if mask is None else torch.where(mask, d, 0.0))


@dataclass(frozen=True)
class TermOutput:
    """cost: scalar, added to the loss. tokens: detached [N] values to look at. settings: numbers that adapt."""

    cost: Tensor
    tokens: dict[str, Tensor]
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """A part of the loss beside the surrogate. Subclasses are frozen dataclasses.

    name: the override that sets it. strength: the field that holds its coefficient.
    touches_zero_advantage: whether a response whose advantages are all zero gets a gradient from this term; a group
        of such responses can be left out of the forward passes only where no term touches it.
    """

    name: ClassVar[str]
    strength: ClassVar[str] = "beta"
    touches_zero_advantage: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of TokenBatch that must be there, and "entropy_gradient" where H must carry one."""
        return frozenset()

    @property
    def statistics(self) -> frozenset[str]:
        """Sums over the whole optimizer step that the term is divided by, where N and S are not enough."""
        return frozenset()

    def count(self, batch: TokenBatch, advantages: Tensor) -> dict[str, float]:
        """The share of a batch in those sums."""
        return {}

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        """advantages [N], weights [N] (the surrogate's), totals of the whole step -> what to add to the loss."""
        raise NotImplementedError

    def adapted(self, metrics: Mapping[str, float]) -> Term:
        """The term for the next optimizer step, given the metrics of this one. Its fields are its whole state."""
        return self


@dataclass(frozen=True)
class ReferenceKL(Term):
    """+ beta KL(pi || pi_ref), weighted like the surrogate (GRPO, 2402.03300: beta 0.04, k3)."""

    name: ClassVar[str] = "ref_kl"
    beta: float = 0.04
    estimator: Literal["abs", "k1", "k2", "k3", "exact"] = "k3"

    def __post_init__(self) -> None:
        check_coefficient("ref_kl.beta", self.beta)
        check_choice("ref_kl.estimator", self.estimator, (*KL_ESTIMATORS, EXACT))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"exact_kl"} if self.estimator == EXACT else {"ref_logp"})

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        kl = token_kl(batch, batch.ref_logp, self.estimator)
        return TermOutput(self.beta * (weights * kl).sum(), {"ref_kl": kl.detach()})


@dataclass(frozen=True)
class KLMask(Term):
    """+ (beta/N) sum_it M_it K_it: holds back the tokens that gain reward while losing entropy (TEPO, 2604.12736).

    M_it = 1[A_it > 0] 1[the entropy at token t is falling], detached; K_it is a KL divergence to the target.

    beta: coefficient.
    target: "old", the policy that sampled, or "reference", the frozen one.
    estimator: of K: "abs" |logp - target_logp| (as in KL-Cov), "k1", "k2", "k3", or "exact" over the vocabulary.
    entropy_test: "measured", H now < H at sampling, same position and same code; or "first_order", by the sign of
        the entropy's derivative when the token's probability is raised (TokenBatch.entropy_direction).
    normalizer: "tokens", all tokens of the step; or "masked", those in the mask, which costs a forward pass over the
        whole step to count them first.

    The paper's equations were not available: this is a reconstruction from its abstract and from independent
    readings, with every open choice a field. The mask is a heuristic; no proof is claimed for it.
    """

    name: ClassVar[str] = "kl_mask"
    beta: float = 0.01
    target: Literal["old", "reference"] = "old"
    estimator: Literal["abs", "k1", "k2", "k3", "exact"] = "abs"
    entropy_test: Literal["measured", "first_order"] = "measured"
    normalizer: Literal["tokens", "masked"] = "tokens"
    touches_zero_advantage: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_coefficient("kl_mask.beta", self.beta)
        check_choice("kl_mask.target", self.target, ("old", "reference"))
        check_choice("kl_mask.estimator", self.estimator, (*KL_ESTIMATORS, EXACT))
        check_choice("kl_mask.entropy_test", self.entropy_test, ("measured", "first_order"))
        check_choice("kl_mask.normalizer", self.normalizer, ("tokens", "masked"))

    @property
    def needs(self) -> frozenset[str]:
        needs = {"entropy", "old_entropy"} if self.entropy_test == "measured" else {"entropy_direction"}
        if self.estimator == EXACT:
            needs.add("exact_kl")
        elif self.target == "reference":
            needs.add("ref_logp")
        return frozenset(needs)

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"kl_mask_tokens"} if self.normalizer == "masked" else ())

    def mask(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """-> [N] bool, M_it."""
        if self.entropy_test == "measured":
            assert batch.entropy is not None
            assert batch.old_entropy is not None
            falling = batch.entropy.detach() < batch.old_entropy
        else:
            assert batch.entropy_direction is not None
            falling = batch.entropy_direction < 0
        return (advantages > 0) & falling

    def count(self, batch: TokenBatch, advantages: Tensor) -> dict[str, float]:
        if self.normalizer == "tokens":
            return {}
        return {"kl_mask_tokens": float(self.mask(batch, advantages).sum())}

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        mask = self.mask(batch, advantages)
        kl = token_kl(batch, batch.old_logp if self.target == "old" else batch.ref_logp, self.estimator, mask)
        divisor = totals.statistics["kl_mask_tokens"] if self.normalizer == "masked" else totals.tokens
        cost = self.beta * kl.sum() / max(divisor, 1)
        return TermOutput(cost, {"kl_mask": mask, "kl_mask_kl": kl.detach()})


@dataclass(frozen=True)
class EntropyBonus(Term):
    """- coefficient * mean H over the N tokens of the step, whatever the aggregate, with a gradient through H."""

    name: ClassVar[str] = "entropy_bonus"
    strength: ClassVar[str] = "coefficient"
    coefficient: float

    def __post_init__(self) -> None:
        check_coefficient("entropy_bonus", self.coefficient)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy", "entropy_gradient"})

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        assert batch.entropy is not None
        return TermOutput(-self.coefficient * batch.entropy.sum() / max(totals.tokens, 1), {})


@dataclass(frozen=True)
class CovarianceKL(Term):
    """+ (beta/N) sum over the selected tokens of |log r|: holds those that drive entropy down (KL-Cov, 2505.22617).

    The selection is the objective's (`TopCovariance`); a token is in it by its covariance, whatever its advantage.
    """

    name: ClassVar[str] = "cov_kl"
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_coefficient("cov_kl.beta", self.beta)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"selected"})

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        kl = token_kl(batch, batch.old_logp, "abs", batch.selected)
        return TermOutput(self.beta * kl.sum() / max(totals.tokens, 1), {"cov_kl": kl.detach()})
