"""What is scored: a prompt and a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A prompt and one response to it, as token ids; the response as it was sampled."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def check_rows(rows: Sequence[Row]) -> None:
    """Raises ValueError for a row without a token of prompt or of response."""
    for i, row in enumerate(rows):
        if not len(row.prompt) or not len(row.response):
            raise ValueError(
                f"row {i}: {len(row.prompt)} prompt and {len(row.response)} response tokens; both need one"
            )
