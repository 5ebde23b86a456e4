"""Our problems as verl's Parquet files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from tepo.data.problem import Problem, TaskData
from tepo.data.prompts import chat_messages
from tepo.errors import TepoError


def write_parquet(task: TaskData, folder: str | Path) -> tuple[Path, Path]:
    """Write the training and the held-out problems of a task; -> `train.parquet`, `test.parquet` in the folder.

    A row is what verl's data set reads: `data_source`, `prompt` (chat messages, instruction and system message
    included), `reward_model.ground_truth`, `extra_info`. Raises TepoError for a task that is not asked as a chat,
    since verl puts every prompt through the model's chat template, and for what a row cannot hold.
    """
    if task.template not in ("auto", "chat"):
        raise TepoError(f"data.template = {task.template!r}: verl asks by the model's chat template; allowed: chat")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "train.parquet", folder / "test.parquet"
    for path, problems in zip(written, (task.train, task.test), strict=True):
        Dataset.from_list(_rows(task, problems)).to_parquet(path)
    return written


def _rows(task: TaskData, problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [
        {
            "data_source": task.name,
            "prompt": [dict(message) for message in chat_messages(problem, task.system, task.instruction)],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {
                "index": number,
                "id": problem.id,
                "problem": problem.text,
                "verifier": task.verifier,
                "info": _info(task, problem),
            },
        }
        for number, problem in enumerate(problems)
    ]


def _info(task: TaskData, problem: Problem) -> str:
    try:
        return json.dumps(dict(problem.info))
    except TypeError as error:
        raise TepoError(f"data.name = {task.name}: problem {problem.id} cannot be written for verl: {error}") from None
