"""Training questions that share much of their text with a held-out one: copies, reworded or renumbered."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tepo.data.problem import Problem, normalised

WORDS = 8
"""Words in a row that count as one piece of shared text."""
SHARE = 0.5
"""Of a held-out question's pieces, from which on a training question is told."""
COMMON = 0.01
"""A piece in more than this share of the held-out questions (and in more than two) is the form of the task."""
SHOWN = 5


@dataclass(frozen=True)
class Overlap:
    """A training question that holds `share` of the held-out question's pieces of text (0 to 1)."""

    train_id: str
    test_id: str
    share: float


def find_overlaps(
    train: Sequence[Problem], test: Sequence[Problem], *, words: int = WORDS, share: float = SHARE
) -> list[Overlap]:
    """The training questions that share at least `share` of the `words`-grams of a held-out one, with the closest of
    those; in the order of `train`.

    Words are those of `tepo.data.problem.normalised`: numbers and signs are words too. Held-out questions of fewer than
    `words` words have no pieces and are never met, and pieces that stand in more than `COMMON` of the held-out
    questions do not count; equal questions have to be taken out before.
    """
    holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, problem in enumerate(test):
        for piece in _pieces(problem, words):
            holders[piece].append(index)
    limit = max(2.0, COMMON * len(test))
    holders = defaultdict(list, {piece: where for piece, where in holders.items() if len(where) <= limit})
    sizes = Counter(index for where in holders.values() for index in where)
    overlaps = []
    for problem in train:
        shared = Counter(index for piece in _pieces(problem, words) for index in holders.get(piece, ()))
        closest = max(shared, key=lambda index: shared[index] / sizes[index], default=None)
        if closest is not None and shared[closest] >= share * sizes[closest]:
            overlaps.append(Overlap(problem.id, test[closest].id, shared[closest] / sizes[closest]))
    return overlaps


def _pieces(problem: Problem, words: int) -> set[tuple[str, ...]]:
    text = normalised(problem).split()
    return {tuple(text[start : start + words]) for start in range(len(text) - words + 1)}


def contamination_notes(train: Sequence[Problem], test: Sequence[Problem]) -> tuple[str, ...]:
    """What a person should know of the overlaps: their number and the ids of the closest; empty when there are none."""
    overlaps = sorted(find_overlaps(train, test), key=lambda overlap: -overlap.share)
    if not overlaps:
        return ()
    examples = ", ".join(f"{o.train_id} ~ {o.test_id} ({o.share:.0%})" for o in overlaps[:SHOWN])
    more = ", ..." if len(overlaps) > SHOWN else ""
    return (
        f"{len(overlaps)} training questions share at least {SHARE:.0%} of the {WORDS}-word pieces of a held-out "
        f"question and are kept: {examples}{more}",
    )
