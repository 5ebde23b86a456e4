"""Strings that end a response."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Whether the text of a response, special tokens left out, contains one of some strings.

    Asked after each token, so that only the end of the text can bring one. Every token that is not special adds at
    least a byte: as many tokens as the longest string has bytes hold it, and a few more the start of a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = strings
        self.window = max((len(string.encode()) for string in strings), default=0) + 4
        self.special = frozenset(tokenizer.all_special_ids)

    def ends(self, ids: Sequence[int]) -> bool:
        """ids: the tokens of a response so far."""
        if not self.strings:
            return False
        last: list[int] = []
        for token in reversed(ids):
            if token not in self.special:
                last.append(token)
            if len(last) == self.window:
                break
        text = self.tokenizer.decode(last[::-1])
        return any(string in text for string in self.strings)
