"""Losses and gradients that verl 0.9.1 and TRL 1.16 computed (the specification's golden.json)."""

import json
from pathlib import Path
from typing import Any

import golden_small
import pytest
import torch

from tepo.objectives import TokenBatch, get_objective

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
}
"""The file's name for a case, and how to ask for it here."""

OTHER_OBJECTIVES = {"luspo_0.2", "gmpo", "cispo_0_1.28", "sapo", "gpg_loss", "kl_cov_ratio0.3_beta1"}
"""Cases of the file whose objective the table does not have yet."""


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
            if case not in OTHER_OBJECTIVES:
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
