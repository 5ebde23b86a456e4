"""Sample responses to held-out problems, judge them, and say how accurate they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from tepo.data.problem import Problem
from tepo.evaluate.metrics import majority, mean_interval, pass_at_k
from tepo.rewards import reward
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Engine, Response, Sampling

SameAnswers = Callable[[Sequence[tuple[str, str]]], list[bool]]
"""Whether the two answers of each pair are the same."""

GROUPINGS = {"subject": ("subject", "subfield", "domain", "type"), "level": ("level", "difficulty")}
"""Under which names data sets keep the subject and the level of a problem; the first that is there counts."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over problems, with a 95 % interval, and what else became of the responses (shares of all of them).

    accuracy: the mean over problems of the share of right responses, avg@k. samples: responses to each problem.
    pass_at_k: for k = 1, 2, 4, ... up to samples. mean_tokens: end token included. majority: maj@samples, None for one
    sample. groups: accuracy by subject and by level, where the data set has them.
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
    pass_intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    majority: float | None = None
    majority_interval: tuple[float, float] | None = None
    groups: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

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
    records = answer(engine, judge, decode, problems, prompts, samples, sampling, seed)
    return measure(records, samples, sampling.temperature, judge.same_answers)


def answer(
    engine: Engine,
    judge: reward.RewardFunction,
    decode: Any,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    seed: int,
) -> list[dict[str, Any]]:
    """`samples` records to each problem, problem after problem: responses and their verdicts (see `record`)."""
    groups = engine.generate(prompts, samples, sampling, seed)
    flat = [(problem, response) for problem, group in zip(problems, groups, strict=True) for response in group]
    judged = judge([judgeable(problem, response, decode) for problem, response in flat])
    return [
        record(problem, response, verdict, decode)
        for (problem, response), verdict in zip(flat, judged.verdicts, strict=True)
    ]


def measure(
    records: Sequence[Mapping[str, Any]], samples: int, temperature: float, same_answers: SameAnswers
) -> Accuracy:
    """The accuracy of records, `samples` to each problem, problem after problem."""
    problems = [records[start : start + samples] for start in range(0, len(records), samples)]
    correct = [sum(row["status"] == Status.CORRECT for row in rows) for rows in problems]
    rates = [count / samples for count in correct]
    passes = {k: [pass_at_k(samples, count, k) for count in correct] for k in powers_of_two(samples)}
    votes = majorities(problems, same_answers) if samples > 1 else None
    count = len(records)
    return Accuracy(
        accuracy=sum(correct) / count,
        interval=mean_interval(rates),
        problems=len(problems),
        samples=samples,
        temperature=temperature,
        pass_at_k={k: sum(values) / len(problems) for k, values in passes.items()},
        verdicts={status.value: sum(row["status"] == status for row in records) / count for status in Status},
        truncated=sum(row["finish_reason"] == "length" for row in records) / count,
        mean_tokens=sum(row["tokens"] for row in records) / count,
        responses=[dict(row) for row in records],
        pass_intervals={k: mean_interval(values) for k, values in passes.items()},
        majority=None if votes is None else sum(votes) / len(votes),
        majority_interval=None if votes is None else mean_interval(votes),
        groups={name: grouped for name in GROUPINGS if (grouped := _grouped(problems, rates, name))},
    )


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]


def majorities(problems: Sequence[Sequence[Mapping[str, Any]]], same_answers: SameAnswers) -> list[float]:
    """maj@k of each problem. Responses vote with the answer found in them, whether they were cut off or not.

    Right responses vote alike; wrong answers alike when the verifier holds them to be the same, or through others that
    it does. Those that have no answer, or none that could be read, do not vote.
    """
    spellings = [
        sorted({row["extracted"] for row in rows if row["status"] == Status.WRONG and row["extracted"]})
        for rows in problems
    ]
    needed = [
        index
        for index, rows in enumerate(problems)
        # No union of wrong answers outvotes right ones that are more than half of all votes.
        if 0 < 2 * sum(row["status"] == Status.CORRECT for row in rows) <= sum(_votes(row) for row in rows)
    ]
    pairs = [(index, pair) for index in needed for pair in combinations(range(len(spellings[index])), 2)]
    same = same_answers([(spellings[index][left], spellings[index][right]) for index, (left, right) in pairs])
    roots = [list(range(len(found))) for found in spellings]
    for (index, (left, right)), equal in zip(pairs, same, strict=True):
        if equal:
            old, new = roots[index][right], roots[index][left]
            roots[index] = [new if root == old else root for root in roots[index]]
    out = []
    for rows, found, root in zip(problems, spellings, roots, strict=True):
        label = {text: root[place] for place, text in enumerate(found)}
        votes = [
            "right" if row["status"] == Status.CORRECT else label[row["extracted"]] if _votes(row) else None
            for row in rows
        ]
        out.append(majority(votes, "right"))
    return out


def _votes(row: Mapping[str, Any]) -> bool:
    return row["status"] == Status.CORRECT or (row["status"] == Status.WRONG and bool(row["extracted"]))


def _grouped(
    problems: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float], name: str
) -> dict[str, dict[str, Any]]:
    """Accuracy by the values of `subject` or `level`; empty when there are fewer than two."""
    values: dict[str, list[float]] = {}
    for rows, rate in zip(problems, rates, strict=True):
        if name in rows[0]:
            values.setdefault(str(rows[0][name]), []).append(rate)
    if len(values) < 2:
        return {}
    return {
        value: {"problems": len(of), "accuracy": sum(of) / len(of), "interval": mean_interval(of)}
        for value, of in sorted(values.items())
    }


def judgeable(problem: Problem, response: Response, decode: Any) -> reward.Response:
    """A response as the reward function takes it: its text without special tokens."""
    return reward.Response(problem, decode(response.ids), len(response.ids), response.finished)


def record(problem: Problem, response: Response, verdict: Verdict, decode: Any) -> dict[str, Any]:
    """One response and its verdict as plain values, with the subject and the level of its problem where it has them."""
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
    } | {name: value for name, names in GROUPINGS.items() if (value := _labelled(problem, names)) is not None}


def _labelled(problem: Problem, names: Sequence[str]) -> str | int | float | None:
    """The first label of a problem under one of `names`; of a path `Mathematics -> Algebra -> ...` the second."""
    value = next((problem.info[name] for name in names if problem.info.get(name) not in (None, "", [])), None)
    value = value[0] if isinstance(value, list | tuple) else value
    if isinstance(value, str) and " -> " in value:
        value = value.split(" -> ")[1]
    return value if isinstance(value, str | int | float) else None
