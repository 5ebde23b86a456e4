"""One optimizer step: invariant to micro-batches and to exact dropping, with the right denominators."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo.config import load_recipe
from tepo.config.recipe import TrainerConfig
from tepo.data import PromptStream
from tepo.evaluate.session import Session
from tepo.objectives import get_objective
from tepo.objectives.segments import SegmentAdvantage
from tepo.policy import Row, load_model
from tepo.policy.policy import Policy
from tepo.rewards.steps import arithmetic_columns
from tepo.train.credit import ProcessScorer
from tepo.train.critic import Critic
from tepo.train.microbatch import plan_microbatches
from tepo.train.sample import TENSORS, Collector, Rollout, Sample
from tepo.train.update import Updater, learning_rate_at
from tepo.train.value_tracker import ValueTracker

CONFIG = TrainerConfig(steps=8, prompts_per_rollout=8, responses_per_prompt=4, updates_per_rollout=2)
OBJECTIVES = {
    "tepo": get_objective("tepo", kl_mask={"beta": 0.5}),
    "tepo-masked": get_objective("tepo", kl_mask={"beta": 0.5, "normalizer": "masked"}),
    "tepo-exact": get_objective("tepo", kl_mask={"beta": 0.5, "estimator": "exact"}),
    "tepo-first-order": get_objective("tepo", kl_mask={"beta": 0.5, "entropy_test": "first_order"}),
    "grpo": get_objective("grpo"),
    "dr_grpo": get_objective("dr_grpo", length_normalizer=48),
    "dapo-bonus": get_objective("dapo", entropy_bonus=0.01),
    "gspo": get_objective("gspo"),
    "forking": get_objective("forking_tokens"),
    "kl_cov": get_objective("kl_cov", share=0.1),
    "aent": get_objective("aent"),
    "gtpo": get_objective("gtpo"),
    "em_rl_token": get_objective("em_rl_token"),
    "em_ft": get_objective("em_ft"),
    "policy_kl": get_objective("policy_kl"),
    "ppo": get_objective("ppo"),
    "ppo-reward-kl": get_objective("ppo", reward_kl=0.05),
    "prpo": get_objective("prpo", gap=4),
    "skpo": get_objective("skpo"),
    "dpo": get_objective("dpo"),
    "orpo": get_objective("orpo"),
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    recipe = load_recipe(
        "arithmetic", ["trainer.prompts_per_rollout=8", "trainer.responses_per_prompt=4", "reward.workers=1"]
    )
    with Session.open(recipe) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain_rollout(session: Session) -> Rollout:
    return collect(session)


@pytest.fixture(scope="module")
def sharing_rollout(session: Session) -> Rollout:
    return collect(session, tracker=ValueTracker())


@pytest.fixture
def rollout(request: pytest.FixtureRequest) -> Rollout:
    """One whose responses share prefixes for the objective that has them."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    made: Rollout = request.getfixturevalue("sharing_rollout" if name == "skpo" else "plain_rollout")
    return made


def collect(session: Session, index: int = 0, tracker: ValueTracker | None = None) -> Rollout:
    stream = PromptStream(session.train, 0)
    parts = (session.engine, session.judge, session.render, session.decode)
    return Collector(session.recipe, stream, *parts, tracker).collect(index)


def updater(session: Session, name: str, **config: object) -> Updater:
    """An updater of a fresh copy of the embedded model in float64, moved away from the policy that sampled."""
    model, tokenizer = load_model(session.recipe.model)
    reference, _ = load_model(session.recipe.model)
    frozen = Policy(reference.double().requires_grad_(False), tokenizer)
    policy, objective = Policy(model.double(), tokenizer), OBJECTIVES[name]
    critic = process = None
    if "values" in objective.needs:
        critic = Critic(policy, 1e-3, (0.9, 0.999))
        torch.manual_seed(2)
        torch.nn.init.normal_(critic.output.weight)
    if isinstance(objective.advantage, SegmentAdvantage):
        process = ProcessScorer("arithmetic", arithmetic_columns, objective.advantage, session.decode)
    return Updater(policy, objective, CONFIG.model_copy(update=config), frozen, critic=critic, process=process)


def trained(made: Updater) -> list[torch.nn.Parameter]:
    """The parameters of the policy, and of the critic if there is one."""
    return [*made.parameters, *(made.critic.trained.values() if made.critic else ())]


def gradient(made: Updater, samples: list[Sample]) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of a step and its gradient before clipping, from a step whose optimizer only records."""
    recorded: list[torch.Tensor] = []

    def record(*_: object, **__: object) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained(made)]
        recorded.append(torch.cat([grad.flatten() for grad in grads]))

    made.optimizer.step = record  # type: ignore[method-assign]
    metrics = made.step(samples, 1e-4)
    return metrics, recorded[0]


def prepare(made: Updater, rollout: Rollout) -> list[Sample]:
    """Samples with old scores, and a policy that is no longer the one that made them."""
    for sample in rollout.samples:
        for field in TENSORS:
            setattr(sample, field, None)
    made.prepare(rollout.samples, [[], rollout.samples])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained(made):
            parameter.add_(0.002 * torch.randn_like(parameter))
    return rollout.samples


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_does_not_depend_on_its_microbatches(session: Session, rollout: Rollout, name: str) -> None:
    """verl issues 5625, 7321 and 7829, through the whole trainer: scores, totals, statistics and backward."""
    results = []
    for budget in (100_000, 300, 1):
        made = updater(session, name, tokens_per_microbatch=budget, max_grad_norm=1e9)
        results.append(gradient(made, prepare(made, rollout)))
    (whole_metrics, whole), *others = results
    assert whole.norm() > 0
    for metrics, split in others:
        # Where a group is split, the norms, which Llama computes in fp32, see the gradients of its prompt in parts.
        assert (split - whole).norm() <= 1e-7 * whole.norm()
        for key in ("loss", "clip_fraction", "approx_kl", "entropy"):
            assert metrics[key] == pytest.approx(whole_metrics[key], rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("name", OBJECTIVES)
def test_leaving_out_what_has_no_gradient_is_exact(
    session: Session, rollout: Rollout, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = updater(session, name, max_grad_norm=1e9)
    samples = prepare(made, rollout)
    if not OBJECTIVES[name].touches_zero_advantage:
        assert not all(made.contributes(sample) for sample in samples)
    dropped, small = gradient(made, samples)
    made = updater(session, name, max_grad_norm=1e9)
    monkeypatch.setattr(Updater, "contributes", lambda self, sample: True)
    kept, full = gradient(made, prepare(made, rollout))
    assert (small - full).norm() <= 1e-9 * full.norm()
    assert dropped["tokens"] == kept["tokens"]
    if not OBJECTIVES[name].touches_zero_advantage:
        assert dropped["active_tokens"] < kept["active_tokens"]


def test_filtered_responses_are_in_no_denominator(session: Session, rollout: Rollout) -> None:
    """Truncated responses that are masked must not be counted (TRL issue 6369)."""
    made = updater(session, "tepo", max_grad_norm=1e9)
    samples = prepare(made, rollout)
    out = samples[::5]
    for sample in out:
        sample.in_loss = False
    try:
        metrics, masked = gradient(made, samples)
        kept = [sample for sample in samples if sample.in_loss]
        _, without = gradient(made, kept)
    finally:
        for sample in out:
            sample.in_loss = True
    assert metrics["tokens"] == sum(len(sample.response.ids) for sample in kept)
    assert torch.equal(masked, without)


def test_a_step_without_any_signal_changes_nothing_but_counts(session: Session, rollout: Rollout) -> None:
    """Everything masked gives zero, not NaN (TRL PRs 3248, 5826)."""
    made = updater(session, "tepo")
    silent = [sample for sample in prepare(made, rollout) if sample.advantage == 0]
    before = [parameter.clone() for parameter in made.parameters]
    metrics = made.step(silent, 1e-4)
    assert metrics["grad_norm"] == 0
    assert metrics["tokens"] > 0
    assert metrics["active_tokens"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))


def test_a_gradient_that_is_not_finite_is_skipped(session: Session, rollout: Rollout) -> None:
    made = updater(session, "tepo")
    samples = prepare(made, rollout)
    before = [parameter.clone() for parameter in made.parameters]
    made.backward = lambda loss: (loss * float("nan")).backward()
    metrics = made.step(samples, 1e-4)
    assert metrics["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))


def test_a_small_step_raises_the_logprob_of_rewarded_responses(session: Session, rollout: Rollout) -> None:
    made = updater(session, "tepo")
    for sample in rollout.samples:
        sample.old_logp = sample.old_entropy = None
    made.prepare(rollout.samples, [rollout.samples])
    good = [sample for sample in rollout.samples if sample.advantage > 0]
    bad = [sample for sample in rollout.samples if sample.advantage < 0]

    def mean_logp(samples: list[Sample]) -> float:
        with torch.no_grad():
            return float(made.policy.score([sample.row for sample in samples]).logp.mean())

    before = mean_logp(good), mean_logp(bad)
    made.step(rollout.samples, 1e-5)
    after = mean_logp(good), mean_logp(bad)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_sampling_logprobs_agree_with_recomputed_ones(session: Session, rollout: Rollout) -> None:
    sampled = torch.tensor([logp for sample in rollout.samples for logp in sample.response.logps])
    with session.policy.evaluating():
        scores = session.policy.score([sample.row for sample in rollout.samples])
    assert (scores.logp - sampled).abs().max() < 1e-4


def test_groups_are_filtered_on_accuracy_not_on_reward(session: Session) -> None:
    """Dynamic sampling (NeMo-RL issue 2431): a shaped reward varies in groups that teach nothing."""
    overrides = ["trainer.dynamic_sampling=true", "trainer.prompts_per_rollout=8", "trainer.responses_per_prompt=4"]
    shaped = load_recipe("arithmetic", [*overrides, "reward.overlong.max_length=48", "reward.overlong.cache=40"])
    stream = PromptStream(session.train, 0)
    with Session.open(shaped) as opened:
        collector = Collector(shaped, stream, opened.engine, opened.judge, opened.render, opened.decode)
        rollout = collector.collect(0)
    assert rollout.metrics["dynamic_sampling/filled"] == 0
    assert rollout.metrics["dynamic_sampling/kept"] < 1
    for group in range(8):
        correct = [sample.verdict.correct for sample in rollout.samples if sample.group == group]
        assert len(correct) == 4
        assert 0 < sum(correct) < 4


def test_every_sample_is_in_exactly_one_minibatch(rollout: Rollout) -> None:
    parts = [rollout.minibatch(update, 4) for update in range(4)]
    assert sorted(id(sample) for part in parts for sample in part) == sorted(id(sample) for sample in rollout.samples)
    assert {len(part) for part in parts} == {8}


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=40)  # prompt (its number too), response


def forward_tokens(rows: list[Row], *, padded: bool) -> int:
    if padded:
        return len(rows) * max(map(len, rows))
    return sum(map(len, {tuple(row.prompt) for row in rows})) + sum(len(row.response) for row in rows)


@pytest.mark.parametrize("padded", [False, True])
@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_microbatches_hold_every_row_once_and_keep_the_budget(
    lengths: list[tuple[int, int]], budget: int, padded: bool
) -> None:
    rows = [Row((prompt,) * (4 * prompt), (0,) * response) for prompt, response in lengths]
    plan = plan_microbatches(rows, budget, padded=padded)
    assert sorted(i for part in plan for i in part) == list(range(len(rows)))
    for part in plan:
        assert len(part) == 1 or forward_tokens([rows[i] for i in part], padded=padded) <= budget
    sizes = [forward_tokens([rows[i] for i in part], padded=padded) for part in plan]
    # First fit: no two that would go into one, so that at most one is not half full.
    assert padded or sum(2 * size <= budget for size in sizes) <= 1


def test_a_group_is_split_only_when_it_is_too_long() -> None:
    rows = [Row((prompt,) * 10, (0,) * 10) for prompt in (1, 2, 3) for _ in range(4)]  # groups of 10 + 40 tokens
    assert [{rows[i].prompt[0] for i in part} for part in plan_microbatches(rows, 60)] == [{1}, {2}, {3}]
    assert [len(part) for part in plan_microbatches(rows, 100)] == [8, 4]
    parts = plan_microbatches(rows, 30)  # the prompt again in each part of two responses
    assert [len({rows[i].prompt for i in part}) for part in parts] == [1] * 6


@pytest.mark.parametrize("padded", [False, True])
def test_rows_with_one_label_stay_together_whatever_the_budget(padded: bool) -> None:
    rows = [Row((i % 3,), (0,) * (i + 1)) for i in range(9)]
    together = [i % 3 for i in range(9)]
    plan = plan_microbatches(rows, 1, together, padded=padded)
    assert sorted(map(sorted, plan)) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_learning_rate_schedules() -> None:
    config = CONFIG.model_copy(update={"steps": 10, "warmup_steps": 2, "learning_rate": 1.0, "schedule": "linear"})
    assert [learning_rate_at(config, step) for step in range(10)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    )
    constant = config.model_copy(update={"schedule": "constant"})
    assert [learning_rate_at(constant, step) for step in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    cosine = config.model_copy(update={"schedule": "cosine", "warmup_steps": 0})
    assert learning_rate_at(cosine, 0) == 1.0
    assert learning_rate_at(cosine, 5) == pytest.approx(0.5)


def test_in_bf16_an_update_of_1e_6_does_not_vanish(session: Session, rollout: Rollout) -> None:
    """Weights stay fp32: rounded to bf16, as training in pure bf16 rounds them, most would be where they were."""
    model, tokenizer = load_model(session.recipe.model)
    policy = Policy(model, tokenizer, autocast=torch.bfloat16)
    made = Updater(policy, get_objective("dapo"), CONFIG.model_copy(update={"learning_rate": 1e-6}))
    samples = prepare(made, rollout)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in made.parameters])
    made.step(samples, 1e-6)
    after = torch.cat([parameter.detach().flatten() for parameter in made.parameters])
    assert {parameter.dtype for parameter in made.parameters} == {torch.float32}
    moved = (after - before).abs()
    assert (moved > 5e-7).float().mean() > 0.5
    assert moved.max() < 2e-6
    assert (after.bfloat16() != before.bfloat16()).float().mean() < 0.1
