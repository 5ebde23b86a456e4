"""Put the tables and the curves of a finished `tepo compare` into docs/compare.md, as they came out.

usage: python scripts/write_comparison.py FOLDER
Needs kaleido and a Chrome or Chromium, for the picture.
"""

import shutil
import sys
from pathlib import Path

MARK = "<!-- comparison -->\n\n"
DOCS = Path(__file__).parents[1] / "docs"

if len(sys.argv) != 2:
    sys.exit(__doc__)
folder = Path(sys.argv[1])
missing = [name for name in ("comparison.md", "comparison.svg") if not (folder / name).is_file()]
if missing:
    sys.exit(f"{folder}: holds no {' and no '.join(missing)}; run tepo compare there first, with kaleido installed")
page = DOCS / "compare.md"
head, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
assert mark, f"{page} has no line {MARK.strip()}"
(DOCS / "images").mkdir(exist_ok=True)
shutil.copy(folder / "comparison.svg", DOCS / "images" / "compare.svg")
picture = "![learning curves: held-out accuracy, training reward and entropy](images/compare.svg)\n"
tables = (folder / "comparison.md").read_text(encoding="utf-8")
page.write_text(f"{head}{MARK}{picture}\n{tables}", encoding="utf-8")
