"""The embedded engine: what it says of its samples is what `Policy.score` says of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from models import END, FAMILIES, SECOND_END, VOCABULARY, character_tokenizer, tiny_model, tiny_policy
from transformers import DynamicCache, GenerationConfig

from tepo.policy import Policy, Row
from tepo.rollout import Response, Sampling, TransformersEngine

PROMPTS = [[5, 6, 7], [4], [8, 9, 10, 11, 12, 13, 14, 15, 16], [3, 0, 1, 2], [7, 7]]


TWO_ENDS = [END, SECOND_END]


def with_ends(ends: list[int], family: str = "llama", temperature: float = 1.0) -> Policy:
    model = tiny_model(family)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    return Policy(model, character_tokenizer(), temperature)


def largest_difference(policy: Policy, prompts: Sequence[Sequence[int]], groups: list[list[Response]]) -> float:
    """Between the stated sampling log-probs and `Policy.score`'s."""
    rows = [Row(prompt, response.ids) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    stated = torch.tensor([logp for group in groups for response in group for logp in response.logps])
    with policy.evaluating():
        return float((policy.score(rows).logp - stated).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_stated_log_probs_are_those_of_score(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed prompt lengths, left padding, rows that leave; windows shorter than the rows for gemma2 and mistral."""
    left: list[int] = []
    select = DynamicCache.batch_select_indices

    def watched(self: DynamicCache, indices: torch.Tensor) -> None:
        left.append(len(indices))
        select(self, indices)

    monkeypatch.setattr(DynamicCache, "batch_select_indices", watched)
    policy = with_ends([END, SECOND_END, 6, 10, 14], family, temperature)
    groups = TransformersEngine(policy).generate(PROMPTS, 6, Sampling(temperature, 20), seed=1)
    assert [len(group) for group in groups] == [6] * 5
    assert largest_difference(policy, PROMPTS, groups) < 1e-5
    assert len(left) >= 2  # rows did leave, more than once
    assert len({len(response.ids) for group in groups for response in group}) > 3


def test_stated_log_probs_are_those_of_score_in_bf16() -> None:
    """The mismatch of a rollout is then rounding in the model's body, not in the head."""
    policy = tiny_policy(autocast=torch.bfloat16)
    groups = TransformersEngine(policy).generate(PROMPTS, 4, Sampling(1.0, 12), seed=1)
    assert largest_difference(policy, PROMPTS, groups) < 0.1


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_responses_come_in_the_order_of_the_prompts(batch_size: int) -> None:
    policy = with_ends(TWO_ENDS)
    groups = TransformersEngine(policy, batch_size).generate(PROMPTS, 3, Sampling(1.0, 10), seed=2)
    assert [len(group) for group in groups] == [3] * 5
    assert largest_difference(policy, PROMPTS, groups) < 1e-5  # of another prompt's response it would be far off


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_greedy_is_that_of_transformers(family: str) -> None:
    policy = with_ends(TWO_ENDS, family)
    groups = TransformersEngine(policy).generate(PROMPTS, 1, Sampling(0.0, 16), seed=0)
    for prompt, (response,) in zip(PROMPTS, groups, strict=True):
        with torch.no_grad():
            whole = policy.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=16,
                do_sample=False,
                eos_token_id=TWO_ENDS,
            )
        assert list(response.ids) == whole[0, len(prompt) :].tolist()
    # Greedy log-probs are those at temperature 1.
    assert largest_difference(policy, PROMPTS, groups) < 1e-5


def test_the_seed_decides_alone() -> None:
    """Not the state of torch's own generator, which it leaves alone."""
    engine = TransformersEngine(tiny_policy())
    sampling = Sampling(1.0, 10)
    first = engine.generate(PROMPTS, 4, sampling, seed=7)
    state = torch.random.get_rng_state()
    torch.rand(3)
    advanced = torch.random.get_rng_state()
    assert engine.generate(PROMPTS, 4, sampling, seed=7) == first
    assert torch.equal(torch.random.get_rng_state(), advanced)
    assert not torch.equal(state, advanced)
    assert engine.generate(PROMPTS, 4, sampling, seed=8) != first


def test_responses_to_one_prompt_differ() -> None:
    (group,) = TransformersEngine(tiny_policy()).generate([[5, 6]], 8, Sampling(1.0, 10), seed=0)
    assert len({response.ids for response in group}) > 4


def test_responses_end_at_the_first_end_token() -> None:
    """Bug 10: either end token is a stop, and pad == end hides neither. Without one the response has max_tokens."""
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=TWO_ENDS)
    policy = Policy(model, character_tokenizer(pad_token="<end>"))
    assert policy.pad_token == END
    groups = TransformersEngine(policy).generate(PROMPTS, 40, Sampling(1.0, 6), seed=3)
    responses = [response for group in groups for response in group]
    ends = {END, SECOND_END}
    for response in responses:
        assert len(response.ids) == len(response.logps)
        assert not ends & set(response.ids[:-1])
        assert response.finished == (response.ids[-1] in ends)
        assert response.finish_reason == ("stop" if response.finished else "length")
        assert response.finished or len(response.ids) == 6
        assert 1 <= len(response.ids) <= 6
    assert {response.ids[-1] for response in responses if response.finished} == ends
    assert not all(response.finished for response in responses)
    # An end token as the very last one that is allowed still is a stop.
    assert any(response.finished and len(response.ids) == 6 for response in responses)


def test_one_token_is_possible() -> None:
    (group,) = TransformersEngine(tiny_policy()).generate([[5, 6]], 100, Sampling(3.0, 1), seed=3)
    assert {len(response.ids) for response in group} == {1}
    assert {response.finished for response in group} == {True, False}


def test_sampled_ids_are_kept() -> None:
    """Bug 17: `1`, `2` as two tokens read `12`, which is one token when tokenised again. The ids stay those sampled."""
    policy = tiny_policy()
    tokenizer = policy.tokenizer
    (group,) = TransformersEngine(policy).generate([[4, 5]], 300, Sampling(3.0, 12), seed=0)
    changed = [r for r in group if tokenizer(tokenizer.decode(r.ids))["input_ids"] != list(r.ids)]
    assert changed
    policy.temperature = 3.0
    assert largest_difference(policy, [[4, 5]], [changed]) < 1e-5
    assert all(0 <= token < VOCABULARY for response in group for token in response.ids)


def test_generation_keeps_no_gradient_and_leaves_the_mode() -> None:
    policy = tiny_policy()
    policy.model.train()
    TransformersEngine(policy).generate(PROMPTS, 2, Sampling(1.0, 4), seed=0)
    assert policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_no_prompts_give_no_responses() -> None:
    assert TransformersEngine(tiny_policy()).generate([], 4, Sampling(1.0, 4), seed=0) == []


@pytest.mark.parametrize("prompts", [[[]], [[5, 6], []]])
def test_an_empty_prompt_is_refused(prompts: list[list[int]]) -> None:
    """Beside a longer one it would be decoded from nothing but padding."""
    with pytest.raises(ValueError, match="a prompt without tokens"):
        TransformersEngine(tiny_policy()).generate(prompts, 2, Sampling(1.0, 4), seed=0)


def test_updated_weights_are_used_at_once() -> None:
    policy = tiny_policy()
    engine = TransformersEngine(policy)
    before = engine.generate(PROMPTS, 2, Sampling(1.0, 8), seed=0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    after = engine.generate(PROMPTS, 2, Sampling(1.0, 8), seed=0)
    assert after != before
    assert largest_difference(policy, PROMPTS, after) < 1e-5
    assert largest_difference(policy, PROMPTS, before) > 1e-2
