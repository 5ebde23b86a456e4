"""The table of the rules in Markdown, as in docs/diagnose.md."""

from __future__ import annotations

from tepo.diagnosis.rules import RULES


def rules_page() -> str:
    """In the order in which findings are told."""
    lines = ["| what is said | when | why so | what to try |", "|---|---|---|---|"]
    for rule in RULES:
        cells = (f"**{rule.says}** (`{rule.name}`)", rule.when, rule.why, "; ".join(rule.advice))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
