"""From prompts to judged and priced responses: what one rollout gives to learn from."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tepo.config.recipe import Recipe
from tepo.data import Problem, PromptStream
from tepo.errors import Diverged
from tepo.evaluate.accuracy import judgeable
from tepo.policy import Row
from tepo.rewards.reward import RewardFunction, reward_metrics
from tepo.rewards.verdict import Verdict
from tepo.rollout import Engine, Response, Sampling
from tepo.seeds import derive_seed
from tepo.train.prefix import generate_sharing
from tepo.train.value_tracker import ValueTracker


@dataclass
class Sample:
    """One response, what it earned, and what the policy that sampled it said of its tokens.

    group: index of its prompt within the rollout. prefix: leading tokens of the response that are given to it, and not
    scored; shared: those of its first scored tokens that the other responses of its group have for a prefix.
    baseline: what responses to its prompt earned before.
    The tensors [scored tokens] are filled by the pass before the updates and stay None where the current policy still
    is the one that sampled, or nothing needs them; token_advantages where they vary within a response; selected before
    each step that chooses tokens.
    """

    problem: Problem
    group: int
    prompt: tuple[int, ...]
    response: Response
    verdict: Verdict
    reward: float
    advantage: float = 0.0
    in_loss: bool = True
    formatted: bool | None = None
    overlong: float = 0.0
    prefix: int = 0
    shared: int = 0
    baseline: float | None = None
    old_logp: Tensor | None = None
    old_entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    target_hidden: Tensor | None = None
    old_values: Tensor | None = None
    process_reward: Tensor | None = None
    token_advantages: Tensor | None = None
    returns: Tensor | None = None
    selected: Tensor | None = None

    @property
    def row(self) -> Row:
        """What is given and what is scored."""
        given = (*self.prompt, *self.response.ids[: self.prefix])
        return Row(given, self.response.ids[self.prefix :])

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return len(self.response.ids) - self.prefix

    @property
    def sampled_logps(self) -> tuple[float, ...]:
        """Log-probs of the scored tokens under which they were sampled."""
        return self.response.logps[self.prefix :]


TENSORS = tuple(field.name for field in dataclasses.fields(Sample) if "Tensor" in str(field.type))
"""The fields of a sample with a value for each of its scored tokens."""


def fill(samples: Sequence[Sample], **values: Tensor) -> None:
    """Set fields of samples from [N, ...] tensors over all their tokens."""
    lengths = [sample.num_tokens for sample in samples]
    for name, value in values.items():
        for sample, part in zip(samples, torch.split(value, lengths), strict=True):
            setattr(sample, name, part.clone())


def stack(samples: Sequence[Sample], name: str) -> Tensor | None:
    """[N, ...] of a field of samples, or None where one of them has none."""
    present = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return torch.cat(present) if len(present) == len(samples) else None


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

    render: problem -> prompt token ids; decode: response token ids -> text. tracker: of what prompts earned before;
    where there is one, the responses of a group share a prefix (SKPO). seconds: what the last rollout took, by part.
    """

    recipe: Recipe
    stream: PromptStream
    engine: Engine
    reward: RewardFunction
    render: Callable[[Problem], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    tracker: ValueTracker | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def collect(self, index: int) -> Rollout:
        """The rollout number `index`: prompts_per_rollout groups of responses_per_prompt responses.

        Under dynamic sampling, groups whose raw accuracy is all right or all wrong are sampled again with other
        prompts, at most max_sampling_rounds times; what is then still missing is filled with such groups.
        """
        trainer = self.recipe.trainer
        self.seconds.clear()
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
        if self.tracker is not None:
            _set_baselines(self.tracker, groups)
        metrics = _measure(samples, groups)
        if trainer.dynamic_sampling:
            metrics |= {"dynamic_sampling/kept": len(kept) / sampled, "dynamic_sampling/filled": missing / len(groups)}
        return Rollout(index, samples, metrics)

    def _sample(self, problems: Sequence[Problem], seed: int) -> list[list[Sample]]:
        rollout = self.recipe.rollout
        prompts = [tuple(self.render(problem)) for problem in problems]
        sampling = Sampling(rollout.temperature, rollout.max_response_tokens, rollout.top_p, stop=tuple(rollout.stop))
        count = self.recipe.trainer.responses_per_prompt
        cuts = [0] * len(prompts)
        began = time.monotonic()
        if self.tracker is None:
            responses = self.engine.generate(prompts, count, sampling, seed)
        else:
            responses, cuts = generate_sharing(self.engine, prompts, count, sampling, seed)
        check_finite(responses)
        flat = [
            (problem, prompt, response)
            for problem, prompt, group in zip(problems, prompts, responses, strict=True)
            for response in group
        ]
        sampled = time.monotonic()
        judged = self.reward([judgeable(problem, response, self.decode) for problem, _, response in flat])
        for part, seconds in (("sampling", sampled - began), ("verdicts", time.monotonic() - sampled)):
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        samples = [
            Sample(
                problem,
                0,
                prompt,
                response,
                verdict,
                reward,
                in_loss=response.finished or not self.recipe.trainer.overlong_filtering,
                formatted=formatted,
                overlong=overlong,
            )
            for (problem, prompt, response), verdict, reward, formatted, overlong in zip(
                flat, judged.verdicts, judged.rewards, judged.formatted, judged.overlong, strict=True
            )
        ]
        made = [samples[i : i + count] for i in range(0, len(samples), count)]
        for group, cut in zip(made, cuts, strict=True):
            share_prefix(group, cut)
        return made


def check_finite(groups: Sequence[Sequence[Response]]) -> None:
    """Raise Diverged for responses that were drawn from what are no probabilities."""
    responses = [response for group in groups for response in group]
    broken = sum(math.isnan(sum(response.logps)) for response in responses)
    if broken:
        raise Diverged(
            f"the policy's probabilities are not numbers in {broken} of {len(responses)} responses: its weights have "
            "diverged. Go on from a checkpoint before that, with a lower trainer.learning_rate: --resume CHECKPOINT "
            "--allow-changes trainer.learning_rate=..."
        )


def share_prefix(group: Sequence[Sample], cut: int) -> None:
    """The first `cut` tokens of all responses are one prefix: scored once, with the first that is in the loss."""
    bearer = next((sample for sample in group if sample.in_loss), group[0])
    for sample in group:
        sample.prefix, sample.shared = (0, cut) if sample is bearer else (cut, 0)


def _set_baselines(tracker: ValueTracker, groups: list[list[Sample]]) -> None:
    """What each prompt earned in earlier rollouts; then what it earned in this one is kept."""
    means = [sum(sample.reward for sample in group) / len(group) for group in groups]
    overall = sum(means) / len(means)
    for group in groups:
        known = tracker.baseline(group[0].problem.id)
        for sample in group:
            sample.baseline = overall if known is None else known
    for group, mean in zip(groups, means, strict=True):
        tracker.update(group[0].problem.id, mean)


def _measure(samples: list[Sample], groups: list[list[Sample]]) -> dict[str, float]:
    """Means over the responses of a rollout, and shares of its groups."""
    count = len(samples)
    lengths = [len(sample.response.ids) for sample in samples]
    accuracies = [sum(sample.verdict.correct for sample in group) / len(group) for group in groups]
    earned = reward_metrics(
        [sample.verdict for sample in samples],
        [sample.reward for sample in samples],
        [sample.formatted for sample in samples],
        [sample.overlong for sample in samples],
    )
    return earned | {
        "groups/all_correct": sum(accuracy == 1 for accuracy in accuracies) / len(groups),
        "groups/all_wrong": sum(accuracy == 0 for accuracy in accuracies) / len(groups),
        "groups/zero_variance": sum(len({sample.reward for sample in group}) == 1 for group in groups) / len(groups),
        "response/tokens": sum(lengths) / count,
        "response/tokens_max": max(lengths),
        "response/truncated": sum(not sample.response.finished for sample in samples) / count,
    }
