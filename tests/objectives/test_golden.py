"""Losses and gradients that verl 0.9.1 and TRL 1.16 computed (the specification's golden.json)."""

import json
from pathlib import Path
from typing import Any

import golden_small
import pytest
import torch

from tepo.objectives import TokenBatch, get_objective
from tepo.objectives.selections import covariance
from tepo.policy.head import Head, score_hidden

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"ref_kl": None}),
    "grpo_kl0.04": ("grpo", {}),
    "token_mean_clip0.2": ("dapo", {"clip_high": 0.2}),
    "dapo": ("dapo", {}),
    "dapo_dual_clip_3": ("dapo", {"dual_clip": 3}),
    "dr_grpo_L8": ("dr_grpo", {"length_normalizer": 8}),
    "dr_grpo_L18": ("dr_grpo", {"length_normalizer": 18}),
    "gspo_0.2": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    "gspo": ("gspo", {}),
    "tepo_0.2 (no KL mask)": ("tepo", {"clip_low": 0.2, "clip_high": 0.2, "kl_mask": None}),
    "tepo (no KL mask)": ("tepo_v1", {}),
    "luspo_0.2": ("luspo", {"clip_low": 0.2, "clip_high": 0.2}),
    "gmpo": ("gmpo", {}),
    "cispo_0_1.28": ("cispo", {}),
    "sapo": ("sapo", {}),
    "gpg_loss": ("gpg", {}),
    "kl_cov_ratio0.3_beta1": ("kl_cov", {"share": 0.3}),
}
"""The file's name for a case, and how to ask for it here."""


def check_case(case: str, inputs: dict[str, list[Any]], loss: float, gradient: list[float]) -> None:
    """Loss and gradient equal to 1e-7 relative (verl adds 1e-8 to sequence lengths)."""
    name, overrides = CASES[case]
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in inputs.items()}
    logp = tensors["logp"].requires_grad_()
    mask = tensors["mask"]
    batch = TokenBatch.from_padded(logp, tensors["old"], mask, advantages=tensors["adv"], ref_logp=tensors["ref"])
    out = get_objective(name, **overrides)(batch)
    out.loss.backward()
    assert logp.grad is not None
    expected = torch.tensor(gradient, dtype=torch.float64)
    assert out.loss.item() == pytest.approx(loss, rel=1e-7)
    assert (logp.grad[mask.bool()] - expected).norm() <= 1e-7 * expected.norm()
    assert torch.allclose(logp.grad[mask.bool()], expected, rtol=1e-7, atol=1e-12)
    assert logp.grad[~mask.bool()].eq(0).all()


@pytest.mark.parametrize("case", golden_small.CASES)
def test_pinned_small_case(case: str) -> None:
    check_case(case, golden_small.INPUTS, *golden_small.CASES[case])


def test_every_case_of_the_golden_file(shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "spec" / "golden.json").read_text())
    checked = set()
    for batch in golden.values():
        for case, expected in batch["cases"].items():
            check_case(case, batch["inputs"], expected["loss"], expected["grad"])
            checked.add(case)
    assert checked == CASES.keys()


def test_pinned_small_case_is_that_of_the_golden_file(shared_dir: Path) -> None:
    small = json.loads((shared_dir / "spec" / "golden.json").read_text())["small"]
    assert all(small["inputs"][key] == value for key, value in golden_small.INPUTS.items())
    assert all((small["cases"][c]["loss"], small["cases"][c]["grad"]) == v for c, v in golden_small.CASES.items())


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.026042), ("k2", 0.023411), ("k3", 0.024754)])
def test_kl_sequence_means(estimator: str, expected: float) -> None:
    """The spec's "further numbers": KL to the reference, mean over the responses of the means over their tokens."""
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in golden_small.INPUTS.items()}
    batch = TokenBatch.from_padded(
        tensors["logp"], tensors["old"], tensors["mask"], advantages=torch.zeros(4), ref_logp=tensors["ref"]
    )
    objective = get_objective("grpo", ref_kl={"beta": 1.0, "estimator": estimator})  # sequence mean of token means
    assert objective(batch).loss.item() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "p", "expected"),
    [
        ("hoelder", -2, -0.044436), ("hoelder", -1, -0.005510), ("hoelder", 0, 0.065278), ("hoelder", 1, 0.174107),
        ("hoelder", 2, 0.288860), ("hoelder_token", -2, -0.019539), ("hoelder_token", 0, 0.085106),
        ("hoelder_token", 1, 0.190345), ("hoelder_token", 2, 0.302092),
    ],
)  # fmt: skip
def test_hoelder_losses(name: str, p: float, expected: float) -> None:
    """The spec's "further numbers": clip .2, float64, six decimals."""
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in golden_small.INPUTS.items()}
    batch = TokenBatch.from_padded(tensors["logp"], tensors["old"], tensors["mask"], advantages=tensors["adv"])
    assert get_objective(name, p=p)(batch).loss.item() == pytest.approx(expected, abs=5e-7)


def test_sapo_needs_its_temperature_in_the_precision_of_the_batch() -> None:
    """1.05 as float32 (what torch.where makes of two numbers) moves the small case's loss by 1e-6 of itself."""
    tau = torch.tensor(1.05).item()
    assert tau != 1.05
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in golden_small.INPUTS.items()}
    batch = TokenBatch.from_padded(tensors["logp"], tensors["old"], tensors["mask"], advantages=tensors["adv"])
    expected = golden_small.CASES["sapo"][0]
    assert get_objective("sapo")(batch).loss.item() == pytest.approx(expected, rel=1e-13)
    assert get_objective("sapo", tau_negative=tau)(batch).loss.item() != pytest.approx(expected, rel=1e-7)


def small_batch() -> TokenBatch:
    """The small case with its entropies."""
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in golden_small.INPUTS.items()}
    return TokenBatch.from_padded(
        tensors["logp"], tensors["old"], tensors["mask"], advantages=tensors["adv"], entropy=tensors["ent"]
    )


def test_entropy_advantages() -> None:
    """The spec's "further numbers": alpha .4, kappa 2; six decimals."""
    expected = [1.066025, 0.906025, 1.299038, 0.986025, -0.433013, -0.846025, -0.706025, -0.506025, -0.586025, 0.946025]
    objective = get_objective("entropy_advantage", alpha=0.4, kappa=2.0)
    assert objective(small_batch()).tokens["advantage"].tolist() == pytest.approx(expected, abs=6e-7)


def test_forking_tokens() -> None:
    """The spec's "further numbers": tokens (0, 2) and (1, 0), the 3rd and the 5th of ten, and the mean over the two."""
    out = get_objective("forking_tokens")(small_batch())
    chosen = get_objective("forking_tokens").prepare(small_batch()).selected
    assert chosen is not None
    assert chosen.nonzero().flatten().tolist() == [2, 4]
    assert out.num_tokens == 2
    assert out.loss.item() == pytest.approx(-0.207846, abs=5e-7)


def test_covariances() -> None:
    """The spec's "further numbers": over all ten tokens; KL-Cov takes the largest, Clip-Cov has none above 1."""
    expected = [-0.025324, 0.280726, -0.746676, 0.493710, 0.849767, -0.503086, -0.540606, 0.206337, 0.248611, 0.258588]
    batch = small_batch()
    assert batch.advantages is not None
    assert covariance(batch, batch.advantages).tolist() == pytest.approx(expected, abs=6e-7)
    for share, wanted in ((2e-3, [4]), (0.29, [3, 4]), (0.3, [1, 3, 4]), (1.0, list(range(10)))):
        chosen = get_objective("kl_cov", share=share).prepare(batch).selected
        assert chosen is not None
        assert chosen.nonzero().flatten().tolist() == wanted
    drawn = get_objective("clip_cov").prepare(batch).selected
    assert drawn is not None
    assert not drawn.any()


@pytest.mark.parametrize("dropped", [0.2, 0.33])
def test_clamped_entropy(dropped: float) -> None:
    """The spec's "further numbers" for AEnt: one of six tokens dropped; the full entropy; a gradient in both."""
    logits = torch.tensor([[2.0, 1, 0, -1, -2, -3]], dtype=torch.float64, requires_grad=True)
    identity = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(identity.weight)
    scores = score_hidden(Head(identity), logits, torch.tensor([0]), 6, top_entropy=dropped)
    assert scores.entropy.item() == pytest.approx(1.023261, abs=5e-7)
    assert scores.top_entropy is not None
    assert scores.top_entropy.item() == pytest.approx(0.999973, abs=5e-7)
    (gradient,) = torch.autograd.grad(scores.top_entropy.sum(), logits)
    assert gradient[0, :5].ne(0).all()
    assert gradient[0, 5].item() == pytest.approx(0, abs=1e-18)
