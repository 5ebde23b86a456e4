"""The responses that a report shows: some of each verdict, from the beginning of a run to its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from tepo.report.run import Record, Run, read_lines

ROLLOUTS = 12
PER_VERDICT = 6
HELD_OUT = 12
"""Rollouts shown, evenly spread; responses of each verdict in one of them, and in an evaluation."""

CHARACTERS = 6000
"""Of a text; of a longer one, its beginning and its end."""

TRAINING = "training"


def samples(run: Run) -> list[dict[str, Any]]:
    """Plain values, in the order of their steps; responses to different problems before further ones to the same."""
    shown = [
        _shown(record, run.step_of(rollout), TRAINING)
        for rollout in _spread(run.rollouts(), ROLLOUTS)
        for record in _some(run.responses(rollout), PER_VERDICT)
    ]
    for entry in {id(e): e for e in (*run.evaluations[:1], *run.evaluations[-1:])}.values():
        for kind in ("sampled", "greedy"):
            path = run.folder / "evaluations" / f"step_{entry['step']:06d}_{kind}.jsonl"
            shown += [
                _shown(record, entry["step"], f"held out, {kind}") for record in _some(read_lines(path), HELD_OUT)
            ]
    return shown


def _spread(items: list[int], count: int) -> list[int]:
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _some(records: Iterable[Record], count: int) -> Iterator[Record]:
    """At most `count` of each verdict, of as many problems as there are."""
    kept: dict[str, list[tuple[int, int, Record]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for place, record in enumerate(records):
        key = record["status"], record["id"]
        again = seen[key] = seen.get(key, -1) + 1
        chosen = kept.setdefault(record["status"], [])
        chosen.append((again, place, record))
        if len(chosen) > count:  # the latest of those whose problem came most often goes
            chosen.remove(max(chosen, key=lambda entry: entry[:2]))
    return itertools.chain.from_iterable((record for _, _, record in chosen) for chosen in kept.values())


def _shown(record: Record, step: int, source: str) -> dict[str, Any]:
    shown = {
        "source": source,
        "step": step,
        "verdict": record["status"],
        "problem": _cut(record["problem"]),
        "response": _cut(record["response"]),
        "gold": _cut(str(record["answer"])),
        "answer": record["extracted"] and _cut(str(record["extracted"])),
        "tokens": record["tokens"],
        "cut": record["finish_reason"] == "length",
    }
    return shown | {key: round(record[key], 4) for key in ("reward", "advantage") if record.get(key) is not None}


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
