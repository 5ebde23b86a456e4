"""Write docs/bad-input.md anew, from what the commands of tests/cli/bad_input.py say. Run from anywhere."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cli")]

from bad_input import CASES, make_folder, page, run  # noqa: E402

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    make_folder(folder)
    outcomes = {case.command: run(case, folder) for case in CASES}
(ROOT / "docs" / "bad-input.md").write_text(page(outcomes), encoding="utf-8")
