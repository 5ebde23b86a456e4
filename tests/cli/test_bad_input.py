"""Bad input: exit code 2, one message that names the thing, no traceback, nothing written; and what is no bad input."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
from bad_input import CASES, SECTIONS, Case, Outcome, headers, make_folder, page, run
from models import character_tokenizer, model_folder

from tepo.config import Recipe
from tepo.errors import TepoError
from tepo.train.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "bad-input.md"


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below a folder, by its content; what Python compiled is not ours."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("work")
    make_folder(made)
    return made


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What the commands came to, by themselves; each is run once."""
    return {}


def outcome(case: Case, folder: Path, outcomes: dict[str, Outcome]) -> Outcome:
    if case.needs is not None and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"needs {case.needs}")
    if case.command not in outcomes:
        outcomes[case.command] = run(case, folder)
    return outcomes[case.command]


@pytest.mark.parametrize("case", CASES, ids=[case.command for case in CASES])
def test_is_one_message_and_changes_nothing(case: Case, folder: Path, outcomes: dict[str, Outcome]) -> None:
    before = contents(folder)
    got = outcome(case, folder, outcomes)
    assert got.code == 2, got.printed
    for part in case.named:
        assert part in got.message
    assert headers(got.printed) == 1
    assert "Traceback" not in got.printed
    assert contents(folder) == before


def test_page_is_up_to_date(folder: Path, outcomes: dict[str, Outcome]) -> None:
    for case in CASES:
        outcome(case, folder, outcomes)
    assert page(outcomes) == PAGE.read_text(encoding="utf-8"), "run: python scripts/write_bad_input.py"


def test_every_case_is_another_one() -> None:
    assert len({case.command for case in CASES}) == len(CASES) == sum(map(len, SECTIONS.values()))


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """Root may write everywhere: as another user where the tests run as root."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        for parent in (tmp_path, *tmp_path.parents):
            parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        with pytest.raises(TepoError, match=r"output = '.*locked/run' cannot be written: Permission denied"):
            RunFolder(locked / "run").create(Recipe())
    finally:
        if root:
            os.seteuid(0)
    assert not list(locked.iterdir())


UNICODE = ["größer 1+1?", "‮1+1‬ \u0007 \u2028", "𝟙+𝟙 👩\u200d👩\u200d👧 क्षि", "1+1\r\n\t= e\u0301 é"]
"""Right to left, a bell, a line separator, beyond the basic plane, joined, composed and not."""


def test_unicode_survives_a_run_on_a_model_without_padding_or_chat_template(tmp_path: Path) -> None:
    """A byte-order mark in front, and nothing normalised: what was in the file is in the rollouts and evaluations."""
    rows = [{"problem": f"{text} {i}", "answer": "2", "id": f"{text}-{i}"} for i, text in enumerate(UNICODE * 3)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    model_folder(tmp_path / "model", pad_token_id=None)
    tokenizer = character_tokenizer(pad_token=None)
    assert tokenizer.pad_token_id is None
    tokenizer.save_pretrained(tmp_path / "model")
    settings = [
        "model=./model", "data=rows.jsonl", "trainer.steps=2", "trainer.prompts_per_rollout=8", "output=out",
        "trainer.responses_per_prompt=2", "trainer.updates_per_rollout=2", "rollout.max_response_tokens=4",
        "data.test_problems=4",
    ]  # fmt: skip
    got = run(Case("good", ("train", *settings), ()), tmp_path)
    assert got.code == 0, got.printed
    written = [
        json.loads(line)
        for file in (*(tmp_path / "out" / "rollouts").iterdir(), *(tmp_path / "out" / "evaluations").iterdir())
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]
    known = {(row["id"], row["problem"]) for row in rows}
    assert {(record["id"], record["problem"]) for record in written} == known


def test_prompts_beyond_the_limit_are_left_out_with_a_count(tmp_path: Path) -> None:
    rows = [{"problem": "1" * length, "answer": str(length)} for length in range(1, 21)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model_folder(tmp_path / "model")
    settings = [
        "model=./model", "data=rows.jsonl", "trainer.steps=1", "trainer.prompts_per_rollout=2", "output=out",
        "trainer.responses_per_prompt=2", "trainer.updates_per_rollout=1", "rollout.max_response_tokens=4",
        "data.max_prompt_tokens=15", "data.test_problems=2", "evaluation.before=false", "evaluation.after=false",
    ]  # fmt: skip
    got = run(Case("good", ("train", *settings), ()), tmp_path)
    assert got.code == 0, got.printed
    assert "left out: 5 problems (prompt too long)" in got.printed
