"""Finding the final answer in a response: plain string work, linear in the length of the text.

The rule, first match wins; within a rule the last occurrence counts, because a response corrects itself
forwards:

1. `\\boxed{...}` or `\\fbox{...}` with nested braces, or `\\boxed 7`. A last box that is never closed, or is
   empty, means that there is no answer: an earlier box is not a substitute. Boxes at the end joined only by
   commas, "and", "or" are one list.
2. `<answer>...</answer>`.
3. `#### ...` to the end of the line (GSM8K).
4. "answer is ...", "answer: ..." to the end of the line.
5. The whole response, when it is a bare short answer: one line and hardly any prose.
6. The last `$...$`, `$$...$$`, `\\(...\\)` or `\\[...\\]`.
7. The last number.
"""

import re
from dataclasses import dataclass

MAX_REGION = 20_000
"""Characters at the end of a response that are searched: the answer stands at the end."""

_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end_of_text|end)\|>|</s>|<eos>|<end_of_turn>")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3})")
_MARKED_UP = re.compile(r"\*\*[^*]+\*\*|.\\[\[(](?!\\)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"[^\s$.,;]*")
_HASHES = re.compile(r"#{4,}[ \t]*([^\n]*)")
_ANSWER_IS = re.compile(r"\banswer\b(?:\*\*)?[ \t]*(?:is|are|:|=)(?:\*\*)?[ \t]*:?[ \t]*([^\n]*)", re.IGNORECASE)
_CONNECTOR = re.compile(r"(?:\s|[,;$.]|\\quad|\\qquad|\\[,;:! ()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
_JOINED = re.compile(r"[,;]|(?<![A-Za-z])(?:or|and)(?![a-z])")
_MATHS = (
    re.compile(r"\$\$((?:[^$\\]|\\.){1,4000}?)\$\$", re.DOTALL),
    re.compile(r"(?<!\$)\$((?:[^$\\]|\\.){1,4000}?)\$(?![\d$])", re.DOTALL),
    re.compile(r"\\\[((?:(?!\\\[).){1,4000}?)\\\]", re.DOTALL),
    re.compile(r"\\\(((?:(?!\\\().){1,4000}?)\\\)", re.DOTALL),
)
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?|[-+]?\.\d+"
_NUMBER = re.compile(rf"(?<![\w.\\])(?:{NUMBER})(?:\s*/\s*\d+)?(?:\s*\\?%)?")
_TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}")
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
FUNCTION_WORDS = frozenset(
    ["sqrt", "frac", "sin", "cos", "tan", "sec", "csc", "cot", "log", "ln", "exp", "pi", "infty", "inf", "and", "or"]
)


@dataclass(frozen=True)
class Found:
    """An answer as it stands in the response, and by which rule it was found."""

    text: str
    rule: str


def answer_region(response: str) -> str:
    """The last `MAX_REGION` characters, without end-of-turn tokens; `9{,}500` is spelled `9,500`."""
    return _BRACED_COMMA.sub(",", _END_OF_TURN.sub(" ", response[-MAX_REGION:]))


def _brace_pairs(text: str) -> dict[int, int]:
    """Index of the closing brace of each `{`; escaped braces do not count, open ones are left out."""
    pairs: dict[int, int] = {}
    open_braces: list[int] = []
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            open_braces.append(index)
        elif character == "}" and open_braces:
            pairs[open_braces.pop()] = index
        index += 1
    return pairs


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of each box; content None when it is not closed. Boxes inside a closed box are left out."""
    pairs = _brace_pairs(text)
    found: list[tuple[int, int, str | None]] = []
    position = 0
    while match := _BOX.search(text, position):
        after = match.end()
        if after < len(text) and text[after] == "{":
            end = pairs.get(after)
            position = after + 1 if end is None else end + 1
            found.append((match.start(), position, None if end is None else text[after + 1 : end]))
        else:
            bare = _BARE_BOX.match(text, after)
            position = bare.end() if bare else after
            found.append((match.start(), position, text[after:position]))
    return found


def has_box(text: str) -> bool:
    """Whether the text has a box, closed or not."""
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    """Content of the last box, or None when there is no box or the last one is not closed."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def last_tagged(text: str) -> str | None:
    """What stands in the last closed pair of `<answer>` and `</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def _from_boxes(text: str) -> Found | None:
    boxes = _boxes(text)
    if not boxes:
        return None
    _, _, content = boxes[-1]
    if content is None or not content.strip():
        return Found("", "box")
    parts = [content]
    for (_, end, earlier), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[end:start]
        joined = bool(re.search(r",|and|or|;", between)) and bool(_CONNECTOR.fullmatch(between))
        if not joined or earlier is None or not earlier.strip():
            break
        if earlier not in parts:
            parts.insert(0, earlier)
    return Found(", ".join(parts).strip(), "box" if len(parts) == 1 else "boxes")


def is_bare(text: str) -> bool:
    """One short line with hardly any prose: an answer given as itself."""
    if len(text) > 300 or not text or "\n" in text.strip():
        return False
    if _MARKED_UP.search(text.strip()):
        return False
    if text.count("$") not in (0, 2) or ("$" in text.strip()[1:-1] and not text.strip().startswith("$$")):
        return False
    if text.count("=") > 1 and not _JOINED.search(text):
        return False
    words = [word for word in _PROSE_WORD.findall(_TEXT_MACRO.sub(" ", text)) if word.lower() not in FUNCTION_WORDS]
    return len(words) <= 2


def _last_maths(text: str) -> Found | None:
    last: re.Match[str] | None = None
    for pattern in _MATHS:
        for match in pattern.finditer(text):
            if match.group(1).strip() and (last is None or match.end() > last.end()):
                last = match
    return Found(last.group(1).strip(), "maths") if last else None


def _last_number(text: str) -> Found | None:
    numbers = _NUMBER.findall(text)
    return Found(numbers[-1].strip(), "number") if numbers else None


def _after_phrase(line: str) -> Found | None:
    """The answer in what follows "answer is": its first maths, a bare text, or its first number."""
    sentence = re.split(r"(?<!\d)\.(?:\s|$)|\.(?:\s|$)", line.strip().strip("*").strip(), maxsplit=1)[0].strip()
    if not sentence:
        return None
    if is_bare(sentence):
        return Found(sentence.rstrip(",;:"), "phrase")
    maths = _last_maths(sentence)
    if maths:
        return Found(maths.text, "phrase")
    first = _NUMBER.search(sentence)
    return Found(first.group(0), "phrase") if first else Found(sentence, "phrase")


def find_answer(response: str) -> Found | None:
    """The final answer of a response by the rule of this module.

    Returns None when there is no answer; a box that is empty or never closed counts as none.
    """
    text = answer_region(response)
    boxed = _from_boxes(text)
    if boxed is not None:
        return boxed if boxed.text else None
    hashes = _HASHES.findall(text)
    for marked, rule in ((last_tagged(text), "tag"), (hashes[-1] if hashes else None, "hashes")):
        if marked is not None:
            said = _ANSWER_IS.findall(marked)  # `#### The answer is 20.`
            within = _after_phrase(said[-1]) if said else None
            answer = within.text if within else marked.strip()
            return Found(answer, rule) if answer else None
    phrases = _ANSWER_IS.findall(text)
    if phrases:
        found = _after_phrase(phrases[-1])
        if found:
            return found
    stripped = text.strip()
    if is_bare(stripped):
        return Found(stripped, "bare")
    return _last_maths(text) or _last_number(text)
