"""Fixtures that several test folders use."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the specification and its data, which is not part of the repository."""
    folder = Path(os.environ.get("TEPO_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the project's shared folder; {folder} is absent (set TEPO_SHARED)")
    return folder
