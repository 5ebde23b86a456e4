"""Tasks whose problems are made, not read: the built-in arithmetic and reasoning-gym's."""

import difflib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from tepo.config.data import DataConfig
from tepo.data import arithmetic
from tepo.data.problem import Problem, TaskData, normalised
from tepo.errors import TepoError

GYM_PREFIX = "gym:"
GYM_INSTRUCTION = "Think step by step, and give the final answer alone between <answer> and </answer>."
GYM_TRAIN = 1000
"""Training problems of a reasoning-gym task when data.max_problems does not say."""
_GYM_TRIES = 4
"""A task that repeats itself is asked for at most so many questions for each one wanted."""


def load_arithmetic(config: DataConfig, seed: int) -> TaskData:
    """The built-in addition task (`tepo.data.arithmetic`); `data.options.digits` is the number of digits.

    Raises:
        TepoError: an option that it does not have, or more problems than there are.
    """
    allowed = [name for name in inspect.signature(arithmetic.generate).parameters if name != "seed"]
    for option in config.options:
        if option not in allowed:
            raise TepoError(f"data.options.{option}: arithmetic has no such option{_nearest(option, allowed)}")
    options = {"test": config.test_problems, **config.options}
    if config.max_problems is not None:
        options["train"] = config.max_problems
    train, test = arithmetic.generate(seed, **options)
    return TaskData("arithmetic", train, test, verifier="exact", template="plain", licence="made by tepo")


def load_gym(config: DataConfig, seed: int) -> TaskData:
    """A reasoning-gym task, `gym:TASK`: `data.options` are the task's own parameters.

    The entry that its scorer needs is in each problem's info under `gym`. Test questions come from another range of
    seeds and are not among the training ones.

    Raises:
        TepoError: reasoning-gym is not installed, it has no such task, the task refuses the options.
    """
    task = config.name.removeprefix(GYM_PREFIX)
    for option in ("seed", "size"):
        if option in config.options:
            remedy = "seed" if option == "seed" else "data.max_problems and data.test_problems"
            raise TepoError(f"data.options.{option}: set by tepo for a reasoning-gym task; use {remedy}")
    wanted = config.max_problems or GYM_TRAIN
    taken: set[str] = set()
    # Item i of reasoning-gym's data set with seed s is made from s + i: ranges of seeds far apart do not meet.
    test = list(_gym_problems(task, seed + 1_000_000_000, "test", config.test_problems, config.options, taken))
    train = list(_gym_problems(task, seed, "train", wanted, config.options, taken))
    if not train:
        raise TepoError(
            f"data.name={config.name}: all {len(test)} different questions that it makes are held out; "
            f"ask for fewer data.test_problems or other data.options"
        )
    short = {"questions that repeat (wanted but not made)": wanted - len(train)} if len(train) < wanted else {}
    return TaskData(
        config.name,
        train,
        test,
        "gym",
        instruction=GYM_INSTRUCTION,
        licence="Apache-2.0 (reasoning-gym)",
        dropped=short,
    )


def _gym_problems(
    task: str, seed: int, split: str, count: int, options: Mapping[str, Any], taken: set[str]
) -> Iterator[Problem]:
    dataset = _gym_dataset(task, seed, count * _GYM_TRIES, options)
    made = 0
    for index in range(count * _GYM_TRIES):
        if made == count:
            return
        entry = dataset[index]
        answer = entry["answer"]
        info = {"gym": {"task": task, "options": dict(options), "entry": entry}}
        problem = Problem(f"{task}-{split}-{index}", entry["question"], "" if answer is None else str(answer), info)
        question = normalised(problem)
        if question in taken:
            continue
        taken.add(question)
        made += 1
        yield problem


def _gym_dataset(task: str, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TepoError(
            f"data.name=gym:{task} needs reasoning-gym, which is not installed: pip install 'tepo[gym]'"
        ) from error
    if task not in DATASETS:
        raise TepoError(f"data.name=gym:{task}: reasoning-gym has no such task{_nearest(task, sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        config_class = DATASETS[task][1]
        allowed = [name for name in inspect.signature(config_class).parameters if name not in ("seed", "size")]
        raise TepoError(
            f"data.options for gym:{task} = {dict(options)}: refused ({error}); "
            f"it has {', '.join(allowed) or 'no options'}"
        ) from error


def _nearest(name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.4)
    if len(allowed) <= 8:
        return f"; allowed: {', '.join(allowed)}"
    return f"; nearest: {', '.join(near)}" if near else ""
