"""Tasks, problems and prompts. Names load when they are used: judging processes import `tepo.data.problem` alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo.data.load import load_task, task_names
    from tepo.data.problem import Problem, TaskData
    from tepo.data.prompts import drop_long_prompts, render_prompt, resolve_template
    from tepo.data.stream import PromptStream

_HOMES = {
    "load_task": "load",
    "task_names": "load",
    "Problem": "problem",
    "TaskData": "problem",
    "drop_long_prompts": "prompts",
    "render_prompt": "prompts",
    "resolve_template": "prompts",
    "PromptStream": "stream",
}

__all__ = [
    "Problem",
    "PromptStream",
    "TaskData",
    "drop_long_prompts",
    "load_task",
    "render_prompt",
    "resolve_template",
    "task_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tepo.data.{_HOMES[name]}"), name)
