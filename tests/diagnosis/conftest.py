"""Verifiers of these tests are found by the judging processes too."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
