"""Judging by comparing texts: for tasks whose answer has one spelling."""

from tepo.rewards.extract import answer_region, has_box, last_boxed
from tepo.rewards.verdict import Status, Verdict, failed

MARK = "####"


def exact_answer(response: str) -> str:
    """What follows the last `####` on its line, else the content of the last box, else the whole; stripped.

    Empty when there is nothing, or when the last box is never closed.
    """
    text = answer_region(response)
    if MARK in text:
        return text.rsplit(MARK, 1)[1].strip().split("\n", 1)[0].strip()
    if has_box(text):
        return (last_boxed(text) or "").strip()
    return text.strip()


def judge_exact(response: str, gold: str) -> Verdict:
    """Correct when the answer found is the gold answer, character for character. An empty gold pays nothing."""
    wanted = gold.strip()
    if not wanted:
        return failed(Status.ERROR, "the gold answer is empty, so nothing can be correct")
    answer = exact_answer(response)
    if not answer:
        return failed(Status.NO_ANSWER, "nothing after ####, in a box, or at all")
    if answer == wanted:
        return Verdict(Status.CORRECT, 1.0, answer, "the same text")
    return failed(Status.WRONG, "another text", answer[:200])
