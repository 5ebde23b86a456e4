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
    r"(?<![\\A-Za-z])(frac|dfrac|tfrac|sqrt|sin|cos|tan|sec|csc|cot|ln|log|exp|pi|cup|infty)(?![A-Za-z])"
)
_E_NOTATION = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"(-?)\s*(\d+)\s*\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_MIXED_PLAIN = re.compile(r"(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_PLAIN_NUMBER = re.compile(r"([-+]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?")
_PLAIN_FRACTION = re.compile(
    r"([-+]?)\s*(?:\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|\\[dtc]?frac\s*(\d)\s*(\d)|(\d+)\s*/\s*(\d+))"
)
_ARRAY = re.compile(r"[\[(]?\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]?", re.DOTALL)
MAX_DIGITS = 400
"""Numbers with more digits are left to the parser: conversion to an integer is quadratic."""


def tidy(answer: str) -> str:
    """Spelling alone: Unicode signs, thin spaces, dollar signs, separators of thousands, units, percent, degrees."""
    text = answer.translate(_UNICODE)
    text = text.replace("{,}", ",").replace(",\\!", ",").replace("\\$", "").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "") if text.lstrip().startswith("\\[") else text
    text = text.replace("$", " ").replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _STYLE.sub("", _EMPTY_TEXT.sub("", text))
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
    text = re.sub(r"\+\s*-", "- ", text)
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text)  # math-verify sees the imaginary unit only as a word
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
    return text.strip()


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
