"""Write the generated parts of docs/*.md anew: what follows the mark in each. Run from anywhere, without arguments."""

from pathlib import Path

from tepo.diagnosis.pages import rules_page
from tepo.objectives.pages import objectives_page, relatives_page

MARK = "<!-- generated -->\n\n"
PAGES = (("objectives", objectives_page), ("relatives", relatives_page), ("diagnose", rules_page))
DOCS = Path(__file__).parents[1] / "docs"

for name, page in PAGES:
    path = DOCS / f"{name}.md"
    head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{path} has no line {MARK.strip()}"
    path.write_text(head + mark + page(), encoding="utf-8")
