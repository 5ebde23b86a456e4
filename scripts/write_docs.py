"""Write the generated parts of docs/*.md anew: what follows the mark in each. Run from anywhere, without arguments."""

from pathlib import Path

from tepo.objectives.pages import objectives_page, relatives_page

MARK = "<!-- generated -->\n\n"
DOCS = Path(__file__).parents[1] / "docs"

for name, page in (("objectives", objectives_page), ("relatives", relatives_page)):
    path = DOCS / f"{name}.md"
    head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{path} has no line {MARK.strip()}"
    path.write_text(head + mark + page(), encoding="utf-8")
