"""`module:attribute` in the place of a name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tepo.objectives import get_objective

MODULES = {
    "own_sound": "import dataclasses\nfrom tepo.objectives import get_objective\n"
    "MINE = dataclasses.replace(get_objective('dapo'), name='mine')\n"
    "class Family:\n    NARROW = get_objective('gspo')\n"
    "def build(width=0.2, **parts):\n    return get_objective('dapo', clip_low=width, **parts)\n"
    "def strict(width=0.2):\n    return get_objective('dapo', clip_low=width)\n"
    "def wrong():\n    return 'dapo'\n"
    "def failing():\n    return 1 / 0\n"
    "NUMBER = 3\n",
    "own_failing": "x = 1 / 0\n",
    "own_lacking": "import no_such_dependency\n",
    "own_broken": "def f(:\n",
}


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the working directory, forgotten afterwards."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_objective_with_the_same_overrides() -> None:
    plain = get_objective("own_sound:MINE")
    assert plain.name == "mine"
    expected = get_objective("dapo", clip_low=0.1, entropy_bonus=0.01, p=0.5, ratio="hoelder")
    changed = get_objective("own_sound:MINE", clip_low=0.1, entropy_bonus=0.01, p=0.5, ratio="hoelder")
    assert (changed.surrogate, changed.ratio, changed.terms) == (expected.surrogate, expected.ratio, expected.terms)


def test_attribute_of_an_attribute() -> None:
    assert get_objective("own_sound:Family.NARROW") == get_objective("gspo")


def test_function_takes_its_options_and_leaves_the_others() -> None:
    expected = get_objective("dapo", clip_low=0.3, clip_high=0.5)
    assert get_objective("own_sound:strict", width=0.3, clip_high=0.5) == expected
    assert get_objective("own_sound:build", width=0.3, clip_high=0.5) == expected


def test_sys_path_is_left_as_it_was() -> None:
    before = list(sys.path)
    get_objective("own_sound:MINE")
    with pytest.raises(ValueError, match="own_failing"):
        get_objective("own_failing:X")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_sond:MINE", r"no module 'own_sond' \(did you mean 'own_sound'\?\); looked for in .* and on sys.path"),
        ("own_sound.deeper:MINE", r"no module 'own_sound.deeper'"),
        ("own_sound:MIN", r"own_sound.py has no MIN \(did you mean 'MINE'\?\); objectives there: MINE"),
        ("own_sound:Family.NARO", r"has no Family.NARO \(did you mean 'NARROW'\?\)"),
        ("own_sound:NUMBER", r"NUMBER in .*own_sound.py is of type int; wanted is an Objective"),
        ("own_sound:wrong", r"wrong in .*own_sound.py returns a str; an Objective is wanted"),
        ("own_sound:failing", r"failing in .*own_sound.py raises ZeroDivisionError: .*own_sound.py, line \d+"),
        ("own_failing:X", r"'own_failing' raises ZeroDivisionError: .*own_failing.py, line 1"),
        ("own_lacking:X", r"'own_lacking' raises ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("own_broken:X", r"'own_broken' raises SyntaxError"),
        ("own_sound:", "not of the form module:attribute"),
        (":MINE", "not of the form module:attribute"),
        ("a:b:c", "not of the form module:attribute"),
        ("dapoo", r"did you mean 'dapo'\?.*or your own module:attribute"),
    ],
)
def test_mistake_names_what_was_found(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_objective(name)


def test_option_of_neither_names_both() -> None:
    with pytest.raises(
        ValueError, match=r"no option 'widht' \(did you mean 'width'\?\); options of its own: width; .*clip_low"
    ):
        get_objective("own_sound:strict", widht=1)
