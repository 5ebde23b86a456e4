"""Tasks from files and generators: what is read, how it is split, and what each fault says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tepo.config.data import Columns, DataConfig
from tepo.data.load import hold_out, load_task
from tepo.data.presets import PRESETS
from tepo.data.problem import Problem, normalised
from tepo.data.rows import boxed_answer, problems_from
from tepo.errors import TepoError


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def sums(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"problem": f"What is {i} + 1?", "answer": str(i + 1), **more} for i in range(count)]


def questions(problems: Any) -> set[str]:
    return {normalised(problem) for problem in problems}


def test_importing_data_is_light() -> None:
    names = ("torch", "datasets", "transformers")
    code = f"import sys, tepo.data, tepo.data.problem; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arithmetic_is_the_default_and_its_splits_are_disjoint() -> None:
    task = load_task(DataConfig(max_problems=50, test_problems=20, options={"digits": 2}), seed=3)
    assert (len(task.train), len(task.test), task.verifier, task.template) == (50, 20, "exact", "plain")
    assert not questions(task.train) & questions(task.test)
    again = load_task(DataConfig(max_problems=50, test_problems=20, options={"digits": 2}), seed=3)
    assert again.train == task.train


def test_arithmetic_names_an_unknown_option() -> None:
    with pytest.raises(
        TepoError, match=r"data\.options\.digit: arithmetic has no such option; allowed: digits, train, test"
    ):
        load_task(DataConfig(options={"digit": 2}), seed=0)


def test_a_file_without_test_file_is_split_by_seed(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "sums.jsonl", sums(40))
    task = load_task(DataConfig(name=file, test_problems=10), seed=1)
    assert (len(task.train), len(task.test)) == (30, 10)
    assert not questions(task.train) & questions(task.test)
    assert load_task(DataConfig(name=file, test_problems=10), seed=1).test == task.test
    assert load_task(DataConfig(name=file, test_problems=10), seed=2).test != task.test
    assert task.verifier == "math"


def test_at_most_half_is_held_out(tmp_path: Path) -> None:
    task = load_task(DataConfig(name=write_rows(tmp_path / "a.jsonl", sums(7)), test_problems=200), seed=0)
    assert (len(task.train), len(task.test)) == (4, 3)


def test_copies_of_a_question_stay_on_one_side() -> None:
    problems = [Problem(f"{copy}-{i}", f"What is  {i}" + "?" * copy, "1") for copy in range(3) for i in range(10)]
    train, test = hold_out(problems, 4, seed=0, name="x")
    assert not questions(train) & questions(test)
    assert (len(train), len(test)) == (18, 4)


def test_training_questions_in_the_test_file_are_left_out_with_a_count(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", sums(10))
    test = write_rows(tmp_path / "test.jsonl", [{"problem": "what is 3 +  1 ?", "answer": 4}])
    task = load_task(DataConfig(name=train, test_file=test), seed=0)
    assert len(task.train) == 9
    assert task.dropped == {"questions that are held out": 1}
    assert task.test[0].answer == "4"


def test_max_problems_and_instruction(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", sums(20, level=3))
    task = load_task(DataConfig(name=file, max_problems=5, instruction="Think.", system="Be kind."), seed=0)
    assert (len(task.train), task.instruction, task.system) == (5, "Think.", "Be kind.")
    assert task.train[0].info == {"level": 3}


def test_json_and_parquet_read_as_jsonl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sums(6)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    write_rows(tmp_path / "a.jsonl", rows)
    tasks = [
        load_task(DataConfig(name=str(tmp_path / f"a.{suffix}")), seed=0) for suffix in ("jsonl", "json", "parquet")
    ]
    assert tasks[0].train == tasks[1].train == tasks[2].train
    assert tasks[0].test == tasks[2].test


def test_chat_messages_and_nested_columns(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}
    other = {**row, "prompt": [{"role": "user", "content": "1+2?"}]}
    file = write_rows(tmp_path / "a.jsonl", [row, other])
    columns = Columns(problem="prompt", answer="reward_model.ground_truth")
    task = load_task(DataConfig(name=file, columns=columns), seed=0)
    assert task.train[0].prompt[0] == {"role": "user", "content": task.train[0].text}
    assert task.train[0].answer == "2"


def test_dapo_rows_lose_their_repeats_and_their_own_instruction(tmp_path: Path) -> None:
    preset = PRESETS["dapo-math-17k"]
    before, after = preset.wrapping
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{before}Find {i % 4}x.{after}"}],
            "reward_model": {"ground_truth": "34"},
        }
        for i in range(40)
    ]
    task = load_task(
        DataConfig(name="dapo-math-17k", file=write_rows(tmp_path / "d.jsonl", rows), test_problems=1), seed=0
    )
    assert len(task.train) == 3
    assert task.dropped == {"repeated questions": 36}
    assert {problem.prompt for problem in [*task.train, *task.test]} == {f"Find {i}x." for i in range(4)}


def test_gsm8k_solutions_and_bare_answers_both_work(tmp_path: Path) -> None:
    hub = [{"question": f"How many {i}?", "answer": f"So <<{i}*2={2 * i}>>.\n#### {2 * i},000"} for i in range(4)]
    ours = [{"id": f"g-{i}", "problem": f"How many {i}?", "answer": f"{2 * i},000"} for i in range(4)]
    from_hub = load_task(DataConfig(name="gsm8k", file=write_rows(tmp_path / "h.jsonl", hub)), seed=0)
    from_ours = load_task(DataConfig(name="gsm8k", file=write_rows(tmp_path / "o.jsonl", ours)), seed=0)
    assert [(p.prompt, p.answer) for p in from_hub.train] == [(p.prompt, p.answer) for p in from_ours.train]
    assert from_ours.train[0].id.startswith("g-")
    assert "####" in (from_hub.instruction or "")


def test_math_answers_come_out_of_the_solutions_box(tmp_path: Path) -> None:
    rows = [
        {"problem": f"Find {i}.", "solution": f"First \\boxed{{0}}, so $\\boxed{{\\frac{{{i}}}{{7}}}}$."}
        for i in range(4)
    ]
    task = load_task(DataConfig(name="math", file=write_rows(tmp_path / "m.jsonl", rows)), seed=0)
    assert all(problem.answer == f"\\frac{{{problem.text[5]}}}{{7}}" for problem in task.train)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{\{1,\frac{2}{3}\}}", r"\{1,\frac{2}{3}\}"),
        (r"$\boxed 7$.", "7"),
        (r"\fbox{a{b}c} end", "a{b}c"),
        (r"\boxed{1", None),
        ("none", None),
    ],
)
def test_boxed_answer(solution: str, answer: str | None) -> None:
    assert boxed_answer(solution) == answer


def test_gsm8k_and_math_from_shared_files(shared_data: Path) -> None:
    config = DataConfig(
        name="gsm8k", file=str(shared_data / "gsm8k_train_part*.jsonl"), test_file=str(shared_data / "gsm8k_test.jsonl")
    )
    task = load_task(config, seed=0)
    assert (len(task.train), len(task.test)) == (7473, 200)
    assert (task.train[0].answer, task.train[1].answer) == ("72", "10")
    assert not questions(task.train) & questions(task.test)
    maths = DataConfig(
        name="math",
        file=str(shared_data / "math_train.jsonl"),
        test_file=str(shared_data / "math500.jsonl"),
        test_problems=500,
    )
    assert (len(load_task(maths, 0).train), len(load_task(maths, 0).test)) == (5860, 500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad\.jsonl: there are no rows"),
        ('{"problem": "p", "answer": "1"}\n{"problem": oops}\n', r"bad\.jsonl, line 2: not JSON .*oops"),
        ('{"problem": "p", "answer": "1"}\n\n[1]\n', r"bad\.jsonl, line 3: found a list; a row must be an object"),
        (
            '{"problm": "p", "answer": "1"}\n',
            r"line 1: there is no column 'problem'.*found problm, answer; nearest: problm",
        ),
        ('{"problem": "p", "answer": ""}\n', r"line 1: no answer \(column 'answer' is empty\)"),
        ('{"problem": "p", "answer": null}\n', r"line 1: no answer \(column 'answer' is null\)"),
        ('{"problem": "p", "answer": "so\\n#### "}\n', r"line 1: no answer \(nothing follows the last ####"),
        (
            '{"problem": "p", "answer": [1]}\n',
            r"line 1: column 'answer' holds \[1\] \(list\); an answer must be a text or a number",
        ),
        (
            '{"problem": 5, "answer": "1"}\n',
            r"line 1: column 'problem' holds 5 \(int\); a problem must be a text or a list",
        ),
        ('{"problem": " ", "answer": "1"}\n', r"line 1: column 'problem' is empty"),
        (
            '{"problem": [{"role": "me", "content": "x"}], "answer": "1"}\n',
            r"line 1: .*must have a `role` \(system, user",
        ),
        (
            '{"id": "a", "problem": "p", "answer": "1"}\n{"id": "a", "problem": "q", "answer": "1"}\n',
            r"line 2: the id 'a' is that of .*bad\.jsonl, line 1 too",
        ),
        ('{"problem": "p", "answer": "1"}\n', r"one question only.*give data\.test_file"),
    ],
)
def test_each_fault_of_a_file_is_one_message_that_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(TepoError, match=message):
        load_task(DataConfig(name=str(file)), seed=0)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"problem": "\xff"}\n')
    with pytest.raises(TepoError, match=r"line 1: byte 14 is not UTF-8"):
        load_task(DataConfig(name=str(tmp_path / "a.jsonl")), seed=0)
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(TepoError, match=r"a\.parquet: not a parquet file"):
        load_task(DataConfig(name=str(tmp_path / "a.parquet")), seed=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(name="gsm8"), r"data\.name=gsm8: no task of this name; nearest: gsm8k"),
        (DataConfig(name="none.jsonl"), r"none\.jsonl: no such file"),
        (
            DataConfig(name="gsm8k", file="a.csv"),
            r"data\.file=a\.csv: found a file ending in '\.csv'; allowed are \.jsonl",
        ),
        (DataConfig(name="gsm8k", file="no*.jsonl"), r"data\.file=no\*\.jsonl: no file has such a name"),
        (DataConfig(file="x.jsonl"), r"data\.file: arithmetic makes its problems"),
        (DataConfig(name="gsm8k", subset="x"), r"data\.subset: the preset gsm8k has its own"),
        (DataConfig(template="Q: {question}"), r"data\.template='Q: \{question\}': allowed are auto, chat, plain"),
    ],
)
def test_faults_of_the_recipe(config: DataConfig, message: str) -> None:
    with pytest.raises(TepoError, match=message):
        load_task(config, seed=0)


def test_a_hub_set_that_cannot_be_had_names_itself_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'owner/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(TepoError, match=r"'owner/set'.*Couldn't reach.*data\.file=TRAIN\.jsonl"):
        load_task(DataConfig(name="owner/set"), seed=0)


def test_a_hub_set_is_read_by_split_and_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def fake(name: str, subset: str | None, split: str) -> Any:
        asked.append((name, subset, split))
        rows = [{"question": f"{split} {i}?", "answer": f"so\n#### {i}"} for i in range(3)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    task = load_task(DataConfig(name="gsm8k", test_problems=2), seed=0)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [problem.answer for problem in task.train] == ["0", "1", "2"]
    assert len(task.test) == 2


def test_gym_splits_are_disjoint_and_options_are_passed_on() -> None:
    pytest.importorskip("reasoning_gym")
    config = DataConfig(name="gym:leg_counting", max_problems=30, test_problems=10, options={"max_animals": 4})
    task = load_task(config, seed=5)
    assert (len(task.train), len(task.test), task.verifier) == (30, 10, "gym")
    assert not questions(task.train) & questions(task.test)
    gym = task.train[0].info["gym"]
    assert gym["task"] == "leg_counting"
    assert gym["options"] == {"max_animals": 4}
    assert gym["entry"]["answer"] == task.train[0].answer


def test_gym_faults() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TepoError, match=r"gym:leg_count: reasoning-gym has no such task; nearest: leg_counting"):
        load_task(DataConfig(name="gym:leg_count"), seed=0)
    with pytest.raises(TepoError, match=r"data\.options for gym:countdown.*it has min_numbers"):
        load_task(DataConfig(name="gym:countdown", options={"numbers": 3}), seed=0)
    with pytest.raises(TepoError, match=r"data\.options\.size: set by tepo"):
        load_task(DataConfig(name="gym:countdown", options={"size": 3}), seed=0)


def test_gym_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TepoError, match=r"pip install 'tepo\[gym\]'"):
        load_task(DataConfig(name="gym:countdown"), seed=0)


def test_deduplicate_counts_repeats() -> None:
    from tepo.data.read import RowPlace

    rows = [(RowPlace("x", "row", i), {"problem": f"q{i % 3}", "answer": "1"}) for i in range(9)]
    problems, repeated = problems_from(rows, [Columns()], "x", deduplicate=True)
    assert ([problem.text for problem in problems], repeated) == (["q0", "q1", "q2"], {"repeated questions": 6})
