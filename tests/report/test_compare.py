"""tepo compare: what it runs, that it keeps what is finished, and what it writes."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tepo.cli import app
from tepo.config import load_recipe
from tepo.errors import TepoError
from tepo.report.compare.command import compare, compare_existing
from tepo.report.compare.launch import is_finished, run_cells
from tepo.report.compare.plan import make_plan
from tepo.report.compare.spec import parse_spec, parse_specs
from tepo.report.run import Run

TINY = [
    "trainer.steps=2",
    "trainer.prompts_per_rollout=4",
    "trainer.responses_per_prompt=2",
    "trainer.updates_per_rollout=2",
    "data.test_problems=8",
    "evaluation.every=1",
    "reward.workers=1",
    "checkpoint.every=1",
    "checkpoint.keep=2",
]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_objective_brings_settings_of_its_own() -> None:
    spec = parse_spec("tepo+kl_mask.beta=0.1+trainer.updates_per_rollout=8", "objective")
    assert spec.overrides == ("objective=tepo", "objective.kl_mask.beta=0.1", "trainer.updates_per_rollout=8")
    assert parse_spec("my_module:MINE+tau=1e+3", "objective").overrides == (
        "objective=my_module:MINE", "objective.tau=1e+3",
    )  # fmt: skip
    assert [spec.text for spec in parse_specs("tepo+trainer.betas=[0.9,0.95],grpo", "objective")] == [
        "tepo+trainer.betas=[0.9,0.95]", "grpo",
    ]  # fmt: skip
    assert parse_spec("gym:chain_sum+options.min_terms=3", "data").overrides == (
        "data=gym:chain_sum", "data.options.min_terms=3",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tepo+seed=3", "seed is the same"),
        ("tepo+data.max_problems=3", "data is the same"),
        ("tepo+evaluation.samples=3", "evaluation is the same"),
        ("tepo,grpo,tepo", "tepo is there more than once"),
        ("kl_mask=null", "a name is wanted"),
        ("tepo,", "a name is wanted"),
    ],
)
def test_what_would_not_be_a_comparison_on_equal_terms_is_refused(text: str, said: str) -> None:
    with pytest.raises(TepoError, match=said):
        parse_specs(text, "objective")


def test_runs_of_one_seed_differ_by_the_objective_alone(tmp_path: Path) -> None:
    objectives = parse_specs("tepo,grpo+clip_low=0.1", "objective")
    tasks = parse_specs("arithmetic,arithmetic+options.digits=2", "data")
    cells = make_plan("arithmetic", ["seed=4", "trainer.steps=8"], objectives, tasks, 2, tmp_path)
    assert [(cell.task, cell.seed, cell.objective) for cell in cells[:3]] == [
        ("arithmetic", 4, "tepo"), ("arithmetic", 4, "grpo+clip_low=0.1"), ("arithmetic", 5, "tepo"),
    ]  # fmt: skip
    assert len(cells) == len({cell.folder for cell in cells}) == 8
    first, second = (cell.recipe.model_dump(mode="json") for cell in cells[:2])
    assert {key for key in first if first[key] != second[key]} == {"objective", "output"}
    assert all(cell.recipe.data.test_problems == 500 for cell in cells)  # the recipe's own task keeps its settings
    assert [cell.recipe.data.options for cell in cells[3:5]] == [{}, {"digits": 2}]
    other = make_plan("arithmetic", [], objectives, parse_specs("gym:chain_sum", "data"), 1, tmp_path)
    assert other[0].recipe.data.test_problems == 200


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished comparison of four runs, and what it printed."""
    folder, console = tmp_path_factory.mktemp("compare"), quiet()
    compare("arithmetic", TINY, "tepo,grpo", 2, jobs=2, output=folder, console=console)
    return folder, printed(console)


def test_a_comparison_runs_and_writes_its_tables(compared: tuple[Path, str]) -> None:
    folder, text = compared
    assert text.count("seed 1: ") == 2
    assert "4/4" in text
    found = json.loads((folder / "comparison.json").read_text())
    rows = found["tasks"][0]["rows"]
    assert [row["objective"] for row in rows] == ["tepo", "grpo"]
    for row in rows:
        runs = [Run.open(folder / "arithmetic" / row["objective"] / f"seed_{seed}") for seed in (0, 1)]
        assert row["accuracy"]["mean"] == pytest.approx(
            sum(run.evaluations[-1]["sampled"]["accuracy"] for run in runs) / 2
        )
        assert [entry["step"] for entry in runs[0].evaluations] == [0, 1, 2]
    first = [Run.open(folder / "arithmetic" / name / "seed_0") for name in ("tepo", "grpo")]
    # The same initial model, problems, draws and held-out answers.
    assert first[0].evaluations[0]["sampled"]["verdicts"] == first[1].evaluations[0]["sampled"]["verdicts"]
    texts = [[response["response"] for response in run.responses(0)] for run in first]
    assert texts[0] == texts[1]
    for ending in ("md", "tex", "html"):
        assert "grpo" in (folder / f"comparison.{ending}").read_text()
    assert "<script src=" not in (folder / "comparison.html").read_text()


def test_what_is_finished_stays_and_what_is_not_is_done(compared: tuple[Path, str], tmp_path: Path) -> None:
    """One run was killed after its first checkpoint, another before it, a third is finished."""
    folder = tmp_path / "compare"
    cells = make_plan("arithmetic", TINY, parse_specs("tepo,grpo,dapo", "objective"), [], 1, folder)
    source = compared[0] / "arithmetic"
    for cell in cells[:2]:
        shutil.copytree(source / cell.objective / "seed_0", cell.folder)
    kept = (cells[0].folder / "metrics.jsonl").read_bytes()
    cut = cells[1].folder
    (cut / "eval.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step_2")
    for name in ("rollouts", "evaluations", "checkpoints"):
        (cells[2].folder / name).mkdir(parents=True)
    shutil.copy(source / "grpo" / "seed_0" / "config.yaml", cells[2].folder)
    text = (cells[2].folder / "config.yaml").read_text()
    (cells[2].folder / "config.yaml").write_text(text.replace("name: grpo", "name: dapo"))
    assert [is_finished(cell) for cell in cells] == [True, False, False]
    console = quiet()
    assert run_cells(cells, 1, folder, console) == []
    assert "1 of 3 runs are finished already" in printed(console)
    assert all(is_finished(cell) for cell in cells)
    assert (cells[0].folder / "metrics.jsonl").read_bytes() == kept
    logs = [cell.folder.with_name("seed_0.log") for cell in cells]
    assert not logs[0].exists()
    assert "step_1" in logs[1].read_text()  # resumed
    assert "step_1" not in logs[2].read_text()  # from the start


def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(compared: tuple[Path, str]) -> None:
    with pytest.raises(TepoError, match=r"trainer.learning_rate: 0.0002 then, 0.001 now"):
        compare("arithmetic", [*TINY, "trainer.learning_rate=1e-3"], "tepo", 1, output=compared[0], console=quiet())


def test_a_run_that_fails_is_told_and_the_others_go_on(compared: tuple[Path, str]) -> None:
    """A model that is not there, beside a run that is finished."""
    folder = compared[0]
    done = make_plan("arithmetic", TINY, parse_specs("tepo", "objective"), [], 1, folder)
    lost = make_plan("arithmetic", [*TINY, "model=./absent"], parse_specs("dapo", "objective"), [], 1, folder)
    console = quiet()
    failed = run_cells([*lost, *done], 1, folder, console)
    assert [cell.objective for cell in failed] == ["dapo"]
    assert "2/2  arithmetic, dapo, seed 0: failed: " in printed(console)
    assert "absent" in printed(console)


def test_runs_that_are_there_are_named_by_what_they_differ_in(compared: tuple[Path, str], tmp_path: Path) -> None:
    source = compared[0] / "arithmetic"
    other = tmp_path / "other"
    shutil.copytree(source / "tepo" / "seed_0", other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("learning_rate: 0.0002", "learning_rate: 0.5"))
    folders = [source / "tepo" / "seed_0", source / "grpo" / "seed_0", other]
    found = compare_existing(folders, output=tmp_path / "out", console=quiet())
    assert [row.objective for row in found.tasks[0].rows] == ["tepo", "grpo", "tepo+trainer.learning_rate=0.5"]
    assert [row.verdict for row in found.tasks[0].rows] == ["baseline", *["one seed: cannot be told"] * 2]
    with pytest.raises(TepoError, match="two runs with seed 0"):
        compare_existing([source / "tepo" / "seed_0"] * 2, output=tmp_path / "out", console=quiet())
    unfinished = load_recipe(other / "config.yaml")
    assert unfinished.trainer.steps == 2
    (other / "eval.json").unlink()
    with pytest.raises(TepoError, match="no evaluation at its last step, 2"):
        compare_existing([other], output=tmp_path / "out", console=quiet())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objectives", "tepo,grop"], "unknown objective"),
        (["--objectives", "tepo", "--baseline", "grpo"], "--baseline grpo: is none of"),
        (["nowhere", "--objectives", "tepo"], "no recipe named"),
        (["evaluation.after=false"], "evaluation.after"),
        (["--from", "nowhere"], "is not a run folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: list[str], said: str, tmp_path: Path) -> None:
    result: Any = CliRunner().invoke(app, ["compare", *words, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "out").exists()
