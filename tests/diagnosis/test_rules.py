"""Rules at their thresholds, on rows of metrics; the watch; the text for people."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from planted import short_run
from rich.console import Console
from typer.testing import CliRunner

from tepo.cli import app
from tepo.config import load_recipe
from tepo.diagnosis import RULES, Evidence, Watch, diagnose
from tepo.diagnosis.pages import rules_page
from tepo.errors import TepoError
from tepo.report.diagnose import diagnose_run, shown

WELL = {
    "reward": 0.5, "accuracy": 0.5, "verdict/error": 0.0, "verdict/timeout": 0.0, "verdict/unparsable": 0.0,
    "verdict/no_answer": 0.0, "groups/all_correct": 0.2, "groups/all_wrong": 0.2, "groups/zero_variance": 0.4,
    "response/tokens": 100.0, "response/truncated": 0.02, "clip_fraction": 0.1, "positive_fraction": 0.5,
    "kl_mask_fraction": 0.2, "approx_kl": 1e-3, "log_ratio_abs": 2e-3, "entropy": 0.4, "mismatch": 1e-7,
    "mismatch_beyond": 0.0, "grad_norm": 0.5, "learning_rate": 1e-4, "skipped": 0.0,
}  # fmt: skip


def evidence(
    first: dict[str, float] | None = None,
    later: dict[str, float] | None = None,
    *,
    settings: tuple[str, ...] = (),
    rollouts: int = 12,
    **known: Any,
) -> Evidence:
    """A run of four updates a rollout; `first` holds in its first rollouts, `later` in the others."""
    recipe = load_recipe("arithmetic", list(settings))
    updates = recipe.trainer.updates_per_rollout
    rows = [
        WELL | ((first or {}) if index < rollouts // 2 else (later or {})) | {"step": step, "rollout": index}
        for index in range(rollouts)
        for step in range(index * updates + 1, (index + 1) * updates + 1)
    ]
    return Evidence.of(recipe, rows, **known)


def names(run: Evidence) -> list[str]:
    return [finding.rule.name for finding in diagnose(run)]


def always(**values: float) -> dict[str, Any]:
    changes = {key.replace("__", "/"): value for key, value in values.items()}
    return {"first": changes, "later": changes}


def evaluations(*accuracies: float) -> list[dict[str, Any]]:
    return [
        {"step": 12 * place, "sampled": {"accuracy": a, "interval": [a - 0.03, a + 0.03]}}
        for place, a in enumerate(accuracies)
    ]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unreadable_golds": (
        {"problems": 97, "dropped": {"gold answers that cannot be read: a": 3}},
        {"problems": 99, "dropped": {"gold answers that cannot be read: a": 1, "prompt too long": 50}},
    ),
    "judging_fails": (always(verdict__timeout=0.03, verdict__error=0.03), always(verdict__error=0.04)),
    "gradient_not_finite": ({"later": {"skipped": 1.0}}, {}),
    "kl_explodes": (
        {"first": {"approx_kl": 0.6}, "later": {"reward": 0.3}},
        {"first": {"approx_kl": 0.6}, "later": {"reward": 0.6}},
    ),
    "ratio_noise": (always(mismatch_beyond=0.2), always(mismatch_beyond=0.05)),
    "too_few_updates": (
        {"settings": ("trainer.updates_per_rollout=1",)},
        {"settings": ("trainer.updates_per_rollout=1", "objective=dapo")},
    ),
    "nothing_moves": (
        always(log_ratio_abs=5e-7),
        {"later": {"log_ratio_abs": 5e-7, "learning_rate": 1e-6}},  # the end of a schedule
    ),
    "reward_hacked": (
        {"later": {"reward": 0.8}, "evaluations": evaluations(0.5, 0.6, 0.4, 0.3)},
        {"later": {"reward": 0.8}, "evaluations": evaluations(0.5, 0.6, 0.58, 0.55)},
    ),
    "truncated": (always(response__truncated=0.35), always(response__truncated=0.2)),
    "format_never_learned": (
        {"settings": ("reward.format.score=0.1",), **always(formatted=0.04), "rollouts": 20},
        {"settings": ("reward.format.score=0.1",), **always(formatted=0.04), "rollouts": 10},
    ),
    "unreadable_answers": (
        always(verdict__unparsable=0.2, verdict__no_answer=0.2),
        always(verdict__no_answer=0.4, response__truncated=0.25),  # no answer because there was no room for one
    ),
    "data_repeated": ({"problems": 19}, {"problems": 20}),  # 12 rollouts of 32 prompts
    "entropy_explodes": ({"later": {"entropy": 1.3}}, {"later": {"entropy": 1.1}}),
    "length_runs_away": (
        {"later": {"response/tokens": 160.0}},
        {"later": {"response/tokens": 160.0, "accuracy": 0.6}},  # longer, and right more often
    ),
    "reward_constant": (always(groups__zero_variance=1.0), always(groups__zero_variance=0.9)),
    "all_wrong": (
        always(groups__all_wrong=0.97, groups__all_correct=0.0, groups__zero_variance=0.97),
        always(groups__all_wrong=0.9, groups__all_correct=0.0, groups__zero_variance=0.9),
    ),
    "no_difference": (
        always(groups__all_wrong=0.5, groups__all_correct=0.47, groups__zero_variance=0.97),
        always(groups__all_wrong=0.5, groups__all_correct=0.4, groups__zero_variance=0.9),
    ),
    "everything_clipped": (
        always(clip_fraction=0.55, log_ratio_abs=0.13),
        always(clip_fraction=0.55, log_ratio_abs=0.02),  # as far beyond the range as published settings are
    ),
    "mask_empty": (always(kl_mask_fraction=0.004), always(kl_mask_fraction=0.01)),
    "mask_full": (always(kl_mask_fraction=0.495), always(kl_mask_fraction=0.45)),
    "entropy_collapses": (
        {"later": {"entropy": 0.03}},
        {"later": {"entropy": 0.03, "accuracy": 0.95}},  # solved
    ),
    "all_right": (
        always(groups__all_correct=0.97, groups__all_wrong=0.0, groups__zero_variance=0.97),
        always(groups__all_correct=0.9, groups__all_wrong=0.0, groups__zero_variance=0.9),
    ),
}
"""By rule: rows beyond its threshold, and rows just on this side of it."""


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_speaks_beyond_its_threshold_and_not_before(rule: str) -> None:
    beyond, within = CASES[rule]
    problems = {"problems": 20_000}
    assert names(evidence(**(problems | beyond))) == [rule]
    assert names(evidence(**(problems | within))) == []


def test_a_run_of_which_nothing_is_wrong_is_left_alone() -> None:
    assert names(evidence(problems=20_000)) == []
    assert names(Evidence(load_recipe("arithmetic"))) == []


def test_values_that_are_not_finite_do_not_hide_anything() -> None:
    found = diagnose(evidence({"approx_kl": float("nan")}, {"reward": 0.1, "entropy": float("inf")}))
    assert [finding.rule.name for finding in found] == ["kl_explodes"]


def test_a_warning_comes_once_until_what_it_tells_of_has_gone() -> None:
    bad, good = {"mismatch_beyond": 1.0}, {"mismatch_beyond": 0.0}
    watch = Watch(Evidence(load_recipe("arithmetic")))
    told = []
    for index, state in enumerate([bad] * 4 + [good] * 30 + [bad] * 4):
        for update in range(4):
            row = WELL | state | {"step": 4 * index + update + 1, "rollout": index}
            told += [index for _ in watch.step(row)]
    assert told == [0, 34]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(
        tmp_path_factory.mktemp("diagnosed") / "run", ["trainer.steps=8", "rollout.max_response_tokens=12"]
    )[0]


def test_a_look_at_a_long_run_reads_each_row_a_few_times() -> None:
    """2,000 steps; a look that grew faster than the run would be felt while training."""
    run = evidence(rollouts=500, problems=200_000)
    reads = 0

    class Counted(dict[str, float]):
        def __getitem__(self, key: str) -> float:
            nonlocal reads
            reads += 1
            return super().__getitem__(key)

        def get(self, *words: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().get(*words)

    run.rollouts = [[Counted(row) for row in rows] for rows in run.rollouts]
    assert diagnose(run) == []
    assert 2000 < reads < 4 * 2000


def test_model_text_cannot_draw_over_the_diagnosis(finished: Path, tmp_path: Path) -> None:
    """Markup of the terminal, control characters, and marks that turn the direction of writing."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    stored = sorted(folder.glob("rollouts/*.jsonl"))[-1]
    rows = [json.loads(line) for line in stored.read_text().splitlines()]
    hostile = "[bold red]x[/] \x1b[2J\x1b[H \u202egnorw\u2066 <script>alert(1)</script>\n9. all is well"
    for row in rows:
        row |= {"response": hostile, "id": "[link=file:///]i[/link]", "answer": "\u202e7"}
    stored.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=(text := io.StringIO()), width=300, force_terminal=True)
    diagnose_run(folder, console)
    told = text.getvalue()
    assert "[bold red]x[/]" in told
    assert "[link=file:///]i[/link]" in told
    for unwanted in ("\x1b[2J", "\x1b[H", "\u202e", "\u2066", "\n9. all is well"):
        assert unwanted not in told
    assert "\\u202egnorw" in told
    assert len(shown("x" * 1000)) == 160


def test_the_command_and_its_mistakes(finished: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(finished)])
    assert result.exit_code == 0
    assert "1. Answers are cut off" in result.output
    assert "rollout.max_response_tokens" in result.output
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path)]).exit_code == 2
    (tmp_path / "config.yaml").write_text((finished / "config.yaml").read_text())
    with pytest.raises(TepoError, match="no step yet"):
        diagnose_run(tmp_path)


def test_the_page_of_the_rules_is_up_to_date() -> None:
    """`python scripts/write_docs.py` writes it."""
    page = Path(__file__).parents[2] / "docs" / "diagnose.md"
    assert page.read_text(encoding="utf-8").endswith("<!-- generated -->\n\n" + rules_page())
