import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TEPO_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; set TEPO_SHARED_DATA")
    return folder
