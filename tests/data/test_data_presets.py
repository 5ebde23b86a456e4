"""The named data sets: local copies load through them, benchmarks are for measuring, overlaps are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tepo.config.data import DataConfig
from tepo.data import read as reading
from tepo.data.contamination import WORDS, contamination_notes, find_overlaps
from tepo.data.load import load_task
from tepo.data.presets import PRESETS
from tepo.data.problem import Problem
from tepo.errors import TepoError

BENCHMARKS = {
    "gsm8k": ("gsm8k_test", 1319), "math500": ("math500", 500), "aime24": ("aime24", 30), "aime25": ("aime25", 30),
    "amc23": ("amc23", 40), "minerva": ("minerva_math", 272), "olympiadbench": ("olympiadbench", 675),
    "college-math": ("college_math_ccby", 1219), "gaokao2023en": ("gaokao2023en", 383),
}  # fmt: skip
TRAINING = {
    "gsm8k": ("gsm8k_train_part*", "gsm8k_test", 7473), "math": ("math_train", "math500", 5860),
    "dapo-math-17k": ("dapo_math_train", "aime24", 5710), "deepscaler": ("deepscaler_sub_train", "aime24", 1205),
    "countdown": ("countdown_train", "countdown_test", 7464),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_local_copies_of_benchmarks(shared_data: Path, name: str) -> None:
    file, count = BENCHMARKS[name]
    task = load_task(DataConfig(name=name, test_file=str(shared_data / f"{file}.jsonl")), 0, test_only=True)
    assert (len(task.test), len(task.train)) == (count, 0)
    assert task.protocol == PRESETS[name].protocol
    assert task.licence
    assert "boxed" in (task.instruction or "") or "####" in (task.instruction or "")


@pytest.mark.parametrize("name", TRAINING)
def test_local_copies_of_training_sets(shared_data: Path, name: str) -> None:
    file, test, count = TRAINING[name]
    config = DataConfig(
        name=name,
        file=str(shared_data / f"{file}.jsonl"),
        test_file=str(shared_data / f"{test}.jsonl"),
        test_problems=20,
    )
    task = load_task(config, seed=0)
    assert len(task.train) == count
    assert len(task.test) == 20
    assert task.verifier == ("countdown" if name == "countdown" else "math")


def test_every_name_of_the_issue_is_there() -> None:
    wanted = {*BENCHMARKS, *TRAINING, "omni-math"}
    assert wanted <= PRESETS.keys()
    for preset in PRESETS.values():
        splits = [split for split in (preset.train, preset.test) if split]
        assert splits
        assert all(split.id.count("/") == 1 for split in splits)


def test_a_benchmark_is_not_trained_on() -> None:
    with pytest.raises(TepoError, match=r"data\.name=aime24: a benchmark, there is nothing to train on"):
        load_task(DataConfig(name="aime24", test_file="x.jsonl"), seed=0)
    with pytest.raises(TepoError, match=r"give its file as data\.test_file"):
        load_task(DataConfig(name="aime24", file="x.jsonl"), seed=0, test_only=True)


HUB_ROWS: dict[str, dict[str, Any]] = {
    "olympiadbench": {"id": 7, "question": "q?", "final_answer": ["1", "2"], "subfield": "Algebra"},
    "minerva": {"question": "q?", "answer": "5"},
    "omni-math": {"problem": "q?", "answer": "5", "domain": ["Mathematics -> Algebra -> Other"], "difficulty": 4.5},
    "aime25": {"problem": "q?", "answer": "5", "id": "0"},
    "amc23": {"id": 0, "question": "q?", "answer": 27.0},
    "gaokao2023en": {"question": "q?", "answer": "$5$"},
    "college-math": {"question": "q?", "answer": "$5$"},
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_rows_with_the_columns_of_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The columns as public code that reads these data sets has them."""
    row = HUB_ROWS[name]
    asked: list[tuple[Any, ...]] = []

    def rows(*split: Any) -> Any:
        asked.append(split)
        return reading._numbered(name, [row])

    monkeypatch.setattr("tepo.data.load.read_hub", rows)
    (problem,) = load_task(DataConfig(name=name), 0, test_only=True).test
    assert problem.text == "q?"
    assert problem.answer in ("1, 2", "5", "27.0", "$5$")
    test = PRESETS[name].test
    assert test is not None
    assert asked == [(test.id, test.subset, test.split)]


def test_countdown_rows_of_the_hub_become_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"nums": [i, 2, 3], "target": 6 + i} for i in range(4)]
    monkeypatch.setattr("tepo.data.load.read_hub", lambda *_: reading._numbered("c", rows))
    task = load_task(DataConfig(name="countdown", test_problems=1), 0)
    problem = next(p for p in [*task.train, *task.test] if p.info["nums"] == [3, 2, 3])
    assert problem.answer == "9"
    assert "worth 9 from the numbers 3, 2, 3" in problem.text


def test_rows_without_an_answer_are_counted_where_the_data_set_has_them(tmp_path: Path) -> None:
    rows = [{"problem": f"What is {i} + {i}?", "answer": "" if i == 1 else str(2 * i)} for i in range(4)]
    file = tmp_path / "g.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(DataConfig(name="gaokao2023en", test_file=str(file)), 0, test_only=True)
    assert len(task.test) == 3
    assert task.dropped == {"no answer, of the held-out ones": 1}
    with pytest.raises(TepoError, match="no answer"):
        load_task(DataConfig(name="math500", test_file=str(file)), 0, test_only=True)


SENTENCE = "Anna has seven red apples and gives three of them to her younger brother Ben on Monday"


def problem(name: str, text: str) -> Problem:
    return Problem(name, text, "1")


def test_overlaps_are_copies_with_other_words_around_or_numbers_in_them() -> None:
    test = [
        problem("t1", f"{SENTENCE}. How many are left?"),
        problem("t2", "How long is the side of a square of area 4?"),
    ]
    train = [
        problem("a", f"Listen: {SENTENCE}. How many has Anna?"),
        problem("b", "Anna has seven green pears and sells three of them."),
        problem("c", "short"),
        problem("d", f"{SENTENCE}. How many are left?".upper()),
    ]
    found = find_overlaps(train, test)
    assert [(o.train_id, o.test_id) for o in found] == [("a", "t1"), ("d", "t1")]
    words = SENTENCE.split()
    pieces = len(words) + 4 - WORDS + 1  # and "How many are left"
    assert found[0].share == pytest.approx((len(words) + 2 - WORDS + 1) / pieces)
    assert found[1].share == 1
    (note,) = contamination_notes(train, test)
    assert "2 training questions share at least 50%" in note
    assert "d ~ t1 (100%), a ~ t1" in note
    assert contamination_notes(train[1:3], test) == ()


def test_the_form_of_a_task_is_no_overlap() -> None:
    """What stands in every held-out question says nothing."""
    form = "Using the numbers that follow, create an equation that equals the target given at the end:"
    test = [problem(f"t{i}", f"{form} {i}") for i in range(300)]
    assert find_overlaps([problem("a", f"{form} 999")], test) == []


def test_overlaps_of_the_shared_files(shared_data: Path) -> None:
    config = DataConfig(
        name="math", file=str(shared_data / "math12k_train.jsonl"), test_file=str(shared_data / "math500.jsonl"),
        test_problems=500,
    )  # fmt: skip
    (note,) = load_task(config, 0).notes
    assert note.startswith("65 training questions")
