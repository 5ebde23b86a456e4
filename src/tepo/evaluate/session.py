"""What training and evaluation both work with: a policy, an engine, a task and its judge, from one recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tepo.config import Recipe
from tepo.data import Problem, TaskData, drop_long_prompts, load_task, render_prompt, resolve_template
from tepo.errors import TepoError
from tepo.evaluate.accuracy import Accuracy, evaluate
from tepo.policy import Policy, load_model
from tepo.rewards.reward import RewardFunction
from tepo.rollout import Engine, Sampling, check_engine, open_engine
from tepo.seeds import derive_seed

SHOWN_IDS = 5
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator if there is one. Raises TepoError for a device that is not there."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise TepoError(f"model.device = {name!r} is not available: {str(error).splitlines()[0]}") from error


@dataclass
class Session:
    """A context manager; the judging processes end with it.

    `dropped` counts the problems left out, by reason; `notes` are for a person to read. Training problems whose gold
    answer cannot be read are left out; held-out ones stay, and nothing is correct for them.
    """

    recipe: Recipe
    policy: Policy
    engine: Engine
    task: TaskData
    train: Sequence[Problem]
    test: Sequence[Problem]
    judge: RewardFunction
    dropped: dict[str, int]
    template: str
    notes: tuple[str, ...] = ()
    owns_engine: bool = True

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        *,
        model: str | None = None,
        trainable: bool = True,
        device: torch.device | None = None,
    ) -> Self:
        """Load everything that the recipe names.

        model: loaded in place of its model, to resume from a checkpoint. device: in place of that of its key.

        Raises TepoError for whatever cannot be used, before anything is written.
        """
        task = load_task(recipe.data, recipe.seed, test_only=not trainable)
        device = device or pick_device(recipe.model.device)
        config = recipe.model if model is None else recipe.model.model_copy(update={"name": model})
        loaded, tokenizer = load_model(config, trainable=trainable)
        loaded.to(device)  # type: ignore[arg-type]
        policy = Policy(loaded, tokenizer, recipe.rollout.temperature, AUTOCAST[recipe.model.dtype])
        policy.check_head()
        return cls._on_task(recipe, policy, None, task)

    @classmethod
    def _on_task(cls, recipe: Recipe, policy: Policy, engine: Engine | None, task: TaskData) -> Self:
        """engine: one that is another session's; None opens one."""
        template = resolve_template(task.template, policy.tokenizer)
        limit = _prompt_limit(recipe, policy)
        session = cls(
            recipe, policy, engine or open_engine(recipe, policy, limit), task, task.train, task.test,
            RewardFunction(recipe.reward, task), dict(task.dropped), template, task.notes, engine is None,
        )  # fmt: skip
        try:
            session._check_golds()
            lengths: list[int] = []

            def render(problem: Problem) -> list[int]:
                ids = session.render(problem)
                lengths.append(len(ids))
                return ids

            session.train, long_train = drop_long_prompts(session.train, render, limit)
            session.test, long_test = drop_long_prompts(session.test, render, limit)
            check_engine(recipe, max(length for length in lengths if length <= limit))
        except BaseException:
            session.close()
            raise
        if long_train + long_test:
            session.dropped["prompt too long"] = long_train + long_test
        return session

    def on(self, recipe: Recipe) -> Self:
        """The same policy and engine on the held-out problems of another recipe; a session of its own, to be closed."""
        return self._on_task(recipe, self.policy, self.engine, load_task(recipe.data, recipe.seed, test_only=True))

    def _check_golds(self) -> None:
        for name in ("train", "test"):
            problems = getattr(self, name)
            unreadable = self.judge.unreadable_golds(problems)
            if not unreadable:
                continue
            shown = "; ".join(f"{key}: {reason}" for key, reason in list(unreadable.items())[:SHOWN_IDS])
            more = f"; and {len(unreadable) - SHOWN_IDS} more" if len(unreadable) > SHOWN_IDS else ""
            if name == "train":
                self.train = [problem for problem in problems if problem.id not in unreadable]
                if not self.train:
                    raise TepoError(
                        f"data.name={self.task.name}: no gold answer can be read by reward.verifier="
                        f"{self.judge.verifier} ({shown}{more})"
                    )
                self.dropped[f"gold answers that cannot be read: {shown}{more}"] = len(unreadable)
            else:
                self.notes += (f"nothing is correct for {len(unreadable)} held-out problems, {shown}{more}",)

    def render(self, problem: Problem) -> list[int]:
        """The token ids of a prompt. Raises TepoError for one that the model has no embedding for."""
        ids = render_prompt(problem, self.policy.tokenizer, self.template, self.task.system, self.task.instruction)
        if max(ids) >= self.policy.vocabulary:
            raise TepoError(
                f"model.name = {self.recipe.model.name!r}: its tokenizer makes token {max(ids)} of problem "
                f"{problem.id}, and its vocabulary has {self.policy.vocabulary}; they do not belong together"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response without special tokens."""
        return str(self.policy.tokenizer.decode(list(ids), skip_special_tokens=True))

    def evaluate(self, *, greedy: bool, samples: int | None = None) -> Accuracy:
        """Accuracy on the held-out problems, greedy or sampled as the recipe says."""
        config = self.recipe.evaluation
        temperature = self.recipe.rollout.temperature if config.temperature is None else config.temperature
        limit = self.recipe.rollout.max_response_tokens
        sampling = Sampling(temperature, limit, config.top_p, config.top_k, tuple(self.recipe.rollout.stop))
        if greedy:
            sampling = Sampling(0.0, limit, stop=sampling.stop)
        return evaluate(
            self.engine,
            self.judge,
            self.decode,
            self.test,
            [self.render(problem) for problem in self.test],
            1 if greedy else samples or config.samples,
            sampling,
            # The same seed at every step: before and after differ by the policy alone.
            derive_seed(self.recipe.seed, "evaluation"),
        )

    def close(self) -> None:
        self.judge.close()
        if self.owns_engine:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prompt_limit(recipe: Recipe, policy: Policy) -> int:
    """The longest prompt that leaves room for a whole response. Raises TepoError when there is none."""
    limit = recipe.data.max_prompt_tokens
    context = policy.context_length
    if context is None:
        return limit
    room = context - recipe.rollout.max_response_tokens
    if room < 1:
        raise TepoError(
            f"rollout.max_response_tokens = {recipe.rollout.max_response_tokens}: the model's context holds {context} "
            "tokens, prompt included"
        )
    return min(limit, room)
