"""Samples are drawn from the distribution that is stated: whole responses, and single tokens with top_p."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from models import END, character_tokenizer, plain_log_probs, tiny_model
from scipy import stats
from transformers import GenerationConfig

from tepo.policy import Policy, Row
from tepo.rollout import Sampling, TransformersEngine
from tepo.rollout.sampling import sample

V = 5  # with the end token; so few that all responses can be listed
SAMPLES = 4000


def chi_square_p(counts: Mapping[object, int], probabilities: Mapping[object, float]) -> float:
    """p-value of counts under exact probabilities; rare outcomes are put together."""
    assert counts.keys() <= probabilities.keys()
    total = sum(counts.values())
    common = [key for key, p in probabilities.items() if p * total >= 10]
    observed = [counts.get(key, 0) for key in common]
    expected = [probabilities[key] * total for key in common]
    rest = total - sum(expected)
    if rest > 1:
        observed, expected = [*observed, total - sum(observed)], [*expected, rest]
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, [value * scale for value in expected]).pvalue)


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def small_policy(temperature: float, family: str = "llama") -> Policy:
    model = tiny_model(family, vocabulary=V)
    model.generation_config = GenerationConfig(eos_token_id=END)
    return Policy(model, character_tokenizer(), temperature)


def all_responses(policy: Policy, prompt: Sequence[int], max_tokens: int) -> dict[tuple[int, ...], float]:
    """Every response and its exact probability, from the model's own logits."""
    found: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for ids, probability in open_ones.items():
            with torch.no_grad():
                row = plain_log_probs(policy, [Row([*prompt, *ids], [0])])[0].exp().tolist()
            for token, p in enumerate(row):
                (found if token == END else longer)[(*ids, token)] = probability * p
        open_ones = longer
    return found | open_ones


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 11), (1.0, 12), (0.5, 13), (2.0, 14)])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_whole_responses_have_the_models_probabilities(family: str, temperature: float, seed: int) -> None:
    """Prompts of unequal length together: positions, rows that leave and rows that enter are at work in both caches."""
    policy = small_policy(temperature, family)
    prompts = [[2, 3, 4], [0, 2, 2, 3, 4, 1, 0, 3]]
    engine = TransformersEngine(policy, batch_size=3000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        groups = engine.generate(prompts, SAMPLES, Sampling(temperature, 3), seed)
    for prompt, group in zip(prompts, groups, strict=True):
        exact = all_responses(policy, prompt, 3)
        assert sum(exact.values()) == pytest.approx(1, abs=1e-5)
        counts = Counter(response.ids for response in group)
        assert chi_square_p(counts, exact) > 1e-4
        for response in group[:200]:
            assert sum(response.logps) == pytest.approx(math.log(exact[response.ids]), abs=1e-4)
        # The test has power: the distribution at another temperature is refused.
        policy.temperature = temperature * 1.25
        assert chi_square_p(counts, all_responses(policy, prompt, 3)) < 1e-4
        policy.temperature = temperature


def nucleus(probabilities: Sequence[float], top_p: float) -> dict[int, float]:
    """The fewest most likely tokens whose probabilities reach top_p, renormalised: token -> probability."""
    kept: dict[int, float] = {}
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if sum(kept.values()) >= top_p:
            break
        kept[token] = probabilities[token]
    total = sum(kept.values())
    return {token: p / total for token, p in kept.items()}


PROBABILITIES = [0.05, 0.4, 0.02, 0.3, 0.13, 0.1]


@pytest.mark.parametrize(("top_p", "size"), [(1.0, 6), (0.9, 4), (0.8, 3), (0.6, 2), (0.39, 1), (1e-9, 1)])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_top_p_draws_from_the_nucleus_and_states_its_distribution(temperature: float, top_p: float, size: int) -> None:
    """The temperature first, then top_p, as transformers and vLLM do."""
    # These become PROBABILITIES at the temperature.
    logits = (torch.tensor(PROBABILITIES).log() * temperature + 3.0).expand(SAMPLES, -1)
    exact = nucleus(PROBABILITIES, top_p)
    assert len(exact) == size
    tokens, logps = sample(logits, Sampling(temperature, 1, top_p), noise(SAMPLES, 5))
    assert set(tokens.tolist()) == exact.keys()
    expected = torch.tensor([exact[token] for token in tokens.tolist()]).log()
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    if size > 1:
        assert chi_square_p(Counter(tokens.tolist()), exact) > 1e-4


def test_top_p_is_decided_for_every_row_by_itself() -> None:
    flat, sharp = torch.zeros(6), torch.tensor([9.0, 0, 0, 0, 0, 0])
    logits = torch.stack([flat, sharp]).repeat(500, 1)
    tokens, logps = sample(logits, Sampling(1.0, 1, 0.4), noise(1000, 0))
    assert set(tokens[1::2].tolist()) == {0}
    assert logps[1::2].abs().max() == 0
    assert len(set(tokens[::2].tolist())) == 3
    torch.testing.assert_close(logps[::2], torch.full((500,), -math.log(3)))


def test_top_p_in_the_engine_states_the_truncated_distribution() -> None:
    """Its log-probs are larger than `score`'s, by the logarithm of the nucleus' mass; no token outside it is drawn."""
    policy = small_policy(1.0)
    (group,) = TransformersEngine(policy).generate([[2, 3]], 400, Sampling(1.0, 4, 0.7), seed=0)
    checked = 0
    for response in group[:60]:
        with torch.no_grad():
            rows = plain_log_probs(policy, [Row([2, 3], response.ids)]).exp().tolist()
        for token, logp, row in zip(response.ids, response.logps, rows, strict=True):
            exact = nucleus(row, 0.7)
            assert token in exact
            assert logp == pytest.approx(math.log(exact[token]), abs=1e-4)
            checked += len(exact) < V
    assert checked > 60


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    tokens, logps = sample(logits, Sampling(0.0, 1), noise(50, 0))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logps, torch.log_softmax(logits, -1).amax(-1))


def test_tokens_that_are_impossible_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf]).expand(2000, -1)
    for top_p in (1.0, 0.9):
        tokens, logps = sample(logits, Sampling(1.0, 1, top_p), noise(2000, 2))
        assert set(tokens.tolist()) <= {0, 2}
        assert torch.isfinite(logps).all()


def test_rows_of_a_batch_are_drawn_independently() -> None:
    """Equal rows of one call get noise of their own: the joint counts are those of the product."""
    logits = torch.tensor([0.5, 0.5]).log().expand(2 * SAMPLES, -1)
    tokens, _ = sample(logits, Sampling(1.0, 1), noise(2 * SAMPLES, 4))
    pairs = Counter(map(tuple, np.asarray(tokens).reshape(-1, 2).tolist()))
    assert chi_square_p(pairs, {(a, b): 0.25 for a in (0, 1) for b in (0, 1)}) > 1e-4


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(3, 1.0, {1, 3, 4}), (3, 0.8, {1, 3}), (0, 1.0, set(range(6)))])
def test_top_k_comes_before_top_p_and_states_what_is_left(top_k: int, top_p: float, kept: set[int]) -> None:
    logits = torch.tensor(PROBABILITIES).log().expand(SAMPLES, -1)
    total = sum(PROBABILITIES[token] for token in kept)
    exact = {token: PROBABILITIES[token] / total for token in kept}
    tokens, logps = sample(logits, Sampling(1.0, 1, top_p, top_k), noise(SAMPLES, 6))
    assert chi_square_p(Counter(tokens.tolist()), exact) > 1e-4
    expected = torch.tensor([exact[token] for token in tokens.tolist()]).log()
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)


def test_responses_to_equal_prompts_and_to_one_prompt_are_independent() -> None:
    """First tokens of neighbours, of the same group and of two groups with one prompt: counts of the product."""
    policy = small_policy(1.0)
    groups = TransformersEngine(policy, 8000).generate([[2, 3], [2, 3]], SAMPLES, Sampling(1.0, 1), seed=5)
    exact = {token: p for (token,), p in all_responses(policy, [2, 3], 1).items()}
    product = {(a, b): exact[a] * exact[b] for a in exact for b in exact}
    first, second = ([response.ids[0] for response in group] for group in groups)
    assert chi_square_p(Counter(zip(first, second, strict=True)), product) > 1e-4
    assert chi_square_p(Counter(zip(first[::2], first[1::2], strict=True)), product) > 1e-4
