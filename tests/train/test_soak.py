"""A long run takes no more of the machine than a short one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from models import model_folder

STEPS = 300
EARLY, LATE = (100, 150), (250, STEPS)
MEMORY = 8 * 2**20
"""Bytes that the process may be larger between steps 250 and 300 than between 100 and 150: verdicts are remembered (up
to 20,000), and freed memory comes back to the system in pieces."""
FILES = 3
"""A checkpoint that is being written, its folder, a rollout: open at one moment and not at another."""


def test_three_hundred_steps_take_no_more_memory_files_threads_or_processes(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    problems = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
    for name, part in (("train", problems[40:]), ("test", problems[:40])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    command = [
        sys.executable, "-m", "tepo", "train", "model=model", "data=train.jsonl", "data.test_file=test.jsonl",
        "data.template=plain", "data.test_problems=8", "reward.verifier=verifiers:odd", "reward.workers=1",
        "rollout.max_response_tokens=12", f"trainer.steps={STEPS}", "trainer.prompts_per_rollout=4",
        "trainer.responses_per_prompt=4", "trainer.updates_per_rollout=4", "trainer.dynamic_sampling=true",
        "trainer.learning_rate=1e-4", "objective=aent", "evaluation.every=25", "checkpoint.every=5",
        "checkpoint.keep=2", "output=run",
    ]  # fmt: skip
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | environment, stdout=subprocess.DEVNULL)
    metrics, seen = tmp_path / "run" / "metrics.jsonl", []
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        try:
            with watched.oneshot():
                seen.append((step, watched.memory_info().rss, watched.num_fds(), watched.num_threads(),
                             len(watched.children(recursive=True))))  # fmt: skip
        except psutil.Error:  # it has just ended
            break
        time.sleep(0.02)
    assert process.wait() == 0
    early, late = ([row for row in seen if first <= row[0] < last] for first, last in (EARLY, LATE))
    assert len(early) > 5
    assert len(late) > 5
    most_before, most_after = ([max(column) for column in zip(*rows, strict=True)] for rows in (early, late))
    assert most_after[1] <= most_before[1] + MEMORY, (most_before, most_after)
    assert most_after[2] <= most_before[2] + FILES, (most_before, most_after)
    assert most_after[3:] == most_before[3:]
