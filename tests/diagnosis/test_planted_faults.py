"""Real runs in which something is wrong are told what it is, and healthy ones nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from planted import HEALTHY, PLANTED, short_run, write_data
from rich.console import Console

from tepo.diagnosis import RULES
from tepo.report.diagnose import diagnose_run


def first_findings(folder: Path, settings: list[str]) -> tuple[list[str], str, str]:
    """Findings of a run in their order, what the run printed, and what `tepo diagnose` did."""
    files = {name: str(file) for name, file in write_data(folder).items()}
    run, printed = short_run(folder / "run", [setting.format(**files) for setting in settings])
    console = Console(file=(text := io.StringIO()), width=200)
    return [finding.rule.name for finding in diagnose_run(run, console)], printed, text.getvalue()


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_first(fault: str, tmp_path: Path) -> None:
    """By the command afterwards, and by a warning while the run went on."""
    found, printed, told = first_findings(tmp_path, PLANTED[fault])
    assert found[0] == fault
    says = next(rule.says for rule in RULES if rule.name == fault)
    assert f"1. {says}" in told
    assert printed.count(f"warning: {says}") == 1


@pytest.mark.parametrize("settings", HEALTHY, ids=" ".join)
def test_nothing_is_said_of_a_healthy_run(settings: list[str], tmp_path: Path) -> None:
    found, printed, told = first_findings(tmp_path, settings)
    assert found == []
    assert "warning" not in printed
    assert "nothing looks wrong" in told
