"""The loop: prompts, responses, verdicts, advantages, updates; readable from top to bottom."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from tepo.config import Recipe
from tepo.data import PromptStream
from tepo.diagnosis import Evidence, Watch
from tepo.errors import TepoError
from tepo.evaluate.accuracy import record as response_record
from tepo.evaluate.session import AUTOCAST, Session
from tepo.objectives import at_rollout
from tepo.objectives.segments import SegmentAdvantage
from tepo.policy import Policy, load_model
from tepo.policy.head import Head
from tepo.rewards.steps import load_process_reward
from tepo.seeds import derive_seed
from tepo.train import checkpoint
from tepo.train.credit import ProcessScorer
from tepo.train.critic import Critic
from tepo.train.display import Display, accuracy_text, final_table
from tepo.train.mismatch import Correction
from tepo.train.run_folder import RunFolder
from tepo.train.sample import Collector, Rollout
from tepo.train.tracker import ValueTracker
from tepo.train.update import Updater, learning_rate_at

SKIPPED_STEPS_LIMIT = 10
"""Steps in a row whose gradient is not finite before a run gives up."""


def train(recipe: Recipe, *, resume: bool = False, console: Console | None = None) -> Path:
    """Run a recipe from start to end, or on from its newest checkpoint. -> the run folder.

    Raises TepoError for whatever in the recipe cannot be used; a new run writes nothing before everything is loaded.
    """
    console = console or Console()
    folder = RunFolder(Path(recipe.output))
    if not resume and (folder.path / "config.yaml").exists():
        folder.create(recipe)  # says what to do
    start = _newest_checkpoint(folder) if resume else None
    if start is not None:
        folder.check_recipe(recipe)
    for tracker in recipe.trackers:
        if importlib.util.find_spec(tracker) is None:  # accelerate would leave it out without a word
            raise TepoError(f"trackers: {tracker} is not installed: pip install 'tepo[{tracker}]'")
    with Session.open(recipe, model=str(start) if start else None) as session:
        if start is None:
            folder.create(recipe)
        Trainer(recipe, session, folder, console).run(start)
    return folder.path


class Trainer:
    """One run. Its whole state is: the model, the optimizer, the step, the place in the data, the rollout in use."""

    def __init__(self, recipe: Recipe, session: Session, folder: RunFolder, console: Console) -> None:
        self.recipe = recipe
        self.session = session
        self.folder = folder
        self.console = console
        self.objective = recipe.objective.build()
        self.accelerator = Accelerator(
            cpu=session.policy.device.type == "cpu",
            log_with=["tensorboard", *recipe.trackers],
            project_dir=folder.path,
        )
        self.updater = Updater(
            session.policy, self.objective, recipe.trainer, self._reference(), backward=self.accelerator.backward,
            critic=self._critic(), process=self._process(), correction=Correction.of(recipe.rollout),
        )  # fmt: skip
        self.tracker = ValueTracker() if "baseline" in self.objective.reads else None
        self.stream = PromptStream(session.train, derive_seed(recipe.seed, "prompts"))
        self.collector = Collector(
            recipe, self.stream, session.engine, session.judge, session.render, session.decode, self.tracker
        )
        self.step = 0
        self.rollout: Rollout | None = None
        self.evaluations: list[dict[str, Any]] = []
        self.watch = Watch(Evidence(recipe, len(session.train), session.dropped, self.evaluations))
        self.skipped = 0
        self.tokens = 0
        self.seconds: dict[str, float] = {}

    def run(self, start: Path | None) -> None:
        """Train up to the recipe's last step; `start` is the checkpoint to go on from."""
        if start is not None:
            self._restore(start)
        self.accelerator.init_trackers(
            "tepo",
            config=_flat(self.recipe.model_dump(mode="json")),
            init_kwargs={name: {"name": self.folder.path.name} for name in self.recipe.trackers},
        )
        config = self.recipe
        self.folder.write_data(len(self.session.train), len(self.session.test), self.session.dropped)
        with Display(self.console, config.trainer.steps, self.step) as display:
            self._introduce(display, start)
            if self.step == 0 and config.evaluation.before:
                self._evaluate(display, greedy=config.evaluation.greedy)
            began, first_token = time.monotonic(), self.tokens
            while self.step < config.trainer.steps:
                metrics = self._one_step()
                self._warn(self.watch.step(metrics), display)
                metrics["tokens_per_second"] = (self.tokens - first_token) / (time.monotonic() - began)
                self._log(metrics, display)
                last = self.step == config.trainer.steps
                if self._due(config.evaluation.every) and not last:
                    self._evaluate(display)
                if self._due(config.checkpoint.every) and not last:
                    self._save()
            if config.evaluation.after:
                self._evaluate(display, greedy=config.evaluation.greedy)
            final = self._save()
        self.accelerator.end_training()
        self._finish(final)

    def _one_step(self) -> dict[str, float]:
        """One optimizer step, after a new rollout if the last one is used up. -> its metrics."""
        updates = self.recipe.trainer.updates_per_rollout
        index, update = divmod(self.step, updates)
        self.seconds = {}
        if update == 0 or self.rollout is None:
            self._new_rollout(index)
        assert self.rollout is not None
        self.updater.objective = at_rollout(self.updater.objective, index + 1)
        samples = self.rollout.minibatch(update, updates)
        torch.manual_seed(derive_seed(self.recipe.seed, "step", self.step))  # for objectives that draw tokens
        with self._timed("update"):
            metrics = self.updater.step(samples, learning_rate_at(self.recipe.trainer, self.step))
        self.step += 1
        self.tokens += sum(len(sample.response.ids) for sample in samples)
        if self.tracker is not None and update == updates - 1:
            # How far the rollout has moved the policy, in nats a response.
            self.tracker.moved += metrics.get("approx_kl", 0.0) * metrics["tokens"] / max(len(samples), 1)
        self._count_skipped(metrics["skipped"])
        times = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        return {"step": self.step, "rollout": index} | self.rollout.metrics | metrics | times

    def _new_rollout(self, index: int) -> None:
        updates = self.recipe.trainer.updates_per_rollout
        with self._timed("weights"):
            self.session.engine.update_weights()
        with self._timed("rollout"):
            self.rollout = self.collector.collect(index)
        self.seconds |= self.collector.seconds
        with self._timed("old_scores"):
            parts = [self.rollout.minibatch(update, updates) for update in range(updates)]
            self.updater.prepare(self.rollout.samples, parts)
        self.folder.write_rollout(
            index,
            (
                response_record(sample.problem, sample.response, sample.verdict, self.session.decode)
                | {"group": sample.group, "reward": sample.reward, "advantage": sample.advantage}
                for sample in self.rollout.samples
            ),
        )

    def _evaluate(self, display: Display, *, greedy: bool = False) -> None:
        """Sampled accuracy, and greedy beside it, into eval.json; responses into evaluations/."""
        entry: dict[str, Any] = {"step": self.step}
        self.session.engine.update_weights()
        for kind in ("sampled", "greedy") if greedy else ("sampled",):
            result = self.session.evaluate(greedy=kind == "greedy")
            entry[kind] = result.summary()
            self.folder.write_responses(f"step_{self.step:06d}_{kind}", result.responses)
        self.evaluations.append(entry)
        self.folder.write_evaluations(self.evaluations)
        greedy_text = f", greedy {accuracy_text(entry['greedy'])}" if greedy else ""
        display.note(f"step {self.step}: held-out accuracy {accuracy_text(entry['sampled'])}{greedy_text}", "bold")
        self.accelerator.log({"eval/accuracy": entry["sampled"]["accuracy"]}, step=self.step)

    def _log(self, metrics: dict[str, float], display: Display) -> None:
        self.folder.append_metrics(metrics)
        self.accelerator.log({key: value for key, value in metrics.items() if key != "step"}, step=self.step)
        display.step(metrics)

    def _warn(self, messages: list[str], display: Display) -> None:
        for message in messages:
            display.note(f"warning: {message}", "yellow")

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _count_skipped(self, skipped: float) -> None:
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped == SKIPPED_STEPS_LIMIT:
            raise TepoError(
                f"the gradient was not finite in {SKIPPED_STEPS_LIMIT} steps in a row, up to step {self.step}; the "
                f"weights are as before them. Lower trainer.learning_rate ({self.recipe.trainer.learning_rate:g}) and "
                "resume from a checkpoint"
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def _reference(self) -> Policy | None:
        """The policy before training, if a term needs it: the model without its adapter, or a frozen second copy."""
        if not self.objective.needs_reference:
            return None
        policy = self.session.policy
        if self.recipe.model.lora:
            return AdapterOff(policy)
        model, tokenizer = load_model(self.recipe.model, trainable=False)
        model.to(policy.device)  # type: ignore[arg-type]
        model.requires_grad_(False)
        return Policy(model, tokenizer, self.recipe.rollout.temperature, AUTOCAST[self.recipe.model.dtype])

    def _critic(self) -> Critic | None:
        """A critic of the policy, if the objective reads its values."""
        if "values" not in self.objective.needs:
            return None
        config = self.recipe.trainer
        rate = config.critic_learning_rate or 10 * config.learning_rate
        return Critic(self.session.policy, rate, config.betas)

    def _process(self) -> ProcessScorer | None:
        """What fills in process rewards, if the objective reads them."""
        advantage, name = self.objective.advantage, self.recipe.reward.process
        if not isinstance(advantage, SegmentAdvantage):
            return None
        name = self.recipe.data.name if name == "auto" else name
        return ProcessScorer(name, load_process_reward(name), advantage, self.session.decode)

    def _introduce(self, display: Display, start: Path | None) -> None:
        recipe, trained = self.recipe, sum(p.numel() for p in self.updater.parameters)
        display.note(
            f"{self.objective.title}\n"
            f"data: {recipe.data.name}, {len(self.session.train):,} problems, {len(self.session.test):,} held out\n"
            f"model: {recipe.model.name}, {trained:,} trained parameters, {recipe.model.dtype} on "
            f"{self.session.policy.device}"
        )
        if start is not None:
            display.note(f"resumed from {start}")
        for reason, count in self.session.dropped.items():
            display.note(f"left out: {count} problems ({reason})", "yellow")
        unpacked = self.session.policy.unpacked_because
        if unpacked is not None:
            display.note(f"note: each prompt is computed once a response and rows are padded: {unpacked}", "yellow")
        for message in self.session.notes:
            display.note(f"note: {message}", "yellow")
        self._warn(self.watch.look(), display)

    def _save(self) -> Path:
        """A checkpoint from which the run goes on exactly as it would have."""
        index = {problem.id: i for i, problem in enumerate(self.session.train)}
        in_use = self.step % self.recipe.trainer.updates_per_rollout != 0 and self.rollout is not None
        old_head = self.updater.old_head
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "stream": self.stream.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "rollout": checkpoint.pack_rollout(self.rollout, index) if in_use and self.rollout else None,
            "old_head": old_head.layer.state_dict() if in_use and old_head else None,
            "terms": self.updater.objective.state,
            "critic": self.updater.critic.state_dict() if self.updater.critic else None,
            "tracker": self.tracker.state_dict() if self.tracker else None,
            "evaluations": self.evaluations,
        }
        policy, keep = self.session.policy, self.recipe.checkpoint.keep
        return checkpoint.save_checkpoint(self.folder.checkpoints, self.step, policy, state, keep)

    def _restore(self, start: Path) -> None:
        """The inverse of `_save`; the weights were loaded with the session."""
        state = checkpoint.load_state(start)
        self.step, self.tokens = state["step"], state["tokens"]
        self.stream.load_state_dict(state["stream"])
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self.evaluations += state["evaluations"]
        self.updater.objective = self.updater.objective.with_state(state["terms"])
        if self.updater.critic is not None:
            self.updater.critic.load_state_dict(state["critic"])
        if self.tracker is not None:
            self.tracker.load_state_dict(state["tracker"])
        if state["rollout"] is not None:
            self.rollout = checkpoint.unpack_rollout(state["rollout"], self.session.train)
        if state["old_head"] is not None:
            head = self.session.policy.head.frozen()
            head.layer.load_state_dict(state["old_head"])
            self.updater.old_head = head
        self.folder.rewind(self.step, (self.step - 1) // self.recipe.trainer.updates_per_rollout)
        for row in self.folder.read_metrics():
            self.watch.evidence.add(row)

    def _finish(self, final: Path) -> None:
        """Before and after, and where everything is."""
        if self.evaluations:
            self.console.print(final_table(self.evaluations))
        places = {
            "model": final,
            "metrics": self.folder.metrics,
            "accuracy": self.folder.evaluation,
            "responses": self.folder.path / "rollouts",
            "curves": f"tensorboard --logdir {self.folder.path}",
        }
        for name, place in places.items():
            self.console.print(f"{name:<10}{place}", markup=False, highlight=False, soft_wrap=True)


class AdapterOff(Policy):
    """The policy of a model with its adapter switched off."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.tokenizer, policy.temperature, policy.autocast)

    @property
    def head(self) -> Head:
        head = super().head
        return dataclasses.replace(head, layer=getattr(head.layer, "base_layer", head.layer))

    def score(self, *args: Any, **kwargs: Any) -> Any:
        adapted: Any = self.model
        with adapted.disable_adapter():
            return super().score(*args, **kwargs)


def _newest_checkpoint(folder: RunFolder) -> Path:
    found = checkpoint.checkpoint_folders(folder.checkpoints)
    if not found:
        raise TepoError(
            f"output = {str(folder.path)!r} has no checkpoint to resume from: a run saves one every "
            "checkpoint.every steps and at the end; start anew without --resume"
        )
    return found[-1]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as dotted keys with values that trackers take."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
