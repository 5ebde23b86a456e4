"""From responses to rewards: the verdict, its score, and what the recipe adds to it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tepo.config.data import OverlongPunishment, RewardConfig
from tepo.data.problem import Problem, TaskData
from tepo.errors import TepoError
from tepo.rewards.judges import FORMAT
from tepo.rewards.pool import JudgePool, Request
from tepo.rewards.verdict import Status, Verdict


@dataclass(frozen=True)
class Response:
    """One response to a problem: its text, its length in tokens (end token included), whether it has an end token."""

    problem: Problem
    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Judged:
    """Verdicts and rewards of a batch, in its order; every list has one entry a response.

    `rewards` is what the objective sees. `correct` is the raw accuracy, untouched by any shaping: groups are filtered
    by it and never by the reward (NeMo-RL issue 2431). `formatted` is None where no format is asked for.
    """

    verdicts: list[Verdict]
    rewards: list[float]
    correct: list[bool]
    formatted: list[bool | None]
    overlong: list[float]


def reward_metrics(
    verdicts: Sequence[Verdict], rewards: Sequence[float], formatted: Sequence[bool | None], overlong: Sequence[float]
) -> dict[str, float]:
    """Means over responses: reward, accuracy, share of each status, format and overlong where they are in use."""
    count = max(1, len(verdicts))
    out = {"reward": sum(rewards) / count, "accuracy": sum(verdict.correct for verdict in verdicts) / count}
    out |= {f"verdict/{status}": share for status, share in status_shares(verdicts).items()}
    asked = [found for found in formatted if found is not None]
    if asked:
        out["formatted"] = sum(asked) / len(asked)
    if any(overlong):
        out["overlong"] = sum(overlong) / count
    return out


def status_shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of each status; all statuses are there, and the shares of a batch that is not empty sum to 1."""
    count = max(1, len(verdicts))
    return {status.value: sum(verdict.status is status for verdict in verdicts) / count for status in Status}


def soft_overlong(tokens: int, max_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (2503.14476, equation 13) of a response of `tokens` tokens, from -1 to 0.

    0 up to max_length - cache, then linear down to -1 at max_length, -1 beyond.
    """
    start = max_length - cache
    if tokens <= start:
        return 0.0
    return max(-1.0, (start - tokens) / cache)


class RewardFunction:
    """Judges responses and prices them. A context manager; its worker processes end with it.

    The reward of a response is

        score(verdict)  correct or wrong, or between them with reward.partial
        + format.score  when the pattern is found
        + overlong      when it is asked for

    and with reward.missing_end a response without an end token gets that value in place of the first two (Tulu 3).

    Raises:
        TepoError: a verifier that is not there, a pattern that is none, a punishment that starts below 0 tokens.
    """

    def __init__(self, config: RewardConfig, task: TaskData) -> None:
        self.config = config
        self.verifier = task.verifier if config.verifier == "auto" else config.verifier
        _check_pattern(config)
        _check_overlong(config.overlong)
        if self.verifier == "gym" and not all("gym" in problem.info for problem in [*task.train[:1], *task.test[:1]]):
            raise TepoError(
                f"reward.verifier=gym: only gym:TASK problems have a scorer of their own, and the task is {task.name}"
            )
        workers = None if config.workers == "auto" else config.workers
        self._pool = JudgePool(workers, config.timeout, config.memory_mb)
        try:
            self._pool.check(self.verifier)
        except TepoError:
            self._pool.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def unreadable_golds(self, problems: Sequence[Problem]) -> dict[str, str]:
        """Ids of the problems whose gold answer the verifier cannot read, so that they can never pay, and why."""
        return self._pool.unreadable_golds(self.verifier, problems)

    def same_answers(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two answers (as extracted) of each pair are the same, judged by the verifier where it compares
        answers with answers (math, integer), by their spelling otherwise."""
        if self.verifier not in ("math", "integer"):
            return [left.split() == right.split() for left, right in pairs]
        verdicts = self._pool.judge(
            [Request(self.verifier, f"\\boxed{{{left}}}", Problem("", "", right)) for left, right in pairs]
        )
        return [
            verdict.correct or left.split() == right.split()
            for verdict, (left, right) in zip(verdicts, pairs, strict=True)
        ]

    def __call__(self, responses: Sequence[Response]) -> Judged:
        """Judge and price a batch; see `Judged`."""
        requests = [Request(self.verifier, response.text, response.problem) for response in responses]
        form = self.config.format
        if form is not None:
            # A user's pattern over hostile text can run for ever: it is searched where that can be ended.
            pattern = Problem("", "", form.pattern)
            requests += [Request(FORMAT, response.text, pattern) for response in responses]
        judged = self._pool.judge(requests)
        verdicts, searched = judged[: len(responses)], judged[len(responses) :]
        formatted: list[bool | None] = (
            [found.correct for found in searched] if form is not None else [None] * len(responses)
        )
        overlong = [self._overlong(response) for response in responses]
        rewards = [
            self._score(response, verdict, bool(found)) + punishment
            for response, verdict, found, punishment in zip(responses, verdicts, formatted, overlong, strict=True)
        ]
        return Judged(verdicts, rewards, [verdict.correct for verdict in verdicts], formatted, overlong)

    def _score(self, response: Response, verdict: Verdict, formatted: bool) -> float:
        config = self.config
        if config.missing_end is not None and not response.finished:
            return config.missing_end
        share = verdict.score if config.partial else float(verdict.correct)
        score = config.wrong + share * (config.correct - config.wrong)
        return score + (config.format.score if config.format is not None and formatted else 0.0)

    def _overlong(self, response: Response) -> float:
        limits = self.config.overlong
        return 0.0 if limits is None else soft_overlong(response.tokens, limits.max_length, limits.cache)


def _check_pattern(config: RewardConfig) -> None:
    if config.format is None:
        return
    try:
        re.compile(config.format.pattern, re.DOTALL)
    except re.error as error:
        raise TepoError(
            f"reward.format.pattern={config.format.pattern!r}: not a regular expression ({error.msg} at {error.pos})"
        ) from error


def _check_overlong(limits: OverlongPunishment | None) -> None:
    if limits is not None and limits.cache > limits.max_length:
        raise TepoError(
            f"reward.overlong.cache={limits.cache}: allowed is at most max_length={limits.max_length}, "
            f"or every response is punished"
        )
