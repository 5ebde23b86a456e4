"""The loop: prompts, responses, verdicts, advantages, updates; readable from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from tepo.config import Recipe
from tepo.data import PromptStream
from tepo.diagnosis import Evidence, Watch
from tepo.errors import Diverged, Stopped, TepoError
from tepo.evaluate.accuracy import record as response_record
from tepo.evaluate.session import Session
from tepo.objectives import at_rollout
from tepo.seeds import derive_seed
from tepo.train.checkpoint import Retention, best_checkpoint, checkpoints, read_state
from tepo.train.display import Display, accuracy_text, final_table
from tepo.train.mismatch import Correction
from tepo.train.parts import critic, process_scorer, reference_policy
from tepo.train.random_state import random_state, seed_all, set_random_state
from tepo.train.ranks import Ranks
from tepo.train.resume import Start, begin_again, put_newer_aside
from tepo.train.run_folder import CLOCK, RunFolder
from tepo.train.sample import Collector, Rollout, Sample
from tepo.train.signal import SignalWatch
from tepo.train.state import capture, restore
from tepo.train.stopping import BrokenOff, StopSignals
from tepo.train.tokens import RolloutTokens
from tepo.train.trackers import Trackers, check_installed
from tepo.train.update import Updater, learning_rate_at
from tepo.train.value_tracker import ValueTracker
from tepo.train.writer import CheckpointWriter


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    checkpoint: Path | None = None,
    allow_changes: bool = False,
    console: Console | None = None,
) -> Path:
    """Run a recipe from start to end, or go on with the run in its output folder. -> the run folder.

    resume: from the newest whole checkpoint, or from `checkpoint`. allow_changes: also where the recipe is no longer
    that of the run in a way that matters.

    Raises TepoError for whatever in the recipe cannot be used; a new run writes nothing before everything is loaded.
    Raises Stopped when a signal ended the run before its last step; it is saved.
    """
    ranks = Ranks.start(recipe.model.device)
    console = (console or Console()) if ranks.writer else Console(quiet=True)
    folder = ranks.folder(Path(recipe.output))
    check_installed(recipe.trackers)

    def begin() -> Start | None:
        if not resume:
            folder.refuse_to_write_over()
        return begin_again(folder, recipe, checkpoint, allow_changes) if resume else None

    try:
        start = ranks.on_writer(begin)
        seed_all(derive_seed(recipe.seed, "global"))
        with ranks.open(recipe, model=str(start.checkpoint) if start and start.checkpoint else None) as session:
            trainer = Trainer(recipe, session, folder, console, ranks)
            if start is None:
                ranks.on_writer(lambda: folder.create(recipe))
            trainer.run(start)
    finally:
        folder.lock.release()
    return folder.path


EVALUATED = {"accuracy": "sampled", "greedy_accuracy": "greedy"}
"""What `checkpoint.best` calls the held-out accuracies, behind `eval/`, and what eval.json does."""

SHOWN = 5
"""Responses of a skipped step that are named on the screen."""


class Trainer:
    """One run. Its whole state is: the model, the optimizer, the step, the place in the data, the rollout in use."""

    def __init__(
        self, recipe: Recipe, session: Session, folder: RunFolder, console: Console, ranks: Ranks | None = None
    ) -> None:
        self.recipe = recipe
        self.session = session
        self.folder = folder
        self.console = console
        self.ranks = ranks or Ranks()
        self.objective = recipe.objective.build()
        self.accelerator = Accelerator(cpu=session.policy.device.type == "cpu")
        self.updater = Updater(
            session.policy, self.objective, recipe.trainer, reference_policy(recipe, session),
            backward=self.accelerator.backward, critic=critic(recipe, session), process=process_scorer(recipe, session),
            correction=Correction.of(recipe.rollout), ranks=self.ranks,
        )  # fmt: skip
        self.tracker = ValueTracker() if "baseline" in self.objective.reads else None
        self.stream = PromptStream(session.train, derive_seed(recipe.seed, "prompts"))
        self.collector = Collector(
            recipe, self.stream, session.engine, session.judge, session.render, session.decode, self.tracker
        )
        self.step = 0
        self.rollout: Rollout | None = None
        self.evaluations: list[dict[str, Any]] = []
        self.skipped = {"in_a_row": 0, "in_all": 0}
        self.watch = Watch(Evidence(recipe, len(session.train), session.dropped, self.evaluations))
        self.signal_watch = SignalWatch(self.objective, recipe.trainer.stop_without_signal)
        self.tokens = 0
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.signals = StopSignals(breaks=self.ranks.size == 1)
        config = recipe.checkpoint
        self.writer = CheckpointWriter(
            folder.checkpoints,
            Retention(config.keep, config.best, config.smaller_is_better),
            config.background,
            self._warn,
        )

    def run(self, start: Start | None) -> None:
        """Train up to the recipe's last step; `start` says where to go on. Raises Stopped when a signal came."""
        notes = [] if start is None else self._go_on(start)
        self.folder.write_data(len(self.session.train), len(self.session.test), self.session.dropped)
        steps = self.recipe.trainer.steps
        self.display = Display(self.console, steps, self.step)
        self.trackers = Trackers(self.folder if self.ranks.writer else None, self.recipe, self.step, self._warn)
        with self.display, self.signals, closing(self.trackers), closing(self.writer):
            self._introduce(start, notes)
            with suppress(BrokenOff):
                self._train()
            final = self._save_at_the_end()
        if self.step < steps or self._evaluation_is_due():
            stopped = Stopped(f"stopped after step {self.step} of {steps}; {final} is saved, --resume goes on from it")
            stopped.told_here = self.ranks.writer
            raise stopped
        self._finish(final)

    def _warn(self, message: str) -> None:
        self.display.note(f"warning: {message}", "yellow")

    def _train(self) -> None:
        began, first_token = time.monotonic(), self.tokens
        while True:
            if self._evaluation_is_due():
                self._evaluate()
            if self.step == self.recipe.trainer.steps or self.ranks.any(self.signals.requested):
                return
            if self._due(self.recipe.checkpoint.every):
                self._save()
            metrics = self._one_step()
            metrics["tokens_per_second"] = (self.tokens - first_token) / (time.monotonic() - began)
            self._log(metrics)
            self.writer.poll()
            with self._saved_if_it_fails():
                self._diagnose(metrics)
                self._stop_after_too_many_skipped()
                self.signal_watch(metrics)

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
        keep = self.recipe.rollout.save_tokens
        if update == 0 and keep is not None and index % keep == 0:
            self.folder.write_tokens(index, RolloutTokens.of(self.rollout.samples))
        self.step += 1
        self.tokens += sum(len(sample.response.ids) for sample in samples)
        self._count_skipped(metrics, index)
        if self.tracker is not None and update == updates - 1 and not metrics["skipped"]:
            # How far the rollout has moved the policy, in nats a response.
            self.tracker.moved += metrics.get("approx_kl", 0.0) * metrics["tokens"] / max(len(samples), 1)
        times = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        return {"step": self.step, "rollout": index} | self.rollout.metrics | metrics | times

    def _new_rollout(self, index: int) -> None:
        updates = self.recipe.trainer.updates_per_rollout
        with self._undone_if_it_fails():
            with self._timed("weights"):
                self.session.engine.update_weights()
            with self._timed("rollout"):
                rollout = self.collector.collect(index)
            self.seconds |= self.collector.seconds
            with self._timed("old_scores"):
                parts = [rollout.minibatch(update, updates) for update in range(updates)]
                self.updater.prepare(rollout.samples, parts)
            self.folder.write_rollout(index, map(self._record, rollout.samples))
        self.rollout = rollout

    def _record(self, sample: Sample) -> dict[str, Any]:
        """A sample as it is written down."""
        answer = response_record(sample.problem, sample.response, sample.verdict, self.session.decode)
        return answer | {"group": sample.group, "reward": sample.reward, "advantage": sample.advantage}

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """For what comes between two updates: broken off or failed, the run is as it stood before."""
        stream, random = self.stream.state_dict(), random_state()
        tracker = self.tracker.state_dict() if self.tracker else None
        with self._saved_if_it_fails():
            try:
                with self.signals.breakable():
                    yield
            except BaseException:
                self.stream.load_state_dict(stream)
                set_random_state(random)
                if self.tracker is not None and tracker is not None:
                    self.tracker.load_state_dict(tracker)
                raise

    @contextmanager
    def _saved_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.step and not isinstance(error, Diverged):
                self._save()
                self.writer.wait()
                if self.writer.newest == self.step:
                    self.display.note(f"step {self.step} was saved before the error; --resume goes on from it")
            raise

    def _evaluation_is_due(self) -> bool:
        """At this step, and not made yet."""
        config, last = self.recipe.evaluation, self.recipe.trainer.steps
        made = bool(self.evaluations) and self.evaluations[-1]["step"] == self.step
        wanted = {0: config.before, last: config.after}.get(self.step, self._due(config.every))
        return wanted and not made

    def _evaluate(self) -> None:
        """Sampled accuracy, and greedy beside it at both ends, into eval.json; responses into evaluations/."""
        at_an_end = self.step in (0, self.recipe.trainer.steps)
        kinds = ("sampled", "greedy") if at_an_end and self.recipe.evaluation.greedy else ("sampled",)
        entry: dict[str, Any] = {"step": self.step}
        with self._undone_if_it_fails():
            self.session.engine.update_weights()
            for kind in kinds:
                result = self.session.evaluate(greedy=kind == "greedy")
                entry[kind] = result.summary()
                self.folder.write_responses(f"step_{self.step:06d}_{kind}", result.responses)
        self.evaluations.append(entry)
        self.folder.write_evaluations(self.evaluations)
        greedy = f", greedy {accuracy_text(entry['greedy'])}" if "greedy" in entry else ""
        self.display.note(f"step {self.step}: held-out accuracy {accuracy_text(entry['sampled'])}{greedy}", "bold")
        self.trackers.log({"eval/accuracy": entry["sampled"]["accuracy"]}, self.step)

    def _log(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        self.folder.append_metrics(metrics)
        self.trackers.log({key: value for key, value in metrics.items() if key != "step"}, self.step)
        self.display.step(metrics)

    def _diagnose(self, metrics: dict[str, float] | None = None) -> None:
        """Warn of what is wrong since this step, or by the recipe, the data and the steps so far."""
        if self.ranks.writer:
            for message in self.watch.look() if metrics is None else self.watch.step(metrics):
                self._warn(message)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step > 0 and self.step % every == 0

    def _count_skipped(self, metrics: dict[str, float], rollout: int) -> None:
        """And write down and say which responses it was, where a step was skipped."""
        skipped = bool(metrics["skipped"])
        in_a_row = self.skipped["in_a_row"] + 1 if skipped else 0
        self.skipped = {"in_a_row": in_a_row, "in_all": self.skipped["in_all"] + skipped}
        metrics["skipped_in_all"] = self.skipped["in_all"]
        if not skipped:
            return
        blamed = self.updater.blamed
        self.folder.append_skipped(
            {"step": self.step, "rollout": rollout, "loss": entry.loss, "grad_norm": entry.grad_norm,
             "alone": entry.alone} | self._record(entry.sample)
            for entry in blamed
        )  # fmt: skip
        ids = ", ".join(dict.fromkeys(entry.sample.problem.id for entry in blamed[:SHOWN]))
        more = ", ..." if len(blamed) > SHOWN else ""
        self._warn(
            f"step {self.step} was skipped, its loss or gradient is not finite ({self.skipped['in_all']} so far); "
            f"responses that make it so: {len(blamed)} (problems {ids}{more}): {self.folder.skipped}"
        )

    def _stop_after_too_many_skipped(self) -> None:
        in_a_row = self.skipped["in_a_row"]
        if in_a_row >= self.recipe.trainer.skip_limit:
            raise TepoError(
                f"the loss or gradient was not finite in {in_a_row} steps in a row (trainer.skip_limit), "
                f"up to step {self.step}; the weights are as before them, and {self.folder.skipped} has the responses. "
                f"A lower trainer.learning_rate ({self.recipe.trainer.learning_rate:g}) may help: --resume CHECKPOINT "
                "--allow-changes trainer.learning_rate=..."
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def _introduce(self, start: Start | None, notes: Sequence[str]) -> None:
        recipe, display, trained = self.recipe, self.display, sum(p.numel() for p in self.updater.parameters)
        display.note(
            f"{self.objective.title}\n"
            f"data: {recipe.data.name}, {len(self.session.train):,} problems, {len(self.session.test):,} held out\n"
            f"model: {recipe.model.name}, {trained:,} trained parameters, {recipe.model.dtype} on "
            f"{self.session.policy.device}"
        )
        if start is not None:
            display.note(f"resumed from {start.checkpoint or 'the start'}")
        for reason, count in self.session.dropped.items():
            display.note(f"left out: {count} problems ({reason})", "yellow")
        unpacked = self.session.policy.unpacked_because
        if unpacked is not None:
            display.note(f"note: each prompt is computed once a response and rows are padded: {unpacked}", "yellow")
        for message in (*notes, *self.session.notes):
            display.note(f"note: {message}", "yellow")
        self._diagnose()

    def _save(self) -> None:
        """Begin to write a checkpoint of this step, from which the run goes on exactly as it would have."""
        self.writer.wait()
        if self.writer.newest == self.step or not self.ranks.writer:
            return
        self.folder.sync()
        policy = self.session.policy
        metrics = {name: value for name, value in self.metrics.items() if not name.startswith(CLOCK)}
        if self.evaluations and self.evaluations[-1]["step"] == self.step:
            entry = self.evaluations[-1]
            metrics |= {f"eval/{name}": entry[kind]["accuracy"] for name, kind in EVALUATED.items() if kind in entry}
        self.writer.save(self.step, policy.model, policy.tokenizer, capture(self), metrics)

    def _save_at_the_end(self) -> Path:
        """-> the checkpoint. Raises TepoError when it cannot be written: the run would be lost with it."""
        self._save()
        self.writer.close()
        if self.ranks.any(self.ranks.writer and self.writer.newest != self.step):
            raise TepoError(
                f"the last checkpoint, of step {self.step}, cannot be written; make room and go on with --resume: "
                "the checkpoints before it are whole"
            )
        return self.folder.checkpoints / f"step_{self.step}"

    def _go_on(self, start: Start) -> list[str]:
        """Take the state of a checkpoint (the weights were loaded with the session). -> what to tell of it."""
        notes = [*start.notes, *(put_newer_aside(self.folder, start) if self.ranks.writer else [])]
        if start.checkpoint is not None:
            notes += restore(self, read_state(start.checkpoint), start.changes)
            self.writer.newest = self.step
        self.folder.rewind(self.step, (self.step - 1) // self.recipe.trainer.updates_per_rollout, self.evaluations)
        for row in self.folder.read_metrics() if self.ranks.writer else ():
            self.watch.evidence.add(row)
        return [*notes, *self.folder.take_up(self.recipe, self.step, list(start.changes.values()))]

    def _finish(self, final: Path) -> None:
        """Before and after, and where everything is."""
        best = best_checkpoint(checkpoints(self.folder.checkpoints), self.writer.retention)
        if self.evaluations:
            self.console.print(final_table(self.evaluations))
        places = {
            "model": final,
            **({"best": best} if best else {}),
            "metrics": self.folder.metrics,
            "accuracy": self.folder.evaluation,
            "responses": self.folder.path / "rollouts",
            "curves": f"tensorboard --logdir {self.folder.path}",
        }
        for name, place in places.items():
            self.console.print(f"{name:<10}{place}", markup=False, highlight=False, soft_wrap=True)
