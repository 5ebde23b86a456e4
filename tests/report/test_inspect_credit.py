"""What the token view says of tokens and objectives, against the definition."""

import dataclasses
from pathlib import Path

import pytest
import torch
from models import VOCABULARY, tiny_policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo.config import load_recipe
from tepo.errors import TepoError
from tepo.objectives import get_objective, list_objectives
from tepo.report.inspect_credit import GIVEN, credit, make_batch, objectives, view
from tepo.report.inspect_page import joined, token_texts
from tepo.report.inspect_subject import Shown, Subject, choose, of_run
from tepo.report.run import Run


def made_subject(lengths: tuple[int, ...] = (5, 9, 3, 7), context: int = 64) -> Subject:
    """Two groups of two random responses by a tiny random model, sampled by one that was a little different."""
    torch.manual_seed(0)
    policy = tiny_policy(max_position_embeddings=context)
    shown = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, VOCABULARY, (length,)).tolist()
        scores = policy.score([(one := Shown({}, index // 2, [3, 4], ids, 0, *[torch.zeros(0)] * 3)).row])
        logp = (scores.logp + 0.3 * torch.randn(length)).detach()
        entropy = (scores.entropy + 0.3 * torch.randn(length)).detach()
        record = {
            "problem": "1+2",
            "response": "3",
            "finish_reason": "stop",
            "tokens": length,
            "reward": float(index % 2),
        }
        shown.append(dataclasses.replace(one, record=record, logp=logp, old_logp=logp, old_entropy=entropy))
    return Subject(
        "made", "", load_recipe("arithmetic"), policy, shown,
        rewards=torch.tensor([one.record["reward"] for one in shown], dtype=torch.float64),
        groups=torch.tensor([one.group for one in shown]),
        lengths=torch.tensor(lengths), chosen=torch.arange(len(lengths)),
    )  # fmt: skip


HELD = {"cispo", "gspo_token", "skpo"}
"""Parts of their losses are held constant: their gradient is not the derivative of the value."""

LOOKED_AT = [name for name in list_objectives() if not get_objective(name).reads - GIVEN and name not in HELD]


@pytest.mark.parametrize("name", LOOKED_AT)
def test_weights_are_the_derivative_of_the_loss(name: str) -> None:
    subject = made_subject()
    seen = view(subject.policy, subject, 3)
    batch = make_batch(subject, seen, [torch.split(seen.logp, [5, 9, 3, 7])[i] - 0.1 for i in range(4)])
    objective = objectives([name], None)[name]
    found = credit(name, objective, batch, subject)
    torch.manual_seed(0)
    prepared = objective.prepare(dataclasses.replace(batch, rewards=subject.rewards))
    kept = (
        prepared.selected
        if objective.selection and objective.selection.use == "keep"
        else torch.ones(24, dtype=torch.bool)
    )
    assert kept is not None
    totals, step = objective.totals(prepared), 1e-6
    for token in (0, 6, 13, 15, 23):
        if not kept[token]:
            assert found.weight[token].isnan()
            continue
        moved = torch.zeros(24, dtype=torch.float64).index_fill(0, torch.tensor([token]), step)
        high, low = (
            float(objective(dataclasses.replace(prepared, logp=prepared.logp + sign * moved), totals).loss)
            for sign in (1, -1)
        )
        assert float(found.weight[token]) == pytest.approx(-int(kept.sum()) * (high - low) / (2 * step), abs=1e-5), (
            token
        )


def test_without_drift_the_weight_of_tepo_is_the_advantage() -> None:
    subject = made_subject()
    seen = view(subject.policy, subject, 3)
    shown = [
        dataclasses.replace(one, logp=logp.float(), old_logp=torch.full_like(one.logp, torch.nan))
        for one, logp in zip(subject.shown, torch.split(seen.logp, [5, 9, 3, 7]), strict=True)
    ]
    subject = dataclasses.replace(subject, shown=shown)
    found = credit("tepo_v1", objectives(["tepo_v1"], None)["tepo_v1"], make_batch(subject, seen, None), subject)
    torch.testing.assert_close(found.weight, found.advantage, rtol=1e-5, atol=0)
    half = 0.5**0.5  # rewards 0 and 1: deviation 1/2 over the sample standard deviation
    assert found.advantage[[0, 5]].tolist() == pytest.approx([-half, half], rel=1e-5)


def test_the_likeliest_tokens_are_those_of_the_model() -> None:
    subject = made_subject()
    seen = view(subject.policy, subject, 4)
    one = subject.shown[1]
    logits = subject.policy.model(torch.tensor([[*one.prompt, *one.ids]])).logits[0, 1:-1]
    best = torch.softmax(logits, -1).topk(4)
    torch.testing.assert_close(seen.top_probs[5:14], best.values, rtol=1e-4, atol=1e-6)
    assert torch.equal(seen.top_ids[5:14], best.indices)


def test_a_rollout_as_the_policy_that_sampled_it_sees_it(finished_run: Path) -> None:
    run = Run.open(finished_run)
    subject = of_run(run, 1, 4, 16)
    seen = view(subject.policy, subject, 3)
    torch.testing.assert_close(seen.logp, torch.cat([one.logp for one in subject.shown]).double(), rtol=0, atol=1e-5)
    later = of_run(run, 1, 8, 16)
    assert "after step 4, as the policy after step 8" in later.lead
    difference = view(later.policy, later, 3).logp - seen.logp
    assert difference.abs().max() > 1e-3
    # The first choice is the last rollout and the checkpoint after it.
    assert of_run(run, None, None, 16).lead == later.lead
    assert of_run(run, 0, None, 16).lead.startswith(
        "Rollout 0, sampled by the policy after step 0, as the policy after step 4"
    )
    with pytest.raises(TepoError, match="--checkpoint 5: not stored; those that are: 4, 8"):
        of_run(run, 1, 5, 16)
    advantages = [record["advantage"] for record in run.responses(1)]
    own = credit("tepo (this run)", run.recipe.objective.build(), make_batch(later, seen, None), later)
    assert later.chosen is not None
    firsts = torch.tensor([0, *[len(one.ids) for one in later.shown][:-1]]).cumsum(0)
    assert own.advantage[firsts].tolist() == pytest.approx([advantages[i] for i in later.chosen.tolist()], abs=1e-6)


def test_whole_groups_with_different_rewards_come_first() -> None:
    rewards, groups = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]
    assert choose(rewards, groups, [10] * 6, 2) == [2, 3]
    assert choose(rewards, groups, [10] * 6, 4) == [0, 1, 2, 3]
    assert choose(rewards, groups, [10] * 6, 1) == [2, 3]  # never part of a group, never nothing
    assert choose(rewards, groups, [2**17] * 6, 6) == [2, 3]


def test_what_cannot_be_looked_at_is_said() -> None:
    with pytest.raises(TepoError, match=r"objective ppo: reads .*values"):
        objectives(["ppo"], None)
    with pytest.raises(TepoError, match="--objectives gprpo: "):
        objectives(["gprpo"], None)


def test_characters_of_several_tokens_stand_together() -> None:
    """A tokenizer of bytes, where every character beyond ASCII is two tokens or more."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    policy = tiny_policy()
    policy.tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    text = "naïve 😀 中文 = 3\n"
    ids = policy.tokenizer(text)["input_ids"]
    assert len(ids) > len(text)
    texts = token_texts(policy, sorted(set(ids)))
    places = joined(ids, texts, policy)
    assert "".join(places.get(place, texts[token]) for place, token in enumerate(ids)) == text
    assert [places[place] for place in sorted(places)] == ["", "ï", "", "", "", "😀", "", "", "", "", "", "中文"]
