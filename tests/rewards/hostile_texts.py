"""Seeded hostile responses: what a policy under pressure, or an attacker, might write in place of an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

ATOMS = ("1", "7", "x", "-3", "0.5", r"\pi", "i", r"\frac{1}{2}", r"\sqrt{2}", "1,000", "a", r"\infty", "50\\%", "e")
OPEN, CLOSE = ("{", "(", "[", r"\left(", r"\{", "|"), ("}", ")", "]", r"\right)", r"\}", "|")
CODE = (
    "__import__('os').system('touch hacked')",
    "exec(open('/etc/passwd').read())",
    "(lambda: open('hacked','w'))()",
    "eval('9**9**9')",
    "${jndi:ldap://x}",
    "'; DROP TABLE answers; --",
    "{{7*7}}",
    "%s%s%s%n",
    "\x00\x01\x02",
    "__class__.__mro__[1].__subclasses__()",
)
UNICODE = "\u202e\u200b\ufeff\u0661\u0662\u00bd\u221a\u2044\ud800\U0001f600\u0000\u2212\uff11\u0301\u2028é±∞"


def _nested(rng: random.Random) -> str:
    depth = rng.choice([3, 10, 60, 400, 3000])
    macro = rng.choice([r"\frac{1}{", r"\sqrt{", "{", "(", r"\left(", "-", r"\boxed{", r"\text{", "|", "[", r"\{"])
    return macro * depth + "1" + rng.choice(["", "}" * depth, ")" * depth, "}" * (depth // 2)])


def _tower(rng: random.Random) -> str:
    base = rng.choice(["9", "2", "10", "x", "(-1)", r"\pi"])
    return "^{".join([base] * rng.randint(3, 12)) + "}" * rng.randint(0, 12)


def _exponent(rng: random.Random) -> str:
    digits = "9" * rng.choice([3, 6, 20, 300])
    return rng.choice(
        [f"10^{{{digits}}}", f"1e{digits}", f"2^{{-{digits}}}", f"1.5\\times 10^{{{digits}}}", f"0^{{{digits}}}"]
    )


def _factorials(rng: random.Random) -> str:
    inner = str(rng.randint(1, 10**6))
    for _ in range(rng.randint(1, 6)):
        inner = f"({inner})!"
    return rng.choice([inner, f"\\binom{{{inner}}}{{{rng.randint(1, 10**6)}}}", f"\\sum_{{k=1}}^{{{inner}}} k!"])


def _unbalanced(rng: random.Random) -> str:
    return "".join(
        rng.choice((*ATOMS, *OPEN, *CLOSE, "$", "\\", "&", "^", "_", "=", ",")) for _ in range(rng.randint(1, 60))
    )


def _megabyte(rng: random.Random) -> str:
    unit = rng.choice(
        ["1", "1+", "x", "{", "\\boxed{", "$", "$$", "\\", "answer is ", "#### ", "<answer>", "1,", " ", "\\("]
    )
    return unit * (10**6 // len(unit))


def _unicode(rng: random.Random) -> str:
    return "".join(rng.choice(UNICODE + "1+x{}") for _ in range(rng.randint(1, 80)))


def _code(rng: random.Random) -> str:
    return rng.choice(CODE) + rng.choice(["", "7", "}", "\n" + rng.choice(CODE)])


def _digits(rng: random.Random) -> str:
    return rng.choice("123456789") * rng.choice([50, 500, 1_900, 5_000]) + rng.choice(["", ".5", "/3", "!", "%"])


def _expression(rng: random.Random) -> str:
    parts = [rng.choice(ATOMS)]
    for _ in range(rng.randint(1, 12)):
        parts += [rng.choice(["+", "-", "*", "/", "^", "=", "<", ",", r"\cdot ", r"\cup", r"\pm"]), rng.choice(ATOMS)]
    return "".join(parts)


KINDS: tuple[tuple[int, Callable[[random.Random], str]], ...] = (
    (20, _unbalanced), (16, _expression), (14, _unicode), (12, _nested), (10, _code), (8, _tower), (8, _exponent),
    (6, _digits), (2, _factorials), (1, _megabyte),
)  # fmt: skip
FRAMES = (
    "{}",
    r"\boxed{{{}}}",
    r"so \boxed{{{}",
    "#### {}",
    "The answer is {}.",
    "${}$",
    "<answer>{}</answer>",
    r"\[{}\]",
)


def hostile_texts(count: int, seed: int) -> Iterator[str]:
    """`count` responses; the same ones for the same seed."""
    rng = random.Random(seed)
    weights, makers = zip(*KINDS, strict=True)
    for _ in range(count):
        yield rng.choice(FRAMES).format(rng.choices(makers, weights)[0](rng))
