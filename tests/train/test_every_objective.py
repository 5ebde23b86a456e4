"""Every objective of the table trains the embedded model: twenty steps, and the right direction."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tepo.config import load_recipe
from tepo.evaluate.session import Session
from tepo.objectives import list_objectives
from tepo.train import Trainer
from tepo.train.run_folder import RunFolder
from tepo.train.sample import Sample

SMALL = [
    "trainer.steps=20",
    "trainer.prompts_per_rollout=8",
    "trainer.responses_per_prompt=4",
    "trainer.updates_per_rollout=2",
    "trainer.warmup_steps=0",
    "trainer.schedule=constant",
    "data.test_problems=4",
    "checkpoint.every=null",
    "evaluation.every=null",
    "evaluation.before=false",
    "evaluation.after=false",
    "reward.workers=1",
]


@pytest.fixture(scope="module")
def opened() -> Iterator[Session]:
    """One session for all: judging workers and data; the weights are put back for each objective."""
    with Session.open(load_recipe("arithmetic", SMALL)) as session:
        yield session


@pytest.fixture
def session(opened: Session) -> Iterator[Session]:
    before = {name: value.clone() for name, value in opened.policy.model.state_dict().items()}
    yield opened
    opened.policy.model.load_state_dict(before)


def start(session: Session, tmp_path: Path, objective: str, *overrides: str) -> tuple[Trainer, RunFolder]:
    recipe = load_recipe("arithmetic", [*SMALL, f"objective={objective}", f"output={tmp_path / 'run'}", *overrides])
    folder = RunFolder(tmp_path / "run")
    folder.create(recipe)
    return Trainer(recipe, session, folder, Console(file=io.StringIO())), folder


@pytest.mark.parametrize("objective", list_objectives())
def test_twenty_steps_without_nan(session: Session, tmp_path: Path, objective: str) -> None:
    trainer, folder = start(session, tmp_path, objective, "trainer.learning_rate=1e-4")
    trainer.run(None)
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 21))
    for record in records:
        assert all(math.isfinite(value) for value in record.values()), record
        assert record["skipped"] == 0
    assert sum(record["grad_norm"] > 0 for record in records) > 10
    assert all(parameter.isfinite().all() for parameter in session.policy.model.parameters())


def score(trainer: Trainer, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [N] of the scored tokens under the current policy."""
    with trainer.session.policy.evaluating():
        scores = trainer.session.policy.score([sample.row for sample in samples])
    return scores.logp, scores.entropy


@pytest.mark.parametrize("objective", list_objectives())
def test_a_small_step_goes_the_right_way(session: Session, tmp_path: Path, objective: str) -> None:
    """The log-probs of what has a positive advantage rise, less those of what has a negative one.

    EM-FT knows no rewards: the entropy falls.
    """
    trainer, _ = start(session, tmp_path, objective, "trainer.updates_per_rollout=1", "trainer.prompts_per_rollout=16")
    rollout = trainer.collector.collect(0)
    trainer.updater.prepare(rollout.samples, [rollout.samples])
    samples = [sample for sample in rollout.samples if trainer.updater.contributes(sample)]
    advantages = torch.cat(
        [
            torch.full((sample.num_tokens,), sample.advantage) / sample.num_tokens
            if sample.token_advantages is None
            else sample.token_advantages / sample.num_tokens
            for sample in samples
        ]
    )
    logp, entropy = score(trainer, samples)
    trainer.updater.step(rollout.samples, 1e-6)
    new_logp, new_entropy = score(trainer, samples)
    if objective == "em_ft":
        assert new_entropy.mean() < entropy.mean()
    else:
        assert (advantages * (new_logp - logp)).sum() > 0
