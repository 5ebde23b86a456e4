"""The commands, as a user runs them: in a process of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def tepo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "tepo", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, tepo.cli\n"
        "from typer.testing import CliRunner\n"
        "assert 'train' in CliRunner().invoke(tepo.cli.app, ['--help']).output\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'pydantic', 'numpy', 'scipy', 'sympy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_train_eval_and_resume(tmp_path: Path) -> None:
    settings = ["trainer.steps=4", "trainer.prompts_per_rollout=8", "data.test_problems=20", "output=out",
                "trainer.schedule=constant"]  # fmt: skip
    done = tepo("train", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    again = tepo("train", *settings, cwd=tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    resumed = tepo("train", "--resume", *[s.replace("steps=4", "steps=6") for s in settings], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    evaluated = tepo("eval", "out/checkpoints/step_6", "-k", "2", "-o", "measured", cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "pass@2" in evaluated.stdout
    summary = json.loads((tmp_path / "measured" / "eval.json").read_text())
    assert summary["sampled"]["problems"] == 20
    assert summary["sampled"]["pass_at_k"]["2"] >= summary["sampled"]["pass_at_k"]["1"]
    assert len((tmp_path / "measured" / "responses.jsonl").read_text().splitlines()) == 20 * 2 + 20


def test_eval_of_a_packaged_model_on_a_named_task(tmp_path: Path) -> None:
    done = tepo("eval", "embedded", "--data", "arithmetic", "data.test_problems=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "embedded on arithmetic: 10 problems" in done.stdout


def test_objectives_and_recipes(tmp_path: Path) -> None:
    from tepo.config import recipe_names
    from tepo.objectives import list_objectives

    shown = tepo("objectives", cwd=tmp_path)
    assert shown.returncode == 0
    for name in list_objectives():
        assert re.search(rf"\b{name}\b", shown.stdout)
    listed = tepo("recipes", cwd=tmp_path)
    assert all(name in listed.stdout for name in recipe_names())
    assert "trainer:" in tepo("recipes", "arithmetic", cwd=tmp_path).stdout


FAULTS = {
    "mistyped key": (["trainer.learning_rat=1"], "trainer.learning_rate"),
    "impossible combination": (["trainer.prompts_per_rollout=6", "trainer.updates_per_rollout=4"], "multiple of"),
    "empty data file": (["data=empty.jsonl"], "empty.jsonl"),
    "row without an answer": (["data=no_answer.jsonl"], "no_answer.jsonl"),
    "broken row": (["data=broken.jsonl"], "broken.jsonl"),
    "missing data file": (["data=nothing.jsonl"], "nothing.jsonl"),
    "missing model": (["model=./no/such/model"], "./no/such/model"),
    "model folder without a model": (["model=./folder"], "config.json"),
    "unknown hub model": (["model=nobody/nothing"], "nobody/nothing"),
    "unknown task": (["data=arithmetik"], "arithmetic"),
    "unknown device": (["model.device=tpu9"], "tpu9"),
    "missing recipe": (["--config", "nothing.yaml"], "nothing.yaml"),
    "response longer than the context": (["rollout.max_response_tokens=100000"], "max_response_tokens"),
    "missing verifier": (["reward.verifier=nowhere:nothing"], "nowhere"),
    "run folder that is a file": (["output=a_file"], "a_file"),
    "tracker that is not installed": (["trackers=[wandb]"], "tepo[wandb]"),
    "resume of nothing": (["--resume"], "no checkpoint"),
    "option of no task": (["data.options.digit=3"], "digit"),
}


@pytest.mark.parametrize(("arguments", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_input_is_one_message_and_changes_nothing(arguments: list[str], named: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no_answer.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "2+2"}\n')
    (tmp_path / "broken.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "2+\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "a_file").write_text("precious")
    before = files_below(tmp_path)
    done = tepo("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert files_below(tmp_path) == before
