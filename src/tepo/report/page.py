"""One HTML file that needs nothing else: styles, scripts and data inside it, and nothing of the data is ever markup.

What models and data sets wrote is untrusted. It stands in a block of JSON that no parser takes for HTML, scripts put
it into the page as text alone, and the page's policy lets no script run but those written here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tepo.files import replace_bytes

POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content security: inline styles are plotly's, and the colours of tokens."""


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return (files("tepo.report") / "assets" / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """The JavaScript of plotly, whole."""
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


MARKS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that show nothing, or turn the text around them: pages show their code points. Python and JavaScript."""


def visible(text: object) -> Markup:
    """A text, escaped, with its MARKS shown."""
    parts = re.split(f"({MARKS})", str(text))
    mark = Markup('<span class="mark">U+{:04X}</span>')
    return Markup("").join(mark.format(ord(part)) if place % 2 else part for place, part in enumerate(parts))


def write_page(
    path: Path,
    template: str,
    data: Mapping[str, Any],
    scripts: Sequence[str],
    styles: Sequence[str] = (),
    **fields: Any,
) -> None:
    """Write a page, whole or not at all.

    template: in `assets/`; what it prints of `fields` is escaped. data: plain values, in the block with the id `data`.
    scripts, styles: their texts, in this order, the styles after those of all pages.
    """
    environment = Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["visible"] = visible
    html = environment.get_template(template).render(
        policy=POLICY.format(hashes=" ".join(_hash(script) for script in scripts)),
        style=Markup("\n".join([asset("page.css"), *styles])),  # ours, not data
        data=Markup(script_json({**data, "marks": MARKS})),  # cannot end its block: script_json
        scripts=[Markup(_script(script)) for script in scripts],
        **fields,
    )
    replace_bytes(path, html.encode("utf-8", errors="replace"))


def script_json(value: Any) -> str:
    """Plain values as JSON that can stand in a script block: no `<`, no line ends that JavaScript reads as such.

    Numbers that are not finite become null.
    """
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def finite(value: Any) -> Any:
    """Plain values with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def _script(text: str) -> str:
    """A script as it stands in a page. Raises ValueError for one that would end its own block."""
    if "</script" in text.lower():
        raise ValueError("a script holds </script, which would end its block")
    return text


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
