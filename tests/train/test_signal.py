"""Steps without a difference in reward: a warning, and a stop where it is asked for."""

from typing import Any

import pytest

from tepo.errors import TepoError
from tepo.objectives import get_objective
from tepo.train.signal import SignalWatch


def metrics(step: int, *, active: float = 0.0, equal: float = 1.0) -> dict[str, float]:
    shares = {"groups/all_correct": 0.25, "groups/all_wrong": 0.75, "groups/zero_variance": equal}
    return {"step": float(step), "active_tokens": active} | shares


def test_a_step_that_teaches_starts_the_count_anew() -> None:
    watch = SignalWatch(get_objective("dapo"), 8)
    for step in range(1, 13):
        watch(metrics(step, active=float(step == 5), equal=float(step != 5)))
    with pytest.raises(TepoError, match=r"8 steps in a row, up to step 13: .*25% of the prompts all right, 75% all wr"):
        watch(metrics(13))


def test_a_pull_towards_the_reference_is_no_signal_and_entropy_minimisation_is() -> None:
    """GRPO's KL term gives every token a gradient, whatever the rewards."""
    for name, silent in (("grpo", 1), ("em_ft", 0), ("ppo", 0)):
        watch = SignalWatch(get_objective(name), None)
        watch(metrics(1, active=100.0))
        assert watch.silent == silent, name


def test_a_run_stops_where_it_is_asked_to(run: Any) -> None:
    """A task that the policy never solves: answers of ten digits in three tokens."""
    options = ["rollout.max_response_tokens=3", "trainer.steps=20", "evaluation.before=false"]
    with pytest.raises(TepoError, match=r"trainer\.stop_without_signal = 3: .*3 steps in a row, up to step 3"):
        run(*options, "trainer.stop_without_signal=3")
    _, printed = run(*options, "trainer.steps=8", "evaluation.after=false", output="other")
    assert " ".join(printed.split()).count("The reward is flat: every answer is wrong") == 1
