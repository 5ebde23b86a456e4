"""Several processes on one machine: the same run as one, started by the launcher that a user would take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import RUNS, SHORT
from safetensors.torch import load_file

from tepo.errors import TepoError
from tepo.train.ranks import Ranks

TWO = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
CLOSE = 1e-6
NOT_REPEATABLE = ("seconds/", "tokens_per_second")


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    port = str(29500 + os.getpid() % 2000)
    command = [*TWO, "--main_process_port", port, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the runs of one process are, and those of two."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    script = str(Path(__file__).with_name("rank_runs.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, str(folders[0])], env=environment, check=True)
    done = launch(script, str(folders[1]), cwd=folders[1])
    assert done.returncode == 0, done.stderr
    return folders


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def responses(folder: Path) -> list[Any]:
    files = sorted((folder / "rollouts").iterdir())
    assert len(files) == -(-len(lines(folder)) // 2)
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(record["id"], record["response"], record["status"], record["reward"]) for record in records]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_run_of_one(runs: tuple[Path, Path], name: str) -> None:
    """Loss, gradients and weights over 5 steps with responses of uneven lengths and uneven shares of them."""
    one, two = runs
    assert responses(one / name) == responses(two / name)
    single, first, second = (
        torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for folder, rank in ((one, 0), (two, 0), (two, 1))
    )
    steps = len(lines(one / name))
    assert steps == (2 if SHORT in RUNS[name] else 5)
    assert len(single) == len(first) == steps * (2 if name == "ppo" else 1)
    assert any(gradient.norm() > 1e-3 for gradient in single)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for alone, shared in zip(single, first, strict=True):
        assert torch.allclose(shared, alone, rtol=0, atol=CLOSE)
        assert (shared - alone).norm() <= 1e-5 * alone.norm()
    weights, others = (
        load_file(next((folder / name / "checkpoints" / f"step_{steps}").glob("*model.safetensors"))) for folder in runs
    )
    for key, value in weights.items():
        assert torch.allclose(others[key], value, rtol=0, atol=CLOSE)
    for alone, shared in zip(lines(one / name), lines(two / name), strict=True):
        assert alone.keys() == shared.keys()
        for key in (key for key in alone if not key.startswith(NOT_REPEATABLE)):
            # Maxima are those of differences between two ways of rounding.
            close = 1e-4 if key.endswith("_max") else CLOSE
            assert shared[key] == pytest.approx(alone[key], rel=1e-5, abs=close), key


def test_evaluations_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    one, two = ((folder / "tepo" / "eval.json").read_text() for folder in runs)
    assert one == two


def test_the_second_process_had_steps_without_a_share(runs: tuple[Path, Path]) -> None:
    """Otherwise the comparison above says less than it seems to."""
    assert all(line["tokens"] > 0 for line in lines(runs[1] / "one_group"))
    assert any(line["active_tokens"] > 0 for line in lines(runs[1] / "one_group"))


BROKEN = """
import dataclasses, os
from tepo.objectives import get_objective
from tepo.objectives.surrogates import Clip

@dataclasses.dataclass(frozen=True)
class Broken(Clip):
    def __call__(self, batch, log_ratio, advantages):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("the second process fails here")
        return super().__call__(batch, log_ratio, advantages)

OBJECTIVE = dataclasses.replace(get_objective("dapo"), surrogate=Broken(0.2, 0.2))
"""


def test_a_fault_of_one_process_ends_all_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = launch(
        "-m", "tepo", "train", "objective=broken:OBJECTIVE", "data.test_problems=4", "evaluation.before=false",
        "output=out", "trainer.prompts_per_rollout=8", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "ZeroDivisionError: the second process fails here" in done.stderr


def test_what_no_process_can_use_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("precious")
    done = launch("-m", "tepo", "train", "output=out", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: output = 'out' already holds a run") == 1
    assert (tmp_path / "out" / "config.yaml").read_text() == "precious"


def test_a_launcher_that_starts_one_process_of_several_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --cpu --num_processes 2` without MPI says nothing and trains with one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(TepoError, match=r"several processes were asked for and one was started.*torchrun"):
        Ranks.start("cpu")
