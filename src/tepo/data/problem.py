"""What a task is made of."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ChatMessage = Mapping[str, str]
"""One message of a conversation, with the keys `role` and `content`."""

NO_INFO: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Problem:
    """One question and its gold answer.

    `prompt` is a text, or chat messages when the data set brings a conversation. `answer` is empty only for tasks
    whose verifier needs none. `info` holds the other columns of the row, for verifiers and reports.
    """

    id: str
    prompt: str | tuple[ChatMessage, ...]
    answer: str
    info: Mapping[str, Any] = field(default_factory=lambda: NO_INFO)

    @property
    def text(self) -> str:
        """The prompt as one text: the contents of its messages, joined by empty lines."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)


@dataclass(frozen=True)
class Protocol:
    """How the papers measure on a data set: responses to each problem, and their temperature (0 is greedy)."""

    samples: int
    temperature: float
    top_p: float = 1.0


@dataclass(frozen=True)
class TaskData:
    """The problems of a task, and how it wants to be asked and judged.

    `test` shares no question with `train` (compared by `normalised`). `template` is `auto`, `chat`, `plain` or a text
    with `{problem}` (`tepo.data.prompts`); `verifier` is one of `tepo.rewards.judges.BUILT_IN` or `module:function`.
    `dropped` counts rows that were left out, by reason; `notes` are for a person to read before the task is used.
    `protocol` is None where there is no custom.
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    verifier: str
    template: str = "auto"
    instruction: str | None = None
    system: str | None = None
    licence: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    protocol: Protocol | None = None


_PARTS = re.compile(r"\d+\.\d+|[^\W_]+|[-+*/^=<>()\[\]!|%]")


def normalised(problem: Problem) -> str:
    """The question as its words, numbers and signs alone: copies of a data set differ in case, spaces, punctuation.

    Equal means that it is the same question.
    """
    text = problem.text
    return " ".join(_PARTS.findall(text.casefold())) or text
