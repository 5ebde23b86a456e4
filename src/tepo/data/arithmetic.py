"""The built-in task: worked addition of two numbers of equally many digits.

A prompt is `482+739=`, the response adds column by column from the right, writing each carry, and ends in the
answer: `2+9=11 8+3+1=12 4+7+1=12 ####1221`. Some tokens decide (whether to carry, what the digits add up to),
the others follow (copied digits, signs, the answer read off the columns).

All unordered pairs of one number of digits are numbered, in a scattered order, from 0 to `count_pairs(digits)` - 1.
The first fifth of the numbers is held out for ever: tests are drawn from it and nothing else is, whatever the seed,
so that also a model trained on other seeds (the embedded one) has not seen a held-out problem.
"""

import math
import random

from tepo.data.problem import Problem
from tepo.errors import TepoError

MAX_DIGITS = 9
HELD_OUT = 5  # one pair in so many is for tests only
ANSWER_MARK = "####"
DEFAULT_TRAIN = 20_000


def count_pairs(digits: int) -> int:
    """Number of unordered pairs of numbers with exactly `digits` digits (0 to 9 for one digit)."""
    size = _first_after(digits) - _first(digits)
    return size * (size + 1) // 2


def count_held_out(digits: int) -> int:
    """How many of the pairs are for tests only: the numbers 0 to `count_held_out(digits)` - 1."""
    return count_pairs(digits) // HELD_OUT


def pair(number: int, digits: int) -> tuple[int, int]:
    """The pair (a, b), a >= b, with this number. A bijection from 0 .. `count_pairs(digits)` - 1.

    Raises:
        TepoError: `digits` is not 1 to 9, or there is no pair with this number.
    """
    _check_digits(digits)
    total = count_pairs(digits)
    if not 0 <= number < total:
        raise TepoError(f"arithmetic: there is no pair {number}; with digits={digits} they are 0 to {total - 1}")
    index = number * _stride(total) % total
    larger = (math.isqrt(8 * index + 1) - 1) // 2
    smaller = index - larger * (larger + 1) // 2
    return _first(digits) + larger, _first(digits) + smaller


def carries(a: int, b: int) -> int:
    """Number of columns of a + b that carry into the next one."""
    count = carry = 0
    while a or b:
        carry = int(a % 10 + b % 10 + carry >= 10)
        count += carry
        a, b = a // 10, b // 10
    return count


def prompt(a: int, b: int) -> str:
    """The text of the problem, such as `482+739=`."""
    return f"{a}+{b}="


def worked_response(a: int, b: int) -> str:
    """The demonstration for a + b, without the end token, such as `2+9=11 8+3+1=12 4+7+1=12 ####1221`.

    One column a word, least digit first; `+1` is the carry from the column before. A shorter number counts as
    filled up with zeros on the left.

    Raises:
        TepoError: a number is negative.
    """
    if a < 0 or b < 0:
        raise TepoError(f"arithmetic: numbers must not be negative, got {a} and {b}")
    columns: list[str] = []
    carry = 0
    rest_a, rest_b = a, b
    while rest_a or rest_b or not columns:
        x, y = rest_a % 10, rest_b % 10
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
        rest_a, rest_b = rest_a // 10, rest_b // 10
    return f"{' '.join(columns)} {ANSWER_MARK}{a + b}"


def generate(
    seed: int, digits: int = 3, train: int | None = None, test: int = 200
) -> tuple[list[Problem], list[Problem]]:
    """Draw problems without repetition: (training problems, held-out problems).

    No pair is in both, also not swapped; the first problems of a list do not depend on how many are asked for.

    Args:
        seed: decides which pairs are drawn, their order and which number comes first.
        digits: digits of each number, 1 to 9; the first digit is not 0 (except for one digit).
        train: number of training problems; None is all there are, at most `DEFAULT_TRAIN`.
        test: number of held-out problems.

    Raises:
        TepoError: `digits` is out of range, or more problems are asked for than exist.
    """
    _check_digits(digits)
    total, held_out = count_pairs(digits), count_held_out(digits)
    if train is None:
        train = min(DEFAULT_TRAIN, total - held_out)
    _check_count("train", train, total - held_out, digits)
    _check_count("test", test, held_out, digits)
    return (
        _draw(random.Random(f"arithmetic train {seed}"), held_out, total, train, digits),
        _draw(random.Random(f"arithmetic test {seed}"), 0, held_out, test, digits),
    )


def _draw(rng: random.Random, start: int, stop: int, count: int, digits: int) -> list[Problem]:
    """Problems with distinct numbers from start .. stop - 1: a Fisher-Yates shuffle that keeps only what it moved.

    Unlike `random.sample`, asking for more does not change the first ones.
    """
    problems = []
    moved: dict[int, int] = {}
    for place in range(start, start + count):
        other = rng.randrange(place, stop)
        a, b = pair(moved.get(other, other), digits)
        moved[other] = moved.get(place, place)
        if rng.random() < 0.5:
            a, b = b, a
        info = {"a": a, "b": b, "digits": digits, "carries": carries(a, b)}
        problems.append(Problem(id=f"arithmetic-{a}+{b}", prompt=prompt(a, b), answer=str(a + b), info=info))
    return problems


def _check_digits(digits: int) -> None:
    if isinstance(digits, bool) or not isinstance(digits, int) or not 1 <= digits <= MAX_DIGITS:
        raise TepoError(f"data.options.digits={digits!r}: a whole number from 1 to {MAX_DIGITS} is allowed")


def _check_count(name: str, count: int, available: int, digits: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise TepoError(f"arithmetic: {name}={count!r} is not a number of problems (0 or more)")
    if count > available:
        raise TepoError(
            f"arithmetic: {name}={count} problems were asked for, but with digits={digits} there are {available}; "
            f"ask for fewer or for more digits"
        )


def _first(digits: int) -> int:
    return 0 if digits == 1 else int(10 ** (digits - 1))


def _first_after(digits: int) -> int:
    return int(10**digits)


def _stride(total: int) -> int:
    """A step near the golden section of `total` and prime to it: multiples of it scatter evenly and meet every pair."""
    step = max(1, total * 618_034 // 1_000_000)
    while math.gcd(step, total) != 1:
        step += 1
    return step
