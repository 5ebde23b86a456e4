"""`evaluate` and the command: counts, shares and records fit together and fit the responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from models import PIECES, model_folder, tiny_policy
from rich.console import Console

from tepo.config.data import DataConfig, RewardConfig
from tepo.data import Problem, load_task
from tepo.evaluate import Accuracy, evaluate, pass_at_k
from tepo.evaluate.command import evaluate_model
from tepo.evaluate.plan import recipe_for
from tepo.rewards.reward import RewardFunction
from tepo.rollout import Response, Sampling, TransformersEngine

TASK = load_task(DataConfig(test_problems=4, max_problems=4, options={"digits": 1}), seed=0)


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardFunction]:
    with RewardFunction(RewardConfig(workers=1), TASK) as function:
        yield function


def encode(text: str) -> tuple[int, ...]:
    return tuple(PIECES.index(character) for character in text)


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids if not PIECES[i].startswith("<"))


@dataclass
class Scripted:
    """An engine that gives prepared texts; those that end in `$` have an end token."""

    texts: list[list[str]]
    asked: list[tuple[int, Sampling, int]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        self.asked.append((count, sampling, seed))
        return [[self._response(text) for text in texts] for texts in self.texts]

    @staticmethod
    def _response(text: str) -> Response:
        ids = encode(text.rstrip("$")) + ((1,) if text.endswith("$") else ())
        return Response(ids, (0.0,) * len(ids), text.endswith("$"))


def test_every_number_is_that_of_the_responses(judge: RewardFunction) -> None:
    problems = list(TASK.test)
    right = [f"####{problem.answer}$" for problem in problems]
    wrong = "####99$"
    texts = [
        [right[0], right[0], right[0], right[0]],
        [wrong, right[1], wrong, wrong],
        [wrong, "####", wrong, wrong],
        [wrong, wrong, right[3], right[3]],
    ]
    engine, sampling = Scripted(texts), Sampling(0.7, 30)
    result = evaluate(engine, judge, decode, problems, [[3]] * 4, 4, sampling, seed=9)
    assert engine.asked == [(4, sampling, 9)]
    counts = [4, 1, 0, 2]
    assert result.accuracy == 7 / 16
    assert (result.problems, result.samples, result.temperature) == (4, 4, 0.7)
    assert result.pass_at_k == {
        k: pytest.approx(sum(pass_at_k(4, count, k) for count in counts) / 4) for k in (1, 2, 4)
    }
    assert result.pass_at_k[1] == pytest.approx(result.accuracy)
    assert result.pass_at_k[4] == 3 / 4
    assert result.interval[0] < result.accuracy < result.interval[1]
    assert sum(result.verdicts.values()) == pytest.approx(1)
    assert result.verdicts["correct"] == result.accuracy
    assert result.truncated == 1 / 16
    tokens = [len(Scripted._response(text).ids) for group in texts for text in group]
    assert result.mean_tokens == pytest.approx(sum(tokens) / 16)
    assert [record["status"] == "correct" for record in result.responses] == [
        text in right for group in texts for text in group
    ]
    assert [record["id"] for record in result.responses] == [problem.id for problem in problems for _ in range(4)]
    assert [record["tokens"] for record in result.responses] == tokens
    assert [record["finish_reason"] for record in result.responses].count("length") == 1
    assert result.responses[0]["response"] == right[0].rstrip("$")


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_given_for_powers_of_two(judge: RewardFunction, samples: int, ks: list[int]) -> None:
    problem = TASK.test[0]
    engine = Scripted([[f"####{problem.answer}$"] * samples])
    result = evaluate(engine, judge, decode, [problem], [[3]], samples, Sampling(1.0, 9), seed=0)
    assert list(result.pass_at_k) == ks
    assert set(result.pass_at_k.values()) == {1.0}


def test_a_tiny_model_on_arithmetic(judge: RewardFunction) -> None:
    policy = tiny_policy()
    tokenizer = policy.tokenizer

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    prompts = [tokenizer(problem.text)["input_ids"] for problem in TASK.test]
    engine = TransformersEngine(policy)
    sampling = Sampling(1.0, 12)
    result = evaluate(engine, judge, text, TASK.test, prompts, 8, sampling, seed=3)
    groups = engine.generate(prompts, 8, sampling, seed=3)
    responses = [response for group in groups for response in group]
    assert len(result.responses) == len(responses) == 32
    assert [record["tokens"] for record in result.responses] == [len(response.ids) for response in responses]
    assert result.mean_tokens == pytest.approx(sum(len(response.ids) for response in responses) / 32)
    assert result.truncated == pytest.approx(sum(not response.finished for response in responses) / 32)
    assert sum(result.verdicts.values()) == pytest.approx(1)
    assert result.verdicts["correct"] == result.accuracy
    assert not any(special in record["response"] for record in result.responses for special in ("<pad>", "<end>"))


def test_no_problems_is_an_error(judge: RewardFunction) -> None:
    with pytest.raises(ValueError, match="no problems"):
        evaluate(Scripted([]), judge, decode, [], [], 1, Sampling(1.0, 4), seed=0)


def test_the_summary_has_all_but_the_responses() -> None:
    accuracy = Accuracy(0.5, (0.1, 0.9), 2, 1, 1.0, {1: 0.5}, {"correct": 0.5}, 0.0, 3.0, [{"id": "x"}])
    assert accuracy.summary().keys() == Accuracy.__dataclass_fields__.keys() - {"responses"}
    json.dumps(accuracy.summary())


OPTIONS = [
    "data.test_problems=4",
    "data.max_problems=4",
    "data.options.digits=1",
    "rollout.max_response_tokens=8",
    "reward.workers=1",
    "model.device=cpu",
]


def test_the_command_writes_what_it_measures(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    output = tmp_path / "out"
    results = evaluate_model(str(folder), samples=3, overrides=OPTIONS, output=output, console=Console(quiet=True))
    sampled, greedy = results["arithmetic"]["sampled"], results["arithmetic"]["greedy"]
    assert (sampled.samples, greedy.samples) == (3, 1)
    assert greedy.temperature == 0
    assert list(sampled.pass_at_k) == [1, 2]
    written = json.loads((output / "eval.json").read_text())
    assert written["model"] == str(folder)
    assert written["sampled"] == written["results"]["arithmetic"]["sampled"]
    assert written["sampled"]["accuracy"] == sampled.accuracy
    lines = [json.loads(line) for line in (output / "responses.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["sampled"] * 12 + ["greedy"] * 4
    again = evaluate_model(
        str(folder), samples=3, overrides=OPTIONS, output=tmp_path / "again", console=Console(quiet=True)
    )
    assert again == results


def test_a_checkpoint_brings_the_recipe_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step_5"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text("rollout: {temperature: 0.4}\nseed: 7\n")
    recipe = recipe_for(str(checkpoint), None, None, [])
    assert (recipe.rollout.temperature, recipe.seed, recipe.model.name) == (0.4, 7, str(checkpoint))
    assert recipe_for(str(checkpoint), None, None, ["seed=8"]).seed == 8
    monkeypatch.chdir(run)
    assert recipe_for("checkpoints/step_5", None, None, []).seed == 7


@pytest.mark.parametrize("model", ["embedded", "someone/some-model", "models/mine"])
def test_another_config_yaml_in_the_working_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A hub id looks like a path two folders deep, and many projects have a config.yaml."""
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    monkeypatch.chdir(tmp_path)
    assert recipe_for(model, None, None, []).seed == 0


def test_problem_text_is_what_was_asked(judge: RewardFunction) -> None:
    problem = Problem("p", ({"role": "user", "content": "1+2="},), "3")
    result = evaluate(Scripted([["####3$"]]), judge, decode, [problem], [[3]], 1, Sampling(1.0, 9), seed=0)
    assert result.responses[0]["problem"] == "1+2="
    assert result.responses[0]["answer"] == "3"
    assert result.accuracy == 1
