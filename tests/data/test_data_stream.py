"""The order of problems: every problem once an epoch, and exact continuation from a saved state."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.data.problem import Problem
from tepo.data.stream import PromptStream
from tepo.errors import TepoError

PROBLEMS = [Problem(f"p{i}", f"question {i}", str(i)) for i in range(7)]


def test_each_epoch_is_another_permutation() -> None:
    stream = PromptStream(PROBLEMS, seed=0)
    epochs = [[problem.id for problem in stream.take(7)] for _ in range(3)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(7)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (stream.epoch, stream.position) == (3, 0)


def test_the_order_is_fixed_for_ever() -> None:
    """A saved run must meet the same problems after an upgrade."""
    assert [problem.id for problem in PromptStream(PROBLEMS, seed=0).take(7)] == EXPECTED


EXPECTED = ["p4", "p1", "p3", "p5", "p0", "p6", "p2"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 12), max_size=6), after=st.integers(1, 30))
def test_a_restored_stream_goes_on_as_the_first_would_have(seed: int, sizes: list[int], after: int) -> None:
    first = PromptStream(PROBLEMS, seed)
    for size in sizes:
        assert len(first.take(size)) == size
    state = json.loads(json.dumps(first.state_dict()))
    expected = first.take(after)
    second = PromptStream(PROBLEMS, seed)
    second.load_state_dict(state)
    assert second.take(after) == expected
    assert second.state_dict() == first.state_dict()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 9))
def test_the_sizes_of_what_is_taken_do_not_matter(count: int, size: int) -> None:
    whole = PromptStream(PROBLEMS, 1).take(count * size)
    stream = PromptStream(PROBLEMS, 1)
    assert [problem for _ in range(count) for problem in stream.take(size)] == whole


def test_a_state_of_another_run_is_refused() -> None:
    state = PromptStream(PROBLEMS, seed=0).state_dict()
    with pytest.raises(TepoError, match="has seed 0, this run has seed 1"):
        PromptStream(PROBLEMS, seed=1).load_state_dict(state)
    with pytest.raises(TepoError, match="not those of the saved run"):
        PromptStream(PROBLEMS[:-1], seed=0).load_state_dict(state)
    with pytest.raises(TepoError, match="no training problems"):
        PromptStream([], seed=0)
