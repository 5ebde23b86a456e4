"""Steps without a difference in reward: a note, and a stop where it is asked for."""

from typing import Any

import pytest

from tepo.errors import TepoError
from tepo.objectives import get_objective
from tepo.train.signal import NOTE_AFTER, SignalWatch


def metrics(step: int, *, active: float = 0.0, equal: float = 1.0) -> dict[str, float]:
    shares = {"groups/all_correct": 0.25, "groups/all_wrong": 0.75, "groups/zero_variance": equal}
    return {"step": float(step), "active_tokens": active} | shares


def test_one_note_a_stretch_and_none_after_a_step_that_teaches() -> None:
    watch = SignalWatch(get_objective("dapo"), None)
    notes = [watch(metrics(step, active=float(step == 5), equal=float(step != 5))) for step in range(1, 3 * NOTE_AFTER)]
    told = [step for step, note in enumerate(notes, start=1) if note]
    assert told == [5 + NOTE_AFTER]
    assert "25% of the prompts all right, 75% all wrong" in str(notes[told[0] - 1])


def test_a_pull_towards_the_reference_is_no_signal_and_entropy_minimisation_is() -> None:
    """GRPO's KL term gives every token a gradient, whatever the rewards."""
    for name, silent in (("grpo", 1), ("em_ft", 0), ("ppo", 0)):
        watch = SignalWatch(get_objective(name), None)
        watch(metrics(1, active=100.0))
        assert watch.silent == silent, name


def test_a_run_stops_where_it_is_asked_to(run: Any) -> None:
    """A task that the policy never solves: answers of ten digits in three tokens."""
    options = ["rollout.max_response_tokens=3", "trainer.steps=20", "evaluation.before=false"]
    with pytest.raises(TepoError, match=r"trainer\.stop_without_signal = 3: .*3 steps in a row.*up to step 3"):
        run(*options, "trainer.stop_without_signal=3")
    _, printed = run(*options, "trainer.steps=8", "evaluation.after=false", output="other")
    assert " ".join(printed.split()).count("no reward to learn from in 8 steps in a row") == 1
