"""Checkpoints: a model in Hugging Face format, and beside it all that the trainer needs to go on from there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tepo.data import Problem
from tepo.errors import TepoError
from tepo.policy import Policy, save_model
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.sample import TENSORS, Rollout, Sample

STATE_FILE = "trainer_state.pt"
_PLAIN = ("group", "reward", "advantage", "in_loss", "prefix", "shared", "baseline")


def save_checkpoint(folder: Path, step: int, policy: Policy, state: dict[str, Any], keep: int | None) -> Path:
    """Write `folder/step_N`, whole or not at all, and drop all but the newest `keep`. -> the checkpoint's folder."""
    target = folder / f"step_{step}"
    aside = folder / f".step_{step}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        save_model(policy.model, policy.tokenizer, aside)
        torch.save(state, aside / STATE_FILE)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    except OSError as error:
        raise TepoError(
            f"checkpoint {target} cannot be written: {error.strerror}; the ones before it are whole"
        ) from error
    for old in checkpoint_folders(folder)[: -keep if keep else 0]:
        shutil.rmtree(old)
    return target


def checkpoint_folders(folder: Path) -> list[Path]:
    """The whole checkpoints below a folder, oldest first."""
    found = [path for path in folder.glob("step_*") if (path / STATE_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state: tensors and plain values, nothing that could run code when it is read."""
    state: dict[str, Any] = torch.load(checkpoint / STATE_FILE, weights_only=True, map_location="cpu")
    return state


def pack_rollout(rollout: Rollout, problems: dict[str, int]) -> dict[str, Any]:
    """A rollout as tensors and plain values. problems: id -> index in the training set."""
    return {
        "index": rollout.index,
        "metrics": rollout.metrics,
        "samples": [_pack(s, problems) for s in rollout.samples],
    }


def unpack_rollout(packed: dict[str, Any], problems: Sequence[Problem]) -> Rollout:
    """The inverse of `pack_rollout`."""
    return Rollout(packed["index"], [_unpack(sample, problems) for sample in packed["samples"]], packed["metrics"])


def _pack(sample: Sample, problems: dict[str, int]) -> dict[str, Any]:
    verdict = asdict(sample.verdict) | {"status": str(sample.verdict.status)}
    plain = {key: getattr(sample, key) for key in (*_PLAIN, *TENSORS)}
    response = asdict(sample.response)
    return plain | {
        "problem": problems[sample.problem.id],
        "prompt": sample.prompt,
        "response": response,
        "verdict": verdict,
    }


def _unpack(packed: dict[str, Any], problems: Sequence[Problem]) -> Sample:
    verdict = packed["verdict"] | {"status": Status(packed["verdict"]["status"])}
    return Sample(**packed | {
        "problem": problems[packed["problem"]],
        "prompt": tuple(packed["prompt"]),
        "response": Response(**packed["response"]),
        "verdict": Verdict(**verdict),
    })  # fmt: skip
