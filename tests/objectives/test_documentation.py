"""The documents that are made from the code are those that the code makes, and claim what the tests do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import test_golden

from tepo.objectives import list_objectives
from tepo.objectives.describe import CHECKED, DEFINITION, GOLDEN, LIMITS, TRL, VERL
from tepo.objectives.pages import objectives_page, relatives_page

ROOT = Path(__file__).parents[2]
MARK = "<!-- generated -->\n\n"


@pytest.mark.parametrize(
    ("name", "option", "page"),
    [("objectives", "--markdown", objectives_page), ("relatives", "--relatives", relatives_page)],
)
def test_page_is_what_the_code_makes(name: str, option: str, page: Callable[[], str]) -> None:
    head, mark, generated = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition(MARK)
    assert mark
    assert f"`tepo objectives {option}`" in head
    assert generated == page(), f"docs/{name}.md is out of date: run python scripts/write_docs.py"


def cases(table: str) -> set[str]:
    """The objectives of which a table of tests/differential has a row; read as text, to import nothing from there."""
    source = (ROOT / "tests" / "differential" / "differential_cases.py").read_text(encoding="utf-8")
    body = re.search(rf"^{table} = \{{(.*?)^\}}", source, re.DOTALL | re.MULTILINE)
    assert body is not None
    return set(re.findall(r'\bCase\(\s*"(\w+)"', body[1]))


def test_claims_are_those_of_the_tests() -> None:
    """A claim that no test supports; more tests than claims are no fault, but worth adding to CHECKED."""
    definition = (ROOT / "tests" / "objectives" / "definition_settings.py").read_text(encoding="utf-8")
    support = {
        GOLDEN: {name for name, _ in test_golden.CASES.values()},
        TRL: cases("TRL_CASES"),
        VERL: cases("VERL_CASES"),
        DEFINITION: {
            name for name in list_objectives() if re.search(rf'^    "{name}": \w+\(', definition, re.MULTILINE)
        },
    }
    claims = {kind: {name for name, kinds in CHECKED.items() if kind in kinds} for kind in support}
    assert {kind: names - support[kind] for kind, names in claims.items()} == {kind: set() for kind in support}


def test_claims_are_of_objectives_that_exist() -> None:
    assert set(CHECKED) <= set(list_objectives())
    assert set(LIMITS) <= set(CHECKED)


def test_readme_lists_every_objective() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Objectives\n(.*?)^```python", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    families = [line for line in section[1].splitlines() if line.startswith("- **")]
    assert sorted(name for line in families for name in re.findall(r"`(\w+)`", line)) == sorted(list_objectives())
    assert "docs/objectives.md" in section[1]
    assert "docs/relatives.md" in section[1]
