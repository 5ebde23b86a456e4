"""`tepo eval`: what is measured on which data set, resumption, comparison, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import model_folder
from rich.console import Console

from tepo.config import load_recipe
from tepo.data.presets import PRESETS
from tepo.errors import TepoError
from tepo.evaluate.command import evaluate_model
from tepo.evaluate.plan import Pass, data_names, passes, recipe_for
from tepo.evaluate.saved import SavedResponses
from tepo.rollout import Sampling, TransformersEngine

TINY = ["rollout.max_response_tokens=6", "reward.workers=1", "model.device=cpu", "data.options.digits=1"]
QUIET = Console(quiet=True)


def write_sums(path: Path, count: int, **more: Any) -> Path:
    rows = [
        {"id": f"s{i}", "problem": f"{i}+{i}=", "answer": str(2 * i), "subject": "ab"[i % 2], "level": i % 3, **more}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_papers_settings_and_the_users() -> None:
    recipe = load_recipe(None, ["rollout.max_response_tokens=100", "rollout.temperature=0.9", "evaluation.samples=2"])
    greedy = Pass("greedy", 1, Sampling(0.0, 100))
    aime, maths = PRESETS["aime24"].protocol, PRESETS["math500"].protocol
    assert passes(recipe, aime, None, None) == [Pass("sampled", 32, Sampling(0.6, 100))]
    assert passes(recipe, maths, None, None) == [greedy]
    assert passes(recipe, maths, 8, None) == [Pass("sampled", 8, Sampling(0.6, 100))]
    assert passes(recipe, aime, None, 1.0) == [Pass("sampled", 32, Sampling(1.0, 100))]
    assert passes(recipe, aime, None, 0.0) == [greedy]
    assert passes(recipe, None, None, None) == [Pass("sampled", 2, Sampling(0.9, 100)), greedy]
    assert passes(recipe, None, 5, 0.3) == [Pass("sampled", 5, Sampling(0.3, 100)), greedy]
    with pytest.raises(TepoError, match="--samples 4 at --temperature 0"):
        passes(recipe, aime, 4, 0.0)


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23"])
def test_contests_are_avg_at_32(name: str) -> None:
    assert (PRESETS[name].protocol.samples, PRESETS[name].protocol.temperature) == (32, 0.6)


def test_names_of_data_sets() -> None:
    assert data_names(["aime24,math500", "amc23=x.jsonl"]) == ["aime24", "math500", "amc23=x.jsonl"]
    with pytest.raises(TepoError, match="twice"):
        data_names(["aime24", "math500,aime24"])
    assert recipe_for("embedded", "amc23=x.jsonl", None, []).data.test_file == "x.jsonl"
    assert recipe_for("embedded", "x.jsonl", None, []).data.test_file == "x.jsonl"
    assert recipe_for("embedded", "amc23", None, []).data.test_file is None


def test_several_data_sets_in_one_call(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", max_position_embeddings=256)
    first, second = write_sums(tmp_path / "first.jsonl", 7), write_sums(tmp_path / "second.jsonl", 5)
    console = Console(record=True, width=200)
    results = evaluate_model(
        str(model), [f"math500={first},aime24={second}"], overrides=TINY[:3], output=tmp_path / "out", console=console
    )
    assert {name: [*kinds] for name, kinds in results.items()} == {"math500": ["greedy"], "aime24": ["sampled"]}
    assert (results["math500"]["greedy"].problems, results["aime24"]["sampled"].problems) == (7, 5)
    assert results["aime24"]["sampled"].samples == 32
    assert list(results["aime24"]["sampled"].pass_at_k) == [1, 2, 4, 8, 16, 32]
    groups = results["math500"]["greedy"].groups
    assert {name: {key: row["problems"] for key, row in values.items()} for name, values in groups.items()} == {
        "subject": {"a": 4, "b": 3},
        "level": {"0": 3, "1": 2, "2": 2},
    }
    shown = console.export_text()
    for text in (
        "math500 by subject",
        "math500 by level",
        "aime24: 5 problems",
        "pass@32",
        "maj@32",
        "mean of the data",
    ):
        assert text in shown
    plot = (tmp_path / "out" / "pass_at_k.html").read_text()
    assert "aime24 (5 problems, T = 0.6)" in plot
    assert "<script src=" not in plot
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert written["results"]["aime24"]["sampled"]["problems"] == 5


def test_one_file_for_several_data_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TepoError, match="NAME=FILE"):
        evaluate_model("embedded", ["aime24,math500"], overrides=["data.test_file=x.jsonl"], output=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_finished_evaluation_is_shown_again_without_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    data = [str(write_sums(tmp_path / "d.jsonl", 4))]
    first = evaluate_model(str(model), data, 2, overrides=TINY[:3], console=QUIET)
    (folder,) = (tmp_path / "runs" / "eval").iterdir()
    files = {file.name: file.read_bytes() for file in folder.iterdir()}

    def refuse(*_: object) -> None:
        raise AssertionError("sampled again")

    monkeypatch.setattr(TransformersEngine, "generate", refuse)
    assert evaluate_model(str(model), data, 2, overrides=TINY[:3], console=QUIET) == first
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".html"} == {
        name: content for name, content in files.items() if not name.endswith(".html")
    }


def test_another_evaluation_in_the_folder_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "model"), write_sums(tmp_path / "d.jsonl", 4)
    evaluate_model(str(model), [str(data)], 2, overrides=TINY[:3], output=tmp_path / "o", console=QUIET)
    with pytest.raises(TepoError, match=r"other settings \(samples differ\)"):
        evaluate_model(str(model), [str(data)], 3, overrides=TINY[:3], output=tmp_path / "o", console=QUIET)
    write_sums(tmp_path / "d.jsonl", 4, answer="5")
    with pytest.raises(TepoError, match="the data has changed since"):
        evaluate_model(str(model), [str(data)], 2, overrides=TINY[:3], output=tmp_path / "o", console=QUIET)
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(TepoError, match=r"other settings \(weights differ\)"):
        evaluate_model(str(model), [str(data)], 2, overrides=TINY[:3], output=tmp_path / "o", console=QUIET)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "eval.json").write_text("{}")
    with pytest.raises(TepoError, match=r"holds eval\.json of something else"):
        evaluate_model(str(model), [str(data)], 2, overrides=TINY[:3], output=tmp_path / "p", console=QUIET)


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    for model, data in (
        ("./no/model", "arithmetic"),
        ("embedded", "no-such-data"),
        ("embedded", "aime24=nothing.jsonl"),
    ):
        with pytest.raises(TepoError):
            evaluate_model(model, [data], output=tmp_path / "o", console=QUIET)
        assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with SavedResponses(tmp_path / "o", {"a": 1}), pytest.raises(TepoError, match="another evaluation is writing"):
        SavedResponses(tmp_path / "o", {"a": 1})


def command(folder: Path, output: Path) -> list[str]:
    settings = [*TINY, "data.options.digits=2", "data.test_problems=40", "evaluation.save_every=8"]
    return [sys.executable, "-m", "tepo", "eval", str(folder), "-k", "4", "-o", str(output), *settings]


def test_a_killed_evaluation_goes_on_to_the_same_result(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(model, whole), check=True, capture_output=True)
    with subprocess.Popen(command(model, killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        lines = 0
        while lines < 24 and process.poll() is None:
            time.sleep(0.005)
            lines = (
                (killed / "responses.jsonl").read_bytes().count(b"\n") if (killed / "responses.jsonl").exists() else 0
            )
        os.kill(process.pid, signal.SIGKILL)
    half = (killed / "responses.jsonl").read_bytes()
    assert 24 <= half.count(b"\n") < 200
    assert not (killed / "eval.json").exists()
    # A chunk of which a part was written, and half a line.
    extra = (whole / "responses.jsonl").read_bytes()[len(half) :].splitlines(keepends=True)
    (killed / "responses.jsonl").write_bytes(half + b"".join(extra[:3]) + extra[3][:20])
    done = subprocess.run(command(model, killed), check=True, capture_output=True, text=True)
    assert "going on with" in done.stdout
    for name in ("responses.jsonl", "eval.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
