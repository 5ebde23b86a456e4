"""Checkpoints on the disk: a model in Hugging Face format and the trainer's state beside it; whole, or not there.

A checkpoint is written into a folder aside, made durable, and renamed. Its manifest names the other files with their
SHA-256. Weights and tensors are safetensors, the rest is JSON: reading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tepo.errors import TepoError
from tepo.files import fsync_file, fsync_folder, write_json
from tepo.policy import save_model

MANIFEST = "manifest.json"
PLAIN, TENSORS = "trainer.json", "trainer.safetensors"
FORMAT = 1
"""Of the trainer's state; another number is another layout."""
TENSOR = "$tensor"
"""The key that stands in JSON for a tensor, with its name in the safetensors file."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is written from.

    state: nested dicts (keys are texts) and lists of plain values and tensors. metrics: of its step, by name.
    """

    step: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    state: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Retention:
    """keep: the newest so many stay, None for all. best: and the one that is best by this metric."""

    keep: int | None = None
    best: str | None = None
    smaller_is_better: bool = False


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/step_N`. -> its path. Raises OSError or SafetensorError; then nothing of it is left."""
    target, aside = folder / f"step_{snapshot.step}", folder / f".step_{snapshot.step}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        save_model(snapshot.model, snapshot.tokenizer, aside)
        tensors: dict[str, Tensor] = {}
        write_json(aside / PLAIN, _split(snapshot.state, "", tensors))
        save_file(tensors, aside / TENSORS)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        manifest = {
            "format": FORMAT,
            "step": snapshot.step,
            "metrics": snapshot.metrics,
            "files": {str(path.relative_to(aside)): describe(path) for path in files},
        }
        for path in files:
            fsync_file(path)
        write_json(aside / MANIFEST, manifest)
        fsync_folder(aside)
        if target.exists():
            set_aside(target)
        os.replace(aside, target)
        fsync_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def describe(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def checkpoints(folder: Path) -> list[Path]:
    """Those below a folder that were finished, oldest first; whether they still are whole says `damage`."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit() and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest; None when it is whole."""
    try:
        files = _manifest(checkpoint)["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, wanted in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != wanted["bytes"]:
            return f"{name} has {found:,} bytes of {wanted['bytes']:,}"
        if describe(path) != wanted:
            return f"{name} is not what was written (SHA-256)"
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint, its tensors on the CPU. Raises TepoError for one of another version."""
    if (found := _manifest(checkpoint)["format"]) != FORMAT:
        raise TepoError(f"checkpoint {checkpoint} has format {found}; this version of tepo reads format {FORMAT}")
    plain = json.loads((checkpoint / PLAIN).read_text(encoding="utf-8"))
    # A copy: what is loaded lies in the file, and the file may go before the run does.
    tensors = {name: tensor.clone() for name, tensor in load_file(checkpoint / TENSORS).items()}
    state: dict[str, Any] = _join(plain, tensors)
    return state


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that is not to be gone on from; nothing is deleted. -> its new place."""
    place = checkpoint.with_name(f"{checkpoint.name}.set_aside")
    shutil.rmtree(place, ignore_errors=True)
    os.replace(checkpoint, place)
    return place


def clean(folder: Path) -> None:
    """Remove what a process that was killed left unfinished: half written, or half deleted."""
    for path in folder.glob(".step_*.tmp"):
        shutil.rmtree(path)


def prune(folder: Path, retention: Retention) -> None:
    """Delete the checkpoints that are not to be kept."""
    found = checkpoints(folder)
    best = best_checkpoint(found, retention)
    for path in found[: -retention.keep] if retention.keep else []:
        if path != best:
            doomed = folder / f".{path.name}.tmp"
            os.replace(path, doomed)  # one that is half deleted must not look whole
            shutil.rmtree(doomed)


def best_checkpoint(found: Sequence[Path], retention: Retention) -> Path | None:
    """The best by `retention.best` among those whose step has that metric, of equals the newest."""
    if retention.best is None:
        return None
    sign = -1.0 if retention.smaller_is_better else 1.0
    values = [(sign * value, step_of(path), path) for path in found for value in _metric(path, retention.best)]
    return max(values)[2] if values else None


def _metric(checkpoint: Path, name: str) -> Iterator[float]:
    value = _manifest(checkpoint)["metrics"].get(name)
    if value is not None and value == value:
        yield float(value)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Plain values as they are; tensors go into `tensors` under their path, which stands for them."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {key: _split(item, f"{name}/{key}".lstrip("/"), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}/{i}".lstrip("/"), tensors) for i, item in enumerate(value)]
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: _join(item, tensors) for key, item in value.items()}
    return [_join(item, tensors) for item in value] if isinstance(value, list) else value
