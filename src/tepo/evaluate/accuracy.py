"""Sample responses to held-out problems, judge them, and say how accurate they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tepo.data.problem import Problem
from tepo.evaluate.metrics import mean_interval, pass_at_k
from tepo.rewards import reward
from tepo.rewards.verdict import Verdict
from tepo.rollout import Engine, Response, Sampling


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over problems, with a 95 % interval, and what else became of the responses (shares of all of them).

    samples: responses to each problem. pass_at_k: for k = 1, 2, 4, ... up to samples. mean_tokens: end token included.
    """

    accuracy: float
    interval: tuple[float, float]
    problems: int
    samples: int
    temperature: float
    pass_at_k: dict[int, float]
    verdicts: dict[str, float]
    truncated: float
    mean_tokens: float
    responses: list[dict[str, Any]] = field(repr=False, default_factory=list)

    def summary(self) -> dict[str, Any]:
        """All of it but the responses, as plain values."""
        return {key: value for key, value in asdict(self).items() if key != "responses"}


def evaluate(
    engine: Engine,
    judge: reward.RewardFunction,
    decode: Any,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    seed: int,
) -> Accuracy:
    """`samples` responses to each problem, judged. decode: token ids -> text. prompts: token ids, one list a problem.

    Raises ValueError when there are no problems.
    """
    if not problems:
        raise ValueError("no problems to evaluate on")
    groups = engine.generate(prompts, samples, sampling, seed)
    flat = [(problem, response) for problem, group in zip(problems, groups, strict=True) for response in group]
    judged = judge([judgeable(problem, response, decode) for problem, response in flat])
    per_problem = [sum(judged.correct[i : i + samples]) for i in range(0, len(flat), samples)]
    ks = [2**i for i in range(samples.bit_length())]
    return Accuracy(
        accuracy=sum(per_problem) / len(flat),
        interval=mean_interval(per_problem, samples),
        problems=len(problems),
        samples=samples,
        temperature=sampling.temperature,
        pass_at_k={k: sum(pass_at_k(samples, c, k) for c in per_problem) / len(problems) for k in ks},
        verdicts=reward.status_shares(judged.verdicts),
        truncated=sum(not response.finished for _, response in flat) / len(flat),
        mean_tokens=sum(len(response.ids) for _, response in flat) / len(flat),
        responses=[
            record(problem, response, verdict, decode)
            for (problem, response), verdict in zip(flat, judged.verdicts, strict=True)
        ],
    )


def judgeable(problem: Problem, response: Response, decode: Any) -> reward.Response:
    """A response as the reward function takes it: its text without special tokens."""
    return reward.Response(problem, decode(response.ids), len(response.ids), response.finished)


def record(problem: Problem, response: Response, verdict: Verdict, decode: Any) -> dict[str, Any]:
    """One response and its verdict as plain values, for the run folder."""
    return {
        "id": problem.id,
        "problem": problem.text,
        "answer": problem.answer,
        "response": decode(response.ids),
        "finish_reason": response.finish_reason,
        "tokens": len(response.ids),
        "status": str(verdict.status),
        "score": verdict.score,
        "extracted": verdict.extracted,
        "detail": verdict.detail,
    }
