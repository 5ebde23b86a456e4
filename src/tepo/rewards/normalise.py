"""Bringing an answer into the one form that the LaTeX parser reads: plain string work, no maths."""

import re
from fractions import Fraction

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "°": "^\\circ ", "²": "^2", "³": "^3", "π": "\\pi ",
     "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
     "±": "\\pm ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "€": "", "£": "", "¥": ""}
)  # fmt: skip
_SPACES = re.compile(r"(?<!\\)\\[!,;:> ]|\\quad|\\qquad|~")
_STYLE = re.compile(r"\\(?:displaystyle|textstyle|left|right|limits|bigg?|Bigg?)(?![A-Za-z])")
_EMPTY_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{\s*\}")
_JOINING_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(and|or)\s*\}")
_JOINING_WORD = re.compile(r"[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|(?<=[\d)])or(?=[A-Za-z(])")
_WHOLE_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|percentage|pct)\s*\}|(?:percentage|percent|pct)\b)\.?\s*$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\text\s*\{\s*degrees?\s*\}|degrees?)\s*$")
_UNITS = (
    r"dollars?|cents?|yuan|euros?|square|squares|cubic|units?|meters?|metres?|cm|mm|km|miles?|inch(?:es)?|feet|foot|ft|"
    r"yards?|seconds?|hours?|minutes?|days?|weeks?|months?|years?|kg|grams?|kilograms?|pounds?|lbs?|liters?|litres?|ml|"
    r"mph|kmh|points?|people|students?|apples?|eggs?|books?"
)
_POWER = r"(?:\s*\^\s*(?:\{\s*-?[123]\s*\}|[23]))?"
_UNIT_TEXT = r"\\(?:text|mathrm|mbox|textrm|rm)\s*\{(?!\s*[ei]\s*\})[^{}]*\}"
_TRAILING_UNIT = re.compile(rf"(?<=[\d.}})i])\s*(?:(?:{_UNIT_TEXT}|(?:{_UNITS})\b){_POWER}\s*\.?\s*/?\s*)+$")
_LETTER_UNIT = re.compile(rf"(?<=\d)\s*[mshglJKNWV]{_POWER}$")
_CODE_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(frac|dfrac|tfrac|sqrt|arcsin|arccos|arctan|sin|cos|tan|sec|csc|cot|ln|log|exp|pi|cup|infty)(?![A-Za-z])"
)
_MODULE = re.compile(r"(?<![A-Za-z])(?:np|numpy|math|sympy)\.(?=[a-z])")
_E_NOTATION = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"(-?)\s*(\d+)\s*\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_MIXED_PLAIN = re.compile(r"(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_PLAIN_NUMBER = re.compile(r"([-+]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?")
_PLAIN_FRACTION = re.compile(
    r"([-+]?)\s*(?:\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|\\[dtc]?frac\s*(\d)\s*(\d)|(\d+)\s*/\s*(\d+))"
)
_LETTER_UNIT_APART = re.compile(r"(?<=[\di])\s*\\[;:,]\s*m\s*\^\s*\{?\s*[23]\s*\}?$")
_LEAD = re.compile(
    r"^(?:\\approx(?![A-Za-z])\s*|(?:the\s+)?(?:general\s+)?solutions?\s*(?:is|are)?\s*:\s*)", re.IGNORECASE
)
_NO_SOLUTION = re.compile(
    r"no\s+solutions?(?:\s*:\s*\\(?:emptyset|oslash|varnothing))?|\\oslash|\\varnothing", re.IGNORECASE
)
_CLOCK = re.compile(r"(?<=\d)\s*([ap])\.?\s*m\.?$", re.IGNORECASE)
_WITH_INTERVAL = re.compile(r".*(?:[<>]|\\[lg]e|\\leqslant|\\geqslant)[^:]*:\s*(?=[(\[])", re.DOTALL)
_SET_OF = re.compile(
    r"\\\{\s*[A-Za-z]\s*(?:\||\\mid|:)([^{}|\\]*(?:\\(?:leq?|geq?|leqslant|geqslant|lt|gt|infty|sqrt|pi)[^{}|\\]*)+|[^{}|\\]*[<>][^{}|\\]*)\\\}"
)
_SHORT_FRACTION = re.compile(r"\\frac\s*(\\[A-Za-z]+|[A-Za-z0-9])\s*(\\[A-Za-z]+|[A-Za-z0-9])(?![A-Za-z])")
_NAMED_SUBSCRIPT = re.compile(r"_\s*(?:\{\s*\\([A-Za-z]+)\s*\}|\\([A-Za-z]+))")
_POINT_WITHOUT_DIGITS = re.compile(r"(?<=\d)\.(?=\s*[-+*/)}])")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_NAME = re.compile(r"\s*([A-Za-z]\w?(?:\s*\(\s*[A-Za-z]\s*\))?)\s*=(?!=)\s*(.+)", re.DOTALL)
_ARRAY = re.compile(r"[\[(]?\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]?", re.DOTALL)
MAX_DIGITS = 400
"""Numbers with more digits are left to the parser: conversion to an integer is quadratic."""


def tidy(answer: str) -> str:
    """Spelling alone: Unicode signs, thin spaces, dollar signs, separators of thousands, units, percent, degrees."""
    text = answer.translate(_UNICODE)
    text = text.replace("{,}", ",").replace(",\\!", ",").replace("\\$", "").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "") if text.lstrip().startswith("\\[") else text
    text = text.replace("$", " ").replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _LETTER_UNIT_APART.sub("", _STYLE.sub("", _EMPTY_TEXT.sub("", text)).strip())
    text = _JOINING_TEXT.sub(r" , ", text)
    text = _SPACES.sub(" ", text).strip().rstrip(".,;:").strip()
    text = text.removesuffix("\\]").removesuffix("\\").strip("*").strip()
    whole = _WHOLE_TEXT.fullmatch(text)
    text = whole.group(1).strip() if whole else text
    for pattern in (_PERCENT, _DEGREES, _TRAILING_UNIT):
        shorter = pattern.sub("", text).strip()
        text = shorter or text
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    text = _CLOCK.sub(lambda match: f" {match.group(1).lower()}m", _LEAD.sub("", text, count=1))
    if _NO_SOLUTION.fullmatch(text):
        return "\\emptyset"
    return _join_thousands(text)


def without_letter_unit(tidied: str) -> str:
    """`5m` as 5: only for a prediction whose gold is a number, since `5m` may be five times m."""
    return _LETTER_UNIT.sub("", tidied)


def _join_thousands(text: str) -> str:
    """`1,234` is one number, unless it stands in brackets, where commas separate."""
    if any(bracket in text for bracket in "([{|") and not text.startswith("\\frac"):
        return text
    return _THOUSANDS.sub(lambda match: match.group(1).replace(",", ""), text)


def as_latex(tidied: str) -> str:
    """Spelling that people write for LaTeX (`pi/2`, `sqrt(3)`, `2*x`, `1e6`, `1 1/4`, `a or b`) as LaTeX."""
    text = _ARRAY.sub(lambda match: f"\\begin{{pmatrix}}{match.group(1)}\\end{{pmatrix}}", tidied)
    text = _JOINING_WORD.sub(" , ", text)
    text = re.sub(r"\s*,(?:\s*,)+\s*", ", ", text).replace(";", ",")
    text = _E_NOTATION.sub(r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"\+\s*-", "- ", _POINT_WITHOUT_DIGITS.sub("", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _WITH_INTERVAL.sub("", text))
    text = _NAMED_SUBSCRIPT.sub(lambda match: f"_{{{match.group(1) or match.group(2)}}}", text)
    text = re.sub(r"(?<![A-Za-z\\])E(?=\s*_)", r"\\epsilon ", text)  # the parser takes E for Euler's number alone
    described = _SET_OF.fullmatch(text.strip())
    text = described.group(1) if described else text
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text)  # math-verify sees the imaginary unit only as a word
    text = _MODULE.sub("", text)
    text = text.replace("**", "^").replace("*", " \\cdot ")
    text = text.replace(">=", "\\ge ").replace("<=", "\\le ").replace("!=", "\\ne ")
    text = _CODE_FUNCTION.sub(r"\\\1 ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    for pattern in (_MIXED, _MIXED_PLAIN):
        mixed = pattern.fullmatch(text.strip())
        if mixed:
            sign, whole, *parts = mixed.groups()
            top, bottom = (part for part in parts if part is not None)
            return f"{sign}({whole}+\\frac{{{top}}}{{{bottom}}})"
    return _as_list(text.strip())


def _as_list(text: str) -> str:
    """A list of answers plainly: `[x=1, y=2]` without brackets, `f(x)=1, f(x)=2` as `1, 2`, `1 \\pm i` as two."""
    if text.startswith("\\{") and text.endswith("\\}"):
        members = split_list(text[2:-2].strip())
        return f"\\{{{', '.join(value for part in members for value in _both_signs(part))}\\}}"
    parts = split_list(text)
    if len(parts) == 1 and text[:1] in "[({" and text[-1:] in "])}":
        inner = split_list(text[1:-1].strip())
        parts = inner if all(_NAME.fullmatch(part) for part in inner) else parts
    named = [_NAME.fullmatch(part) for part in parts]
    if len(parts) > 1 and all(named) and len({match.group(1) for match in named if match}) == 1:
        parts = [match.group(2) for match in named if match]
    return ", ".join(value for part in parts for value in _both_signs(part))


def _both_signs(part: str) -> list[str]:
    """`a \\pm b` as `a + b` and `a - b`; all signs of one answer go together, `\\mp` against them."""
    if not _PLUS_MINUS.search(part):
        return [part]
    upper = _PLUS_MINUS.sub(lambda match: "+" if match.group(1) == "pm" else "-", part)
    lower = _PLUS_MINUS.sub(lambda match: "-" if match.group(1) == "pm" else "+", part)
    return [upper, lower]


def split_list(text: str) -> list[str]:
    """The parts between commas that stand in no bracket; one part when brackets do not match."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 and all(parts) else [text]


def as_text(tidied: str) -> str:
    """The answer as words: text macros, brackets around it, case and runs of spaces taken away."""
    text = _WHOLE_TEXT.sub(r" \1 ", tidied)
    text = " ".join(text.split()).casefold().strip(" .,;:")
    if text.startswith("(") and text.endswith(")") and len(text) <= 5:
        text = text[1:-1].strip()
    return text


def as_number(tidied: str) -> Fraction | None:
    """The exact value of an integer, a decimal or a fraction of integers; None for anything else."""
    if len(tidied) > MAX_DIGITS:
        return None
    number = _PLAIN_NUMBER.fullmatch(tidied)
    if number:
        return Fraction(tidied)
    fraction = _PLAIN_FRACTION.fullmatch(tidied)
    if not fraction:
        return None
    sign, *parts = fraction.groups()
    top, bottom = (int(part) for part in parts if part is not None)
    if bottom == 0:
        return None
    return Fraction(top, bottom) * (-1 if sign == "-" else 1)
