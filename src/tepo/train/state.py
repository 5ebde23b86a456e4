"""The whole state of a run between two optimizer steps, as plain values and tensors, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo.data import Problem
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response
from tepo.train.critic import load_optimizer_state, optimizer_state
from tepo.train.random_state import random_state, set_random_state
from tepo.train.sample import TENSORS, Rollout, Sample, fill

if TYPE_CHECKING:
    from tepo.train.trainer import Trainer

_OTHERWISE = ("problem", "prompt", "response", "verdict", *TENSORS)
_PLAIN = tuple(field.name for field in fields(Sample) if field.name not in _OTHERWISE)


def capture(trainer: Trainer) -> dict[str, Any]:
    """All that, with the weights, the run goes on from exactly as it would have. Tensors are not copied."""
    index = {problem.id: i for i, problem in enumerate(trainer.session.train)}
    in_use = trainer.rollout if trainer.step % trainer.recipe.trainer.updates_per_rollout else None
    old_head, updater = trainer.updater.old_head, trainer.updater
    return {
        "step": trainer.step,
        "tokens": trainer.tokens,
        "skipped": trainer.skipped,
        "silent": trainer.signal_watch.silent,
        "evaluations": trainer.evaluations,
        "random": random_state(),
        "stream": trainer.stream.state_dict(),
        "optimizer": optimizer_state(updater.optimizer),
        "terms": updater.objective.state,
        "critic": updater.critic.state_dict() if updater.critic else None,
        "tracker": trainer.tracker.state_dict() if trainer.tracker else None,
        "rollout": pack_rollout(in_use, index) if in_use else None,
        "old_head": dict(old_head.layer.state_dict()) if in_use and old_head else None,
    }


def restore(trainer: Trainer, state: Mapping[str, Any], changed: Collection[str]) -> list[str]:
    """The inverse of `capture`, the weights apart. -> what could not be gone on with, of a recipe that has changed.

    changed: the keys of the recipe that are not what they were.
    """
    notes: list[str] = []
    trainer.step, trainer.tokens = state["step"], state["tokens"]
    trainer.skipped, trainer.signal_watch.silent = dict(state["skipped"]), state["silent"]
    trainer.evaluations[:] = state["evaluations"]  # the diagnosis reads the same list
    updater = trainer.updater
    load_optimizer_state(updater.optimizer, state["optimizer"])
    rollout = state["rollout"]
    if any(key == "seed" or key.startswith("data.") for key in changed):
        notes.append("the data has changed: its order starts anew")
        rollout = None
    else:
        trainer.stream.load_state_dict(state["stream"])
    if any(key.startswith("objective.") for key in changed):
        notes.append("the objective has changed: adaptive coefficients, if it has any, start anew")
        if state["rollout"] is not None:
            rollout = None
            notes.append("what was left of the rollout in use was dropped with the old objective")
    else:
        updater.objective = updater.objective.with_state(state["terms"])
    if updater.critic is not None and state["critic"] is not None:
        updater.critic.load_state_dict(state["critic"])
    if trainer.tracker is not None and state["tracker"] is not None:
        trainer.tracker.load_state_dict(state["tracker"])
    if rollout is not None:
        trainer.rollout = unpack_rollout(rollout, trainer.session.train, trainer.session.policy.device)
    if rollout is not None and state["old_head"] is not None:
        head = trainer.session.policy.head.frozen()
        head.layer.load_state_dict(state["old_head"])
        updater.old_head = head
    set_random_state(state["random"])
    return notes


def pack_rollout(rollout: Rollout, problems: Mapping[str, int]) -> dict[str, Any]:
    """A rollout as tensors over all its tokens and plain values. problems: id -> index in the training set."""
    samples = rollout.samples
    tensors = {}
    for name in TENSORS:
        having = [i for i, sample in enumerate(samples) if getattr(sample, name) is not None]
        if having:
            tensors[name] = {"samples": having, "values": torch.cat([getattr(samples[i], name) for i in having])}
    return {
        "index": rollout.index,
        "metrics": rollout.metrics,
        "samples": [
            {name: getattr(sample, name) for name in _PLAIN}
            | {
                "problem": problems[sample.problem.id],
                "finished": sample.response.finished,
                "verdict": asdict(sample.verdict) | {"status": str(sample.verdict.status)},
            }
            for sample in samples
        ],
        "prompts": _packed([sample.prompt for sample in samples], torch.int64),
        "ids": _packed([sample.response.ids for sample in samples], torch.int64),
        "logps": _packed([sample.response.logps for sample in samples], torch.float64),
        "tensors": tensors,
    }


def unpack_rollout(packed: Mapping[str, Any], problems: Sequence[Problem], device: torch.device) -> Rollout:
    """The inverse of `pack_rollout`, tensors on `device`."""
    prompts, ids, logps = (_unpacked(packed[name]) for name in ("prompts", "ids", "logps"))
    samples = []
    for place, values in enumerate(packed["samples"]):
        verdict = Verdict(**values["verdict"] | {"status": Status(values["verdict"]["status"])})
        response = Response(tuple(ids[place]), tuple(logps[place]), values["finished"])
        plain = {name: values[name] for name in _PLAIN}
        samples.append(Sample(problems[values["problem"]], prompt=tuple(prompts[place]), response=response,
                              verdict=verdict, **plain))  # fmt: skip
    for name, entry in packed["tensors"].items():
        fill([samples[i] for i in entry["samples"]], **{name: entry["values"].to(device)})
    return Rollout(packed["index"], samples, packed["metrics"])


def _packed(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> dict[str, Any]:
    """Rows of numbers as one tensor and their lengths."""
    return {
        "lengths": [len(row) for row in rows],
        "values": torch.tensor([x for row in rows for x in row], dtype=dtype),
    }


def _unpacked(packed: Mapping[str, Any]) -> list[list[Any]]:
    values: Tensor = packed["values"]
    return [part.tolist() for part in values.split(packed["lengths"])]
