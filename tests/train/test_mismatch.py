"""The difference between sampling and scoring: measured in the objective's terms, announced, and corrected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tepo.config import load_recipe
from tepo.errors import TepoError
from tepo.objectives import TokenBatch, get_objective
from tepo.rollout import TransformersEngine
from tepo.train.mismatch import Correction, measure

OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
DIFFERENCE = torch.tensor([0.01, -0.03, 0.0, 0.5, -0.4], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


def batch() -> TokenBatch:
    return TokenBatch(
        logp=OLD - 7,  # the current policy has nothing to do with it
        old_logp=OLD,
        sequence=SEQUENCE,
        group=torch.tensor([0, 0]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        entropy=torch.ones(5, dtype=torch.float64),
        old_entropy=torch.ones(5, dtype=torch.float64),
    )


def test_the_share_beyond_the_clip_range_counts_what_the_objective_clips() -> None:
    """Tokens by their own difference for a token ratio, by that of their response for a sequence ratio."""
    tokens = measure(get_objective("grpo", clip_low=0.2, clip_high=0.2), batch(), OLD - DIFFERENCE)
    assert tokens["mismatch"] == pytest.approx(float(DIFFERENCE.abs().mean()))
    assert tokens["mismatch_max"] == pytest.approx(0.5)
    assert tokens["mismatch_beyond"] == pytest.approx(2 / 5)  # exp(0.5) and exp(-0.4)
    # The means of the responses are -0.0067 and 0.05.
    for clip, share in ((0.003, 1.0), (0.01, 2 / 5), (0.06, 0.0)):
        sequences = measure(get_objective("tepo", clip_low=clip, clip_high=clip), batch(), OLD - DIFFERENCE)
        assert sequences["mismatch_beyond"] == pytest.approx(share)


def test_without_a_clip_range_there_is_no_share() -> None:
    for name in ("gpg", "rloo", "sapo"):
        objective = get_objective(name)
        assert objective.clip_range is None
        assert "mismatch_beyond" not in measure(objective, batch(), OLD - DIFFERENCE)


def test_truncated_importance_sampling_is_its_definition() -> None:
    advantages = batch().advantages
    assert advantages is not None
    out = Correction("truncated", 1.2)(advantages, OLD, OLD - DIFFERENCE, SEQUENCE)
    expected = [a * min(math.exp(d), 1.2) for a, d in zip(advantages.tolist(), DIFFERENCE.tolist(), strict=True)]
    assert out.tolist() == pytest.approx(expected)
    assert torch.equal(Correction()(advantages, OLD, OLD - DIFFERENCE, SEQUENCE), advantages)


@pytest.mark.parametrize(("cap", "kept"), [(1.01, [0, 0]), (1.05, [1, 0]), (1.2, [1, 1])])
def test_sequence_masking_drops_responses_whose_likelihoods_differ(cap: float, kept: list[int]) -> None:
    """Their log-likelihoods differ by -0.02 and 0.1, in either direction alike."""
    advantages = batch().advantages
    assert advantages is not None
    for sign in (1, -1):
        out = Correction("mask", cap)(advantages, OLD, OLD - sign * DIFFERENCE, SEQUENCE)
        assert torch.equal(out, advantages * torch.tensor(kept)[SEQUENCE])


def test_importance_weights_undo_another_sampling_distribution() -> None:
    """On a bandit: tokens drawn from q, weighed by p/q, give the policy gradient under p; unweighed they do not."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64, requires_grad=True)
    other = torch.softmax(torch.tensor([0.9, 0.1, -0.4, 0.2], dtype=torch.float64), -1)
    reward = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((torch.softmax(logits, -1) * reward).sum(), logits)
    drawn = torch.multinomial(other, 400_000, replacement=True, generator=generator)
    logp = torch.log_softmax(logits, -1)[drawn]

    def estimate(correction: Correction) -> torch.Tensor:
        advantages = correction(reward[drawn], logp, other.log()[drawn], torch.arange(len(drawn)))
        (gradient,) = torch.autograd.grad((advantages * logp).mean(), logits, retain_graph=True)
        return gradient

    assert (estimate(Correction("truncated", 1e9)) - exact).abs().max() < 0.01
    assert (estimate(Correction()) - exact).abs().max() > 0.1


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    out = Correction("truncated", 2.0)(torch.ones(5, dtype=torch.float64), old, OLD - DIFFERENCE, SEQUENCE)
    assert not out.requires_grad


def test_a_cap_that_cuts_everything_and_an_empty_stop_string_are_refused() -> None:
    with pytest.raises(TepoError, match="correction_cap"):
        load_recipe("arithmetic", ["rollout.correction=truncated", "rollout.correction_cap=1.0"])
    with pytest.raises(TepoError, match=r"rollout.stop"):
        load_recipe("arithmetic", ["rollout.stop=['']"])


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose log-probs are off by 0.05 nats."""
    generate = TransformersEngine.generate

    def off(self: TransformersEngine, *args: Any) -> Any:
        return [
            [dataclasses.replace(response, logps=tuple(logp - 0.05 for logp in response.logps)) for response in group]
            for group in generate(self, *args)
        ]

    monkeypatch.setattr(TransformersEngine, "generate", off)


@pytest.mark.usefixtures("noisy")
def test_a_run_measures_warns_once_and_corrects(run: Any) -> None:
    """A constant factor exp(0.05) on every advantage is one on the gradient of the surrogate."""
    from test_run import metrics_of, with_signal

    norms = {}
    for kind in ("none", "truncated", "mask"):
        folder, printed = run(
            "objective=dapo", "objective.clip_low=0.01", "objective.clip_high=0.01", "trainer.steps=4",
            f"rollout.correction={kind}", "rollout.correction_cap=1.2", output=kind,
        )  # fmt: skip
        steps = with_signal(metrics_of(folder))
        assert steps[0]["mismatch"] == pytest.approx(0.05, abs=1e-3)
        assert steps[0]["mismatch_beyond"] == 1
        assert " ".join(printed.split()).count("Rounding weighs as much as learning") == 1
        norms[kind] = steps[0]["grad_norm"]
    assert norms["truncated"] == pytest.approx(norms["none"] * math.exp(0.05), rel=1e-3)
    assert norms["mask"] == 0  # responses of four tokens and more differ by a factor of exp(0.2)
