"""Writing checkpoints while the run goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tepo.train.checkpoint import Retention, Snapshot, checkpoints, prune, write_checkpoint

CANNOT_WRITE = (OSError, SafetensorError)
"""What a full or broken disk raises."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of its own, from a copy that the run does not touch.

    background: False writes at once, without the copy. warn: tells a person. One that cannot be written is
    told and counted (`failed`), and the run goes on; any other fault is raised by the next call.
    """

    def __init__(self, folder: Path, retention: Retention, background: bool, warn: Callable[[str], None]) -> None:
        self.folder, self.retention, self.background, self.warn = folder, retention, background, warn
        self.failed = 0
        self.newest: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tepo-checkpoint")
        self._writing: tuple[int, Future[Path]] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def save(
        self,
        step: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        state: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        """Copy everything and begin to write it; waits for the checkpoint before."""
        self.wait()
        if self._tokenizer is None:  # it does not change in a run, but writing and using it at once may fail
            self._tokenizer = copy.deepcopy(tokenizer)
        if self.background:
            model, state = copy_model(model), copy_state(state)
        snapshot = Snapshot(step, model, self._tokenizer, state, metrics)
        self._writing = step, self._thread.submit(self._write, snapshot)
        if not self.background:
            self.wait()

    def _write(self, snapshot: Snapshot) -> Path:
        path = write_checkpoint(self.folder, snapshot)
        prune(self.folder, self.retention)
        return path

    def poll(self) -> None:
        """Tell what has become of the last checkpoint, if that is known by now."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is written, or has failed."""
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            future.result()
            self.newest = step
        except CANNOT_WRITE as error:
            self.failed += 1
            whole = checkpoints(self.folder)
            rest = f"{whole[-1].name} is the newest whole one" if whole else "there is none before it"
            self.warn(
                f"checkpoint step_{step} cannot be written ({reason(error)}); {rest}; {self.failed} failed so far"
            )

    def close(self) -> None:
        """Wait, and end the thread. May be called twice."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def reason(error: Exception) -> str:
    """What a disk has against it, in few words."""
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model with copies of the trained weights on the CPU; those that are not trained are shared, not copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
        if parameter.requires_grad
        else parameter
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def copy_state(value: Any) -> Any:
    """Nested dicts and lists with copies of their tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    return [copy_state(item) for item in value] if isinstance(value, list | tuple) else value
