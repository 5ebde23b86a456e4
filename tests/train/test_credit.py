"""Process rewards, shared prefixes, the tracked values of prompts, and the critic, as the trainer makes them."""

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo.config import load_recipe
from tepo.data import Problem
from tepo.data.arithmetic import worked_response
from tepo.errors import TepoError
from tepo.evaluate.session import Session
from tepo.objectives.segments import SegmentAdvantage
from tepo.policy import Row
from tepo.rewards.steps import Steps, arithmetic_columns, load_process_reward, score_steps
from tepo.rewards.verdict import Status, Verdict
from tepo.rollout import Response, Sampling
from tepo.train.credit import ProcessScorer, shared_tokens
from tepo.train.critic import Critic
from tepo.train.prefix import cut_point, generate_sharing
from tepo.train.sample import Sample, share_prefix
from tepo.train.value_tracker import ValueTracker

PROBLEM = Problem("p", "482+739=", "1221", info={"a": 482, "b": 739})


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.open(load_recipe("arithmetic", ["reward.workers=1"])) as opened:
        yield opened


def sample(response: str = "ab", **fields: object) -> Sample:
    ids = tuple(range(len(response)))
    made = Response(ids, tuple(-0.5 - i for i in ids), True)
    return Sample(PROBLEM, 0, (7,), made, Verdict(Status.CORRECT, 1.0), 1.0, **fields)  # type: ignore[arg-type]


# What the column checker says of worked additions.


def test_a_right_response_is_right_in_every_step() -> None:
    text = worked_response(482, 739)
    assert text == "2+9=11 8+3+1=12 4+7+1=12 ####1221"
    assert arithmetic_columns([Steps(PROBLEM, (text,))]) == [[1.0]]
    assert arithmetic_columns([Steps(PROBLEM, tuple(text))]) == [[0.5 if letter == " " else 1.0 for letter in text]]


@pytest.mark.parametrize(
    ("steps", "scores"),
    [
        (("2+9=11 ", "8+3=11 ", "4+7+1=12 ####1211"), [1.0, 0.0, 0.5]),
        (("2+9=1", "1 8+3+1=12"), [1.0, 1.0]),
        (("2+9=1", "2 8+3+1=12"), [0.0, 0.5]),
        (("2+9=11 8+", "3+1=13 4+7+1=12"), [0.5, 0.5]),
        (("2+9=11", " ", "8+3+1=12"), [1.0, 0.5, 1.0]),
        (("2+9=11 8+3+1=12 4+7+1=12 ####1221 1+1=2",), [0.8]),
        (("", "nonsense"), [0.5, 0.0]),
    ],
)
def test_columns_are_checked_where_they_stand(steps: tuple[str, ...], scores: list[float]) -> None:
    assert arithmetic_columns([Steps(PROBLEM, steps)]) == [scores]


@given(st.lists(st.text(alphabet="2+9=1 8#\n\u2003", max_size=12), max_size=6))
def test_any_text_gets_one_score_a_step(steps: list[str]) -> None:
    (scores,) = score_steps("arithmetic", arithmetic_columns, [Steps(PROBLEM, tuple(steps))])
    assert len(scores) == len(steps)


@pytest.mark.parametrize("returned", [[[0.5]], [[0.5, 1.5]], [[0.5, float("nan")]], [[0.5, -0.1]]])
def test_scores_that_do_not_fit_are_refused(returned: list[list[float]]) -> None:
    with pytest.raises(TepoError, match=r"reward.process = 'mine:prm' returned .* for a response to p with 2 steps"):
        score_steps("mine:prm", lambda _: returned, [Steps(PROBLEM, ("a", "b"))])


def test_scores_of_another_number_of_responses_are_refused() -> None:
    with pytest.raises(TepoError, match="scores of 2 responses for 1"):
        score_steps("mine:prm", lambda _: [[1.0], [1.0]], [Steps(PROBLEM, ("a",))])


def test_a_model_of_ones_own_is_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_prm.py").write_text(
        "def halves(responses):\n    return [[0.5] * len(r.steps) for r in responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    model = load_process_reward("my_prm:halves")
    assert score_steps("my_prm:halves", model, [Steps(PROBLEM, ("a", "b"))]) == [[0.5, 0.5]]
    with pytest.raises(TepoError, match=r"reward\.process = 'my_prm:halve': 'halve' is not there .* it has halves"):
        load_process_reward("my_prm:halve")
    with pytest.raises(TepoError, match="no such process reward model; allowed are arithmetic, or your own"):
        load_process_reward("arithmetics")


def test_a_scorer_cuts_at_spikes_and_gives_each_token_the_score_of_its_segment() -> None:
    seen: list[Steps] = []

    def model(responses: Sequence[Steps]) -> list[list[float]]:
        seen.extend(responses)
        return [[i / 4 for i in range(len(r.steps))] for r in responses]

    one = sample("abcdefgh")
    one.old_entropy = torch.tensor([9.0, 0, 0, 5, 0, 6, 0, 0])
    ProcessScorer("m", model, SegmentAdvantage(cuts=2, gap=2), lambda ids: "".join("abcdefgh"[i] for i in ids))([one])
    assert seen == [Steps(PROBLEM, ("abc", "de", "fgh"))]
    assert one.process_reward is not None
    assert one.process_reward.tolist() == [0, 0, 0, 0.25, 0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=prpo", "data=gsm8k"], "reward.process is auto: objective prpo needs a process reward model"),
        (["reward.process=mine:prm"], "reward.process is 'mine:prm', which objective tepo does not read"),
    ],
)
def test_a_recipe_without_the_model_it_needs_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(TepoError, match=message):
        load_recipe("arithmetic", overrides)


# Shared prefixes.


@given(st.integers(1, 400), st.integers(0, 10**6))
def test_a_cut_lies_between_a_sixth_and_a_half(length: int, seed: int) -> None:
    cut = cut_point(length, random.Random(seed))
    assert min(length / 6, length // 2) <= cut <= length / 2
    assert cut < length


def test_cuts_are_uniform() -> None:
    draw = random.Random(0)
    counts = Counter(cut_point(24, draw) for _ in range(9000))
    assert set(counts) == set(range(4, 13))
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_responses_of_a_group_share_what_the_policy_began(session: Session) -> None:
    prompts = [session.render(problem) for problem in session.train[:6]]
    sampling = Sampling(1.0, 20)
    groups, cuts = generate_sharing(session.engine, prompts, 5, sampling, 3)
    for prompt, group, cut in zip(prompts, groups, cuts, strict=True):
        assert 3 <= cut <= 10
        assert len({response.ids[:cut] for response in group}) == 1
        with session.policy.evaluating():
            scores = session.policy.score([Row(prompt, response.ids) for response in group])
        sampled = torch.tensor([logp for response in group for logp in response.logps])
        torch.testing.assert_close(scores.logp, sampled, rtol=0, atol=1e-4)
        for response in group:
            assert len(response.ids) <= 20
            assert response.finished == (response.ids[-1] in session.policy.end_tokens)
            assert response.finished or len(response.ids) == 20
    assert any(len({response.ids for response in group}) > 1 for group in groups)
    assert generate_sharing(session.engine, prompts, 5, sampling, 3) == (groups, cuts)


def test_a_prefix_is_scored_once() -> None:
    group = [sample("abcdef"), sample("abcxyz"), sample("abcd")]
    share_prefix(group, 3)
    assert [row.num_tokens for row in group] == [6, 3, 1]
    assert group[0].row == Row((7,), (0, 1, 2, 3, 4, 5))
    assert group[1].row == Row((7, 0, 1, 2), (3, 4, 5))
    assert group[1].sampled_logps == (-3.5, -4.5, -5.5)
    assert shared_tokens(group).tolist() == [True] * 3 + [False] * 7


def test_a_response_out_of_the_loss_does_not_bear_the_prefix() -> None:
    group = [sample(in_loss=False), sample(), sample()]
    share_prefix(group, 1)
    assert [row.shared for row in group] == [0, 1, 0]
    assert [row.prefix for row in group] == [1, 0, 1]


# What prompts earned before.


def test_the_tracker_follows_the_paper() -> None:
    """V <- V + (R - V)/(rho N + 1), N <- rho N + 1, by hand, with a policy that moves by 1 nat, 0 and 8 nats."""
    tracker = ValueTracker()
    assert tracker.baseline("p") is None
    tracker.update("p", 1.0)
    assert tracker.baseline("p") == 1.0
    tracker.moved += 1.0
    tracker.update("p", 0.0)  # rho = 2^(-1/8) = .917004
    assert tracker.baseline("p") == pytest.approx(1 - 1 / 1.917004, abs=1e-6)
    weight = 1.917004
    tracker.update("p", 0.0)  # rho is held at .96
    assert tracker.baseline("p") == pytest.approx((1 - 1 / 1.917004) * (1 - 1 / (0.96 * weight + 1)), abs=1e-6)
    weight = 0.96 * weight + 1
    value = tracker.baseline("p")
    assert value is not None
    tracker.moved += 80.0
    tracker.update("p", 1.0)  # and at .875
    assert tracker.baseline("p") == pytest.approx(value + (1 - value) / (0.875 * weight + 1), abs=1e-6)


def test_a_prompt_never_seen_has_the_mean_of_the_others() -> None:
    tracker = ValueTracker()
    tracker.update("a", 1.0)
    tracker.update("b", 0.5)
    assert tracker.baseline("c") == 0.75


def test_the_state_of_a_tracker_brings_it_back() -> None:
    tracker, other = ValueTracker(), ValueTracker()
    tracker.update("a", 0.25)
    tracker.moved = 2.0
    other.load_state_dict(tracker.state_dict())
    assert other.state_dict() == tracker.state_dict()
    tracker.update("a", 1.0)
    other.update("a", 1.0)
    assert other.baseline("a") == tracker.baseline("a")


# The critic.


def test_a_critic_starts_at_zero_and_learns_what_is_told(session: Session) -> None:
    critic = Critic(session.policy, 1e-3, (0.9, 0.999))
    rows = [Row(session.render(problem), session.render(problem)[:4]) for problem in session.train[:4]]
    wanted = torch.linspace(0, 1, 4).repeat_interleave(4)
    assert critic.values(rows).eq(0).all()
    for _ in range(60):
        critic.optimizer.zero_grad()
        (critic.values(rows) - wanted).square().mean().backward()
        critic.step(1.0, 1.0)
    assert (critic.values(rows) - wanted).abs().max() < 0.15


def test_a_critic_sees_nothing_of_the_token_that_it_values(session: Session) -> None:
    critic = Critic(session.policy, 1e-3, (0.9, 0.999))
    torch.nn.init.normal_(critic.output.weight)
    prompt = session.render(session.train[0])
    one, other = critic.values([Row(prompt, prompt[:3])]), critic.values([Row(prompt, (*prompt[:2], 1))])
    torch.testing.assert_close(one, other)
    changed = critic.values([Row(prompt, (1, *prompt[1:3]))])
    assert one[0].allclose(changed[0])
    assert not one[1].allclose(changed[1])


def test_the_policy_is_not_trained_by_its_critic(session: Session) -> None:
    critic = Critic(session.policy, 1e-2, (0.9, 0.999))
    before = [parameter.clone() for parameter in session.policy.model.parameters()]
    prompt = session.render(session.train[0])
    (critic.values([Row(prompt, prompt[:3])]) - 1).square().sum().backward()
    critic.step(1.0, 1.0)
    after = session.policy.model.parameters()
    assert all(p.grad is None for p in session.policy.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_state_of_a_critic_brings_it_back(session: Session) -> None:
    prompt = session.render(session.train[0])
    rows = [Row(prompt, prompt[:3])]
    critics = [Critic(session.policy, 1e-2, (0.9, 0.999)) for _ in range(2)]

    def learn(critic: Critic) -> None:
        critic.optimizer.zero_grad()
        (critic.values(rows) - 1).square().sum().backward()
        critic.step(1.0, 1.0)

    learn(critics[0])
    critics[1].load_state_dict(copy.deepcopy(critics[0].state_dict()))
    for critic in critics:
        learn(critic)
    assert critics[0].values(rows).equal(critics[1].values(rows))
