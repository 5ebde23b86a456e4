"""`tepo.testing.check_objective`: every objective passes it, and planted faults do not.

Numbers of bugs are those of the specification's list "What real implementations got wrong".
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, Totals, get_objective, list_objectives
from tepo.objectives.advantages import Advantage
from tepo.objectives.aggregates import Aggregate
from tepo.objectives.surrogates import Surrogate, Unclipped
from tepo.objectives.terms import Term, TermOutput
from tepo.testing import PROPERTIES, check_objective


@pytest.mark.parametrize("name", list_objectives())
def test_every_objective_of_the_table(name: str) -> None:
    check_objective(get_objective(name))


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(
    "name", ["tepo", "clip_cov", "forking_tokens", "gtpo", "aent", "sapo", "ppo", "prpo", "skpo", "dpo", "orpo"]
)
def test_other_seeds(name: str, seed: int) -> None:
    check_objective(get_objective(name), seed=seed)


def dapo(**parts: Any) -> Objective:
    return dataclasses.replace(get_objective("dapo"), name="planted", **parts)


@dataclass(frozen=True)
class OwnCount(Aggregate):
    """Bug 1: a mean over the tokens of the micro-batch."""

    name: ClassVar[str] = "own_count"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        return torch.full_like(batch.old_logp, 1 / max(batch.num_tokens, 1))


@dataclass(frozen=True)
class PaddedWidth(Aggregate):
    """Bug 3: divided by the longest response of the batch, the width that padding would have."""

    name: ClassVar[str] = "padded_width"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        width = int(batch.lengths.max()) if batch.num_tokens else 1
        return torch.full_like(batch.old_logp, 1 / (max(totals.sequences, 1) * width))


@dataclass(frozen=True)
class MaskedCount(Aggregate):
    """Bug 6: responses without a token count."""

    name: ClassVar[str] = "masked_count"

    def __call__(self, batch: TokenBatch, totals: Totals) -> Tensor:
        return torch.full_like(batch.old_logp, 1 / max(sum(totals.group_sizes.values()), 1))


@dataclass(frozen=True)
class LeakyRatio:
    """Bug 14's cousin: old log-probs that are not constants; their gradient cancels that of the current ones."""

    name = "leaky"

    def __call__(self, batch: TokenBatch) -> Tensor:
        old_logp = batch.old_logp + (batch.logp - batch.logp.detach())
        return batch.logp - old_logp


@dataclass(frozen=True)
class ReversedRatio:
    """The ratio upside down."""

    name = "reversed"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return batch.old_logp - batch.logp


@dataclass(frozen=True)
class LocalTop(Surrogate):
    """Bug 2: the tokens of the highest log-prob within the batch at hand."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        values, clipped = Unclipped()(batch, log_ratio, advantages)
        chosen = torch.zeros_like(clipped)
        chosen[batch.logp.detach().topk(batch.num_tokens // 2).indices] = True
        return torch.where(chosen, values, 0.0), clipped


@dataclass(frozen=True)
class Residue(Advantage):
    """Bug 8: (R - mean) / (std + epsilon) as it is written."""

    name: ClassVar[str] = "residue"

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        made = torch.zeros_like(rewards)
        for label in groups.unique():
            own = rewards[groups == label]
            made[groups == label] = (own - own.mean()) / (own.std() + 1e-6)
        return made


@dataclass(frozen=True)
class ByPlace(Advantage):
    """The first response counts more: the order of responses matters."""

    name: ClassVar[str] = "by_place"

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        return get_objective("dapo").advantages(rewards, groups) / (1 + torch.arange(len(rewards)))


@dataclass(frozen=True)
class Unbounded(Surrogate):
    """exp(log r) with nothing that holds it."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return log_ratio.exp() * advantages, torch.zeros_like(advantages, dtype=torch.bool)


@dataclass(frozen=True)
class Undeclared(Surrogate):
    """Reads the entropy, which `needs` does not name."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        values, clipped = Unclipped()(batch, log_ratio, advantages)
        assert batch.entropy is not None
        return values * batch.entropy.detach(), clipped


@dataclass(frozen=True)
class Drawing(Surrogate):
    """Drops tokens at random within the loss."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        values, clipped = Unclipped()(batch, log_ratio, advantages)
        return torch.nn.functional.dropout(values, 0.5), clipped


@dataclass(frozen=True)
class HeldWeight(Surrogate):
    """Sound: a weight that is held constant by `no_grad` and not by `detach`."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weight = log_ratio.exp().clamp(0.5, 1.5) * advantages
        return weight * batch.logp, torch.zeros_like(advantages, dtype=torch.bool)


class WrongSlope(torch.autograd.Function):
    """x, with 0.9 in place of the slope 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.9 * gradient


@dataclass(frozen=True)
class WrongGradient(Surrogate):
    """A backward pass by hand, with a mistake."""

    def __call__(self, batch: TokenBatch, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return Unclipped()(batch, WrongSlope.apply(log_ratio), advantages)


@dataclass(frozen=True)
class SilentTouch(Term):
    """A cost on every token that says it leaves those without an advantage alone."""

    name: ClassVar[str] = "silent_touch"
    touches_zero_advantage: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        return TermOutput((weights * batch.logp.square()).sum(), {})


@dataclass(frozen=True)
class ZeroOverZero(Term):
    """Bug 7: a mean over the tokens with a positive advantage, of which there may be none."""

    name: ClassVar[str] = "zero_over_zero"

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        return TermOutput(batch.logp.sum() / totals.tokens, {})


@dataclass(frozen=True)
class TensorMetric(Term):
    """A metric that is a tensor."""

    name: ClassVar[str] = "tensor_metric"

    def __call__(self, batch: TokenBatch, advantages: Tensor, weights: Tensor, totals: Totals) -> TermOutput:
        return TermOutput(batch.logp.new_zeros(()), {}, {"tensor_metric": torch.ones(())})  # type: ignore[dict-item]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "divided by the micro-batch's own count": ({"aggregate": OwnCount()}, "micro-batches"),
    "mean over the padded width": ({"aggregate": PaddedWidth()}, "micro-batches"),
    "masked responses in the denominator": ({"aggregate": MaskedCount()}, "masked responses"),
    "gradient through old_logp": ({"ratio": LeakyRatio()}, "direction"),
    "ratio upside down": ({"ratio": ReversedRatio()}, "direction"),
    "selection per micro-batch": ({"surrogate": LocalTop()}, "micro-batches"),
    "residue in a zero-variance group": ({"advantage": Residue()}, "zero-variance groups"),
    "order of responses": ({"advantage": ByPlace()}, "order"),
    "unbounded ratio": ({"surrogate": Unbounded()}, "extreme ratios"),
    "field that is not declared": ({"surrogate": Undeclared()}, "fields"),
    "drawn within the loss": ({"surrogate": Drawing()}, "repeatability"),
    "wrong gradient": ({"surrogate": WrongGradient()}, "finite differences"),
    "touches zero advantages": ({"terms": (SilentTouch(),)}, "zero-variance groups"),
    "0 / 0": ({"terms": (ZeroOverZero(),)}, "everything masked"),
    "metric that is a tensor": ({"terms": (TensorMetric(),)}, "metrics"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("parts", "named"), FAULTS.values(), ids=FAULTS)
def test_planted_fault_is_caught_and_named(parts: dict[str, Any], named: str, seed: int) -> None:
    assert named in PROPERTIES
    with pytest.raises(AssertionError, match=f"objective planted fails '{named}': .+"):
        check_objective(dapo(**parts), seed=seed)


def test_the_parts_around_the_faults_are_sound() -> None:
    check_objective(dapo())
    check_objective(dapo(surrogate=Unclipped()))
    check_objective(dapo(surrogate=HeldWeight()))


def test_what_it_draws_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_objective(get_objective("clip_cov"))
    assert torch.rand(3).equal(expected)


def test_needs_torch_alone() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import tepo.testing\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tepo"]
