"""What a session tells of its data before anything is sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import model_folder

from tepo.config import Recipe, load_recipe
from tepo.errors import TepoError
from tepo.evaluate.session import Session


def recipe(folder: Path, train: list[str], test: list[str]) -> Recipe:
    for name, golds in (("train", train), ("test", test)):
        rows = [{"id": f"{name}{i}", "problem": f"{name} {i} + 1 =", "answer": gold} for i, gold in enumerate(golds)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_folder(folder / "model")
    data = [f"data={folder / 'train.jsonl'}", f"data.test_file={folder / 'test.jsonl'}"]
    return load_recipe(
        None, [f"model={model}", *data, "reward.workers=1", "rollout.max_response_tokens=4", "model.device=cpu"]
    )


def test_unreadable_golds_are_told_with_ids_and_not_trained_on(tmp_path: Path) -> None:
    """TRL PR 5902: golds that could not be read paid 1.0."""
    with Session.open(recipe(tmp_path, ["1", r"\frac{1}{", "3"], ["4", "$$"])) as session:
        assert [problem.id for problem in session.train] == ["train0", "train2"]
        ((reason, count),) = session.dropped.items()
        assert (count, reason.startswith("gold answers that cannot be read: train1: ")) == (1, True)
        assert [problem.id for problem in session.test] == ["test0", "test1"]
        (note,) = session.notes
        assert note.startswith("nothing is correct for 1 held-out problems, test1: ")


def test_a_data_set_without_a_readable_gold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TepoError, match=r"no gold answer can be read by reward\.verifier=math \(train0: "):
        Session.open(recipe(tmp_path, [r"\frac{1}{", r"\boxed{"], ["4"]))


def test_another_data_set_with_the_same_model(tmp_path: Path) -> None:
    first = recipe(tmp_path, ["1", "2"], ["4", "5"])
    with Session.open(first, trainable=False) as session:
        assert (len(session.train), len(session.test)) == (0, 2)
    other = first.model_copy(update={"data": first.data.model_copy(update={"test_file": first.data.name})})
    with session.on(other) as second:
        assert second.policy is session.policy
        assert second.engine is session.engine
        assert [problem.id for problem in second.test] == ["train0", "train1"]
        assert second.evaluate(greedy=True).problems == 2
