"""From prompts to judged and priced responses: what one rollout gives to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tepo.config.recipe import Recipe
from tepo.data import Problem, PromptStream
from tepo.evaluate.accuracy import judgeable
from tepo.policy import Row
from tepo.rewards.reward import RewardFunction
from tepo.rewards.verdict import Verdict
from tepo.rollout import Engine, Response, Sampling
from tepo.seeds import derive_seed


@dataclass
class Sample:
    """One response, what it earned, and what the policy that sampled it said of its tokens.

    group: index of its prompt within the rollout. The tensors [tokens of the response] are filled by the pass before
    the updates and stay None where the current policy still is the one that sampled, or nothing needs them;
    token_advantages where they vary within a response; selected before each step that chooses tokens.
    """

    problem: Problem
    group: int
    prompt: tuple[int, ...]
    response: Response
    verdict: Verdict
    reward: float
    advantage: float = 0.0
    in_loss: bool = True
    old_logp: Tensor | None = None
    old_entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    target_hidden: Tensor | None = None
    token_advantages: Tensor | None = None
    selected: Tensor | None = None

    @property
    def row(self) -> Row:
        return Row(self.prompt, self.response.ids)


@dataclass
class Rollout:
    """The responses of one rollout, group after group, and measurements of them."""

    index: int
    samples: list[Sample]
    metrics: dict[str, float]

    def minibatch(self, update: int, updates: int) -> list[Sample]:
        """The samples of one of `updates` optimizer steps: every updates-th group, whatever the order of the groups."""
        return [sample for sample in self.samples if sample.group % updates == update]


@dataclass(frozen=True)
class Collector:
    """Samples, judges and prices rollouts.

    render: problem -> prompt token ids; decode: response token ids -> text.
    """

    recipe: Recipe
    stream: PromptStream
    engine: Engine
    reward: RewardFunction
    render: Callable[[Problem], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def collect(self, index: int) -> Rollout:
        """The rollout number `index`: prompts_per_rollout groups of responses_per_prompt responses.

        Under dynamic sampling, groups whose raw accuracy is all right or all wrong are sampled again with other
        prompts, at most max_sampling_rounds times; what is then still missing is filled with such groups.
        """
        trainer = self.recipe.trainer
        kept: list[list[Sample]] = []
        spare: list[list[Sample]] = []
        for round_number in range(trainer.max_sampling_rounds if trainer.dynamic_sampling else 1):
            problems = self.stream.take(trainer.prompts_per_rollout - len(kept))
            for group in self._sample(problems, derive_seed(self.recipe.seed, "rollout", index, round_number)):
                accuracy = sum(sample.verdict.correct for sample in group) / len(group)
                (kept if not trainer.dynamic_sampling or 0 < accuracy < 1 else spare).append(group)
            if len(kept) == trainer.prompts_per_rollout:
                break
        sampled = len(kept) + len(spare)
        missing = trainer.prompts_per_rollout - len(kept)
        groups = kept + spare[len(spare) - missing :]
        for number, group in enumerate(groups):
            for sample in group:
                sample.group = number
        samples = [sample for group in groups for sample in group]
        metrics = _measure(samples, groups)
        if trainer.dynamic_sampling:
            metrics |= {"dynamic_sampling/kept": len(kept) / sampled, "dynamic_sampling/filled": missing / len(groups)}
        return Rollout(index, samples, metrics)

    def _sample(self, problems: Sequence[Problem], seed: int) -> list[list[Sample]]:
        rollout = self.recipe.rollout
        prompts = [tuple(self.render(problem)) for problem in problems]
        sampling = Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p)
        responses = self.engine.generate(prompts, self.recipe.trainer.responses_per_prompt, sampling, seed)
        flat = [
            (problem, prompt, response)
            for problem, prompt, group in zip(problems, prompts, responses, strict=True)
            for response in group
        ]
        judged = self.reward([judgeable(problem, response, self.decode) for problem, _, response in flat])
        samples = [
            Sample(
                problem,
                0,
                prompt,
                response,
                verdict,
                reward,
                in_loss=response.finished or not self.recipe.trainer.overlong_filtering,
            )
            for (problem, prompt, response), verdict, reward in zip(flat, judged.verdicts, judged.rewards, strict=True)
        ]
        count = self.recipe.trainer.responses_per_prompt
        return [samples[i : i + count] for i in range(0, len(samples), count)]


def _measure(samples: list[Sample], groups: list[list[Sample]]) -> dict[str, float]:
    """Means over the responses of a rollout, and shares of its groups."""
    count = len(samples)
    lengths = [len(sample.response.ids) for sample in samples]
    accuracies = [sum(sample.verdict.correct for sample in group) / len(group) for group in groups]
    metrics = {
        "reward": sum(sample.reward for sample in samples) / count,
        "accuracy": sum(accuracies) / len(accuracies),
        "groups/all_correct": sum(accuracy == 1 for accuracy in accuracies) / len(groups),
        "groups/all_wrong": sum(accuracy == 0 for accuracy in accuracies) / len(groups),
        "groups/zero_variance": sum(len({sample.reward for sample in group}) == 1 for group in groups) / len(groups),
        "response/tokens": sum(lengths) / count,
        "response/tokens_max": max(lengths),
        "response/truncated": sum(not sample.response.finished for sample in samples) / count,
    }
    for sample in samples:
        key = f"verdict/{sample.verdict.status}"
        metrics[key] = metrics.get(key, 0.0) + 1 / count
    return metrics
