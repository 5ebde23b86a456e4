"""`load_task`: from the section `data` of a recipe to problems."""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tepo.config.data import Columns, DataConfig
from tepo.data.contamination import contamination_notes
from tepo.data.generated import GYM_PREFIX, load_arithmetic, load_gym
from tepo.data.presets import BOXED, PRESETS, HubSplit, Preset
from tepo.data.problem import Problem, TaskData, normalised
from tepo.data.read import is_file_name, read_files, read_hub
from tepo.data.rows import problems_from
from tepo.errors import TepoError

BUILT_IN = ("arithmetic",)
_HUB_ONLY = ("split", "subset")


def task_names() -> list[str]:
    """The names that `data.name` knows by themselves: built-in tasks and presets."""
    return [*BUILT_IN, *PRESETS]


def load_task(config: DataConfig, seed: int, *, test_only: bool = False) -> TaskData:
    """Load the problems that `config` names, split into training and held-out ones.

    Without a test file or split, a part of the training problems drawn by `seed` is held out: `test_problems`, at
    most half. Training problems whose question is among the held-out ones are left out, with a count; those that share
    much of their text with one are told in a note.

    test_only: leave the training problems alone where the held-out ones have a source of their own, and take all of
    them unless `test_problems` is set.

    Raises:
        TepoError: anything that cannot be used, by name: file and line, column, option, data set id.
    """
    if config.name in BUILT_IN or config.name.startswith(GYM_PREFIX):
        _refuse_files(config)
        task = load_arithmetic(config, seed) if config.name in BUILT_IN else load_gym(config, seed)
    else:
        task = _load_rows(config, seed, test_only)
    if config.template not in ("auto", "chat", "plain") and "{problem}" not in config.template:
        raise TepoError(
            f"data.template={config.template!r}: allowed are auto, chat, plain, or a text that contains {{problem}}"
        )
    return replace(
        task,
        template=task.template if config.template == "auto" else config.template,
        instruction=task.instruction if config.instruction is None else config.instruction or None,
        system=config.system,
    )


def _refuse_files(config: DataConfig) -> None:
    for key in ("file", "test_file", "columns"):
        if getattr(config, key) is not None:
            raise TepoError(f"data.{key}: {config.name} makes its problems and reads no {key}; leave it out")


@dataclass(frozen=True)
class _Source:
    """Where the rows of both splits come from; a file stands in for the hub. No split and no file: there is none."""

    train: HubSplit | None
    test: HubSplit | None
    preset: Preset | None
    file: str | None
    test_file: str | None


def _load_rows(config: DataConfig, seed: int, test_only: bool) -> TaskData:
    if config.options:
        raise TepoError(
            f"data.options: {config.name} is read, not made, and takes no options; found {', '.join(config.options)}"
        )
    source = _source(config)
    own_test = source.test_file is not None or source.test is not None
    if source.train is None and not test_only:
        raise TepoError(
            f"data.name={config.name}: a benchmark, there is nothing to train on in it. Train on another data set "
            f"({', '.join(name for name, preset in PRESETS.items() if preset.train)}, a file, a hub id)"
        )
    train: list[Problem] = []
    dropped: dict[str, int] = {}
    if source.train is not None and not (own_test and test_only):
        train, dropped = _read(config, source.train, source.preset, source.file, "data.file")
    if own_test:
        split = source.test or source.train
        assert split is not None
        test, without = _read(config, split, source.preset, source.test_file, "data.test_file", test=True)
        dropped |= {f"{reason}, of the held-out ones": count for reason, count in without.items()}
        if not test_only or "test_problems" in config.model_fields_set:
            test = _sample(test, config.test_problems, seed)
    else:
        train, test = hold_out(train, config.test_problems, seed, config.name)
    kept = _without(train, test)
    if len(train) > len(kept):
        dropped["questions that are held out"] = len(train) - len(kept)
    if not kept and not test_only:
        raise TepoError(
            f"data.name={config.name}: every training question is among the held-out ones; give another test_file"
        )
    preset = source.preset
    # Questions of one form with other numbers in it share their text and are not copies.
    of_one_form = bool(preset and preset.train and preset.train.question)
    kept = kept[: config.max_problems]
    return TaskData(
        config.name,
        [] if test_only else kept,
        test,
        verifier=preset.verifier if preset else "math",
        template=preset.template if preset else "auto",
        instruction=preset.instruction if preset else None,
        licence=preset.licence if preset else "",
        dropped=dropped,
        notes=() if test_only or of_one_form else contamination_notes(kept, test),
        protocol=preset.protocol if preset else None,
    )


def _source(config: DataConfig) -> _Source:
    columns = config.columns or Columns()
    preset = PRESETS.get(config.name)
    if preset is not None:
        for key in _HUB_ONLY:
            if key in config.model_fields_set:
                raise TepoError(
                    f"data.{key}: the preset {config.name} has its own; leave it out, or give the data set's hub id"
                )
        if preset.train is None and config.file is not None:
            raise TepoError(f"data.file={config.file}: {config.name} is a benchmark; give its file as data.test_file")
        # With a local training file nothing is fetched: the test set is a file too, or held out.
        return _Source(preset.train, None if config.file else preset.test, preset, config.file, config.test_file)
    if is_file_name(config.name):
        if config.file is not None:
            raise TepoError(
                f"data.file={config.file}: data.name is a file already ({config.name}); give one of the two"
            )
        return _Source(HubSplit(config.name, "train", columns), None, None, config.name, config.test_file)
    if "/" not in config.name and config.file is None:
        near = difflib.get_close_matches(config.name, task_names(), n=2, cutoff=0.5)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise TepoError(
            f"data.name={config.name}: no task of this name{hint}. Allowed: {', '.join(task_names())}, gym:TASK, "
            f"a .jsonl, .json or .parquet file, a hub id OWNER/NAME"
        )
    train = HubSplit(config.name, config.split, columns, config.subset)
    test = replace(train, split=config.test_split) if config.test_split and not config.file else None
    return _Source(train, test, None, config.file, config.test_file)


def _read(
    config: DataConfig, split: HubSplit, preset: Preset | None, file: str | None, key: str, *, test: bool = False
) -> tuple[list[Problem], dict[str, int]]:
    rows = read_hub(split.id, split.subset, split.split) if file is None else read_files(file, key)
    if file is None:
        choices = [config.columns] if config.columns and not (preset and test) else [split.columns]
        boxed = split.boxed
    else:
        # A local copy of a preset either keeps the hub's columns or has the plain ones of our own files.
        choices = [config.columns] if config.columns else [split.columns, Columns()]
        boxed = split.boxed and _file_has_solutions(file, key, split.columns.answer)
    return problems_from(
        rows,
        choices,
        file or split.id,
        boxed=boxed,
        wrapping=preset.wrapping if preset else ("", ""),
        deduplicate=bool(preset and preset.deduplicate and not test),
        skip_unanswered=bool(preset and preset.skip_unanswered),
        question=None if config.columns else split.question,
    )


def _file_has_solutions(file: str, key: str, column: str) -> bool:
    return any(column in row for _, row in [next(read_files(file, key), (None, {}))])


def hold_out(problems: Sequence[Problem], count: int, seed: int, name: str) -> tuple[list[Problem], list[Problem]]:
    """Split off `count` questions, at most half of them, drawn by `seed`: (training problems, held-out problems).

    Copies of one question are on the same side; the held-out side has each question once. Order is kept.

    Raises:
        TepoError: there are fewer than two different questions.
    """
    questions = list(dict.fromkeys(normalised(problem) for problem in problems))
    if len(questions) < 2:
        raise TepoError(f"data.name={name}: one question only, of which nothing can be held out; give data.test_file")
    drawn = set(random.Random(f"hold out {seed}").sample(range(len(questions)), min(count, len(questions) // 2)))
    held = {question for index, question in enumerate(questions) if index in drawn}
    train, test = [], []
    for problem in problems:
        question = normalised(problem)
        if question not in held:
            train.append(problem)
        elif drawn:
            test.append(problem)
    return train, _once(test)


def _once(problems: Sequence[Problem]) -> list[Problem]:
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(normalised(problem), problem)
    return list(first.values())


def _sample(problems: list[Problem], count: int, seed: int) -> list[Problem]:
    """`count` of the problems, drawn by `seed`, in their order: test sets are sorted by subject or difficulty."""
    if len(problems) <= count:
        return problems
    drawn = sorted(random.Random(f"test {seed}").sample(range(len(problems)), count))
    return [problems[index] for index in drawn]


def _without(train: Sequence[Problem], test: Sequence[Problem]) -> list[Problem]:
    held = {normalised(problem) for problem in test}
    return [problem for problem in train if normalised(problem) not in held]


__all__ = ["BOXED", "hold_out", "load_task", "task_names"]
