"""An objective of the user's own, in a module of the working directory, trained and resumed in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

MODULE = """
import dataclasses

from tepo.objectives import Objective, get_objective
from tepo.objectives.surrogates import Unclipped

MY_OBJECTIVE = dataclasses.replace(get_objective("policy_kl"), name="mine", title="A surrogate of my own")


def wide(width=0.2):
    return dataclasses.replace(get_objective("dapo", clip_low=width, clip_high=width), title=f"Width {width}")

"""

SETTINGS = ["trainer.prompts_per_rollout=4", "trainer.updates_per_rollout=4", "data.test_problems=8",
            "trainer.schedule=constant", "output=out"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    return tmp_path


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """-P: the interpreter does not put the working directory on sys.path, as the installed command does not."""
    command = [sys.executable, "-P", "-m", "tepo", "train", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_trains_and_resumes(folder: Path) -> None:
    """Stopped after 3 of the 4 steps of a rollout; the adaptive coefficient of its term goes on from where it was."""
    chosen = ["objective=my_module:MY_OBJECTIVE", "objective.policy_kl.target=0.5", *SETTINGS]
    done = train(folder, *chosen, "trainer.steps=3")
    assert done.returncode == 0, done.stderr
    assert "A surrogate of my own" in done.stdout
    config = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    assert config["objective"] == {"name": "my_module:MY_OBJECTIVE", "policy_kl": {"target": 0.5}}
    resumed = train(folder, "--config", "out/config.yaml", "trainer.steps=4", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    betas = [next(v for k, v in line.items() if k.endswith("policy_kl_beta")) for line in lines if "step" in line]
    assert betas == [1.0, 0.5, 0.25, 0.125]


def test_a_function_is_given_its_own_options(folder: Path) -> None:
    done = train(
        folder, "objective.name=my_module:wide", "objective.width=0.3", "objective.entropy_bonus=0.001", *SETTINGS,
        "trainer.steps=1", "evaluation.before=false", "evaluation.after=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Width 0.3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["objective=my_modul:MY_OBJECTIVE"], "there is no module 'my_modul' (did you mean 'my_module'?)"),
        (["objective=my_module:wide", "objective.widht=1"], "no option 'widht' (did you mean 'width'?)"),
    ],
)
def test_mistake_is_one_message(folder: Path, arguments: list[str], named: str) -> None:
    done = train(folder, *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
