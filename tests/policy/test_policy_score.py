"""`Policy.score` against the definitions, computed from the model's own full logits, each row alone and unpadded."""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, plain_log_probs, plain_scores, random_rows, response_tokens, tiny_model, tiny_policy
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tepo.errors import TepoError
from tepo.policy import Policy, Row, head

ROWS = random_rows(7)
TIGHT = {"rtol": 0.0, "atol": 1e-9}  # float64
SINGLE = {"rtol": 1e-5, "atol": 1e-5}  # fp32


def gradients(policy: Policy, loss: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    assert any(gradient.abs().max() > 1e-3 for gradient in ours.values())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_models_own_logits(family: str, temperature: float) -> None:
    """Also bug 5 (temperature missing) and bug 9 (padding through position ids): rows have unequal lengths."""
    policy = tiny_policy(family, temperature=temperature)
    with policy.evaluating():
        scores = policy.score(ROWS)
        logp, entropy = plain_scores(policy, ROWS)
    torch.testing.assert_close(scores.logp, logp, **SINGLE)
    torch.testing.assert_close(scores.entropy, entropy, **SINGLE)
    assert scores.logp.std() > 0.1  # not a uniform model that would pass whatever is done to its logits


def test_float64_stays_float64() -> None:
    policy = tiny_policy("gpt2", dtype=torch.float64, temperature=1.3)
    with policy.evaluating():
        scores = policy.score(ROWS)
        logp, entropy = plain_scores(policy, ROWS)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float64
    torch.testing.assert_close(scores.logp, logp, **TIGHT)
    torch.testing.assert_close(scores.entropy, entropy, **TIGHT)


def test_temperature_divides_the_logits() -> None:
    """Bug 5. Of a hot distribution every token's log-prob tends to that of a uniform one."""
    policies = {t: tiny_policy(temperature=t) for t in (0.5, 1.0, 1000.0)}
    scores = {t: policy.score(ROWS) for t, policy in policies.items()}
    assert scores[0.5].entropy.mean() < scores[1.0].entropy.mean()
    uniform = torch.tensor(1 / policies[1.0].vocabulary)
    torch.testing.assert_close(scores[1000.0].logp, uniform.log().expand(len(scores[1.0].logp)), rtol=0, atol=0.02)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "opt"])
def test_scores_do_not_depend_on_the_batch(family: str) -> None:
    """Bug 9: alone, together, in another order and beside a much longer row, that is with more padding."""
    policy = tiny_policy(family)
    long = Row([5] * 20, [6] * 20)
    with policy.evaluating():
        alone = [policy.score([row]) for row in ROWS]
        together = policy.score(ROWS)
        backwards = policy.score(ROWS[::-1])
        padded = policy.score([long, *ROWS])
    for name in ("logp", "entropy", "hidden"):
        expected = torch.cat([getattr(scores, name) for scores in alone])
        torch.testing.assert_close(getattr(together, name), expected, **SINGLE)
        parts = getattr(backwards, name).split([len(row.response) for row in ROWS[::-1]])
        torch.testing.assert_close(torch.cat(parts[::-1]), expected, **SINGLE)
        torch.testing.assert_close(getattr(padded, name)[len(long.response) :], expected, **SINGLE)


def test_the_padding_token_itself_does_not_matter() -> None:
    """Padding inside prompts and responses is a token like any other; what fills rows up is never read."""
    policy = tiny_policy()
    rows = [Row([0, 5, 0], [0, 0, 7]), Row([4], [5, 6, 7, 8, 9, 10, 0])]
    with policy.evaluating():
        scores = policy.score(rows)
        logp, _ = plain_scores(policy, rows)
        policy.pad_token = 9
        other = policy.score(rows)
    torch.testing.assert_close(scores.logp, logp, **SINGLE)
    assert torch.equal(scores.logp, other.logp)


@pytest.mark.parametrize(("prompt", "response"), [([], [5]), ([5], [])])
def test_rows_without_prompt_or_response_are_refused(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(ValueError, match=r"row 1: \d prompt and \d response tokens; both need one"):
        tiny_policy().score([Row([5], [6]), Row(prompt, response)])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt2"])
def test_gradients_are_those_of_the_plain_computation(family: str, temperature: float) -> None:
    # In float64 the eager attention that Gemma 2 needs makes NaNs of padding behind its window.
    dtype = torch.float32 if family == "gemma2" else torch.float64
    policy = tiny_policy(family, dtype=dtype, temperature=temperature)
    weights = torch.randn(2, sum(len(row.response) for row in ROWS), dtype=dtype)
    for i in range(2):  # log-probs, then entropies
        scores = policy.score(ROWS, entropy_gradient=True)
        ours = gradients(policy, (weights[i] * (scores.logp, scores.entropy)[i]).sum())
        theirs = gradients(policy, (weights[i] * plain_scores(policy, ROWS)[i]).sum())
        # Norms and rotations are in fp32 inside some models.
        assert_same_gradients(ours, theirs, rtol=1e-5, atol=1e-5)


def test_entropy_carries_a_gradient_only_when_asked() -> None:
    """Bug 13, and its reverse: an entropy that is only compared must not pull at the policy."""
    policy = tiny_policy()
    assert not policy.score(ROWS).entropy.requires_grad
    assert policy.score(ROWS, entropy_gradient=True).entropy.requires_grad
    assert not policy.score(ROWS, entropy_direction=True).entropy.requires_grad
    assert policy.score(ROWS).logp.requires_grad
    assert not policy.score(ROWS).hidden.requires_grad
    with policy.evaluating():
        assert not policy.score(ROWS, entropy_gradient=True).entropy.requires_grad


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_old_and_new_scores_are_equal_to_the_bit(family: str, autocast: torch.dtype | None) -> None:
    """Bug 11: the entropy test H < H_old is strict, so equal weights must give equal entropies, not nearly equal."""
    policy = tiny_policy(family, autocast=autocast)
    with policy.evaluating():
        old = policy.score(ROWS)
    for options in ({}, {"entropy_gradient": True}, {"entropy_direction": True}):
        new = policy.score(ROWS, **options)
        assert torch.equal(new.logp, old.logp)
        assert torch.equal(new.entropy, old.entropy)


def test_old_and_new_scores_are_equal_to_the_bit_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 3 * 18)
    policy = tiny_policy()
    with policy.evaluating():
        old = policy.score(ROWS)
    new = policy.score(ROWS, entropy_gradient=True)
    assert torch.equal(new.logp, old.logp)
    assert torch.equal(new.entropy, old.entropy)


def test_in_bf16_the_head_and_its_outputs_are_fp32() -> None:
    """Bug 11: entropies rounded to bf16. The head is that of fp32 weights on the hidden states, to fp32's precision."""
    policy = tiny_policy(autocast=torch.bfloat16)
    scores = policy.score(ROWS, entropy_gradient=True, entropy_direction=True)
    layer = policy.model.get_output_embeddings()
    log_probs = torch.log_softmax(scores.hidden.float() @ layer.weight.detach().T, dim=-1)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float32
    expected = log_probs.gather(-1, response_tokens(ROWS)[:, None]).squeeze(-1)
    torch.testing.assert_close(scores.logp.detach(), expected, **SINGLE)
    torch.testing.assert_close(scores.entropy.detach(), -(log_probs.exp() * log_probs).sum(-1), **SINGLE)
    assert (scores.entropy.bfloat16().float() != scores.entropy).float().mean() > 0.9
    # bf16 really was at work below the head, and gradients come out in fp32.
    assert (scores.logp - tiny_policy().score(ROWS).logp).abs().max() > 1e-4
    assert {gradient.dtype for gradient in gradients(policy, scores.logp.sum()).values()} == {torch.float32}


def test_options_do_not_change_the_log_probs_and_entropies() -> None:
    policy = tiny_policy("gemma2", temperature=0.8)
    other = tiny_policy("gemma2", seed=1)
    with policy.evaluating():
        plain = policy.score(ROWS)
        target = (other.head, other.score(ROWS).hidden)
        full = policy.score(ROWS, entropy_gradient=True, entropy_direction=True, kl_target=target)
        log_probs = plain_log_probs(policy, ROWS)
        other.temperature = policy.temperature
        others = plain_log_probs(other, ROWS)
    assert torch.equal(full.logp, plain.logp)
    assert torch.equal(full.entropy, plain.entropy)
    assert plain.entropy_direction is None
    assert plain.exact_kl is None
    assert full.exact_kl is not None
    # At the policy's temperature on both sides.
    torch.testing.assert_close(full.exact_kl, (log_probs.exp() * (log_probs - others)).sum(-1), **SINGLE)


def test_exact_kl_to_the_old_policy_stays_to_the_old_policy() -> None:
    """`frozen` is a copy: the target must not move with the head that is trained. First 0, with gradient 0."""
    policy = tiny_policy(dtype=torch.float64)
    with policy.evaluating():
        target = (policy.head.frozen(), policy.score(ROWS).hidden)
        old = plain_log_probs(policy, ROWS)
    first = policy.score(ROWS, kl_target=target).exact_kl
    assert first is not None
    assert first.abs().max() < 1e-12
    assert max(gradient.abs().max() for gradient in gradients(policy, first.sum()).values()) < 1e-12
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    later = policy.score(ROWS, kl_target=target).exact_kl
    assert later is not None
    new = plain_log_probs(policy, ROWS)
    expected = (new.exp() * (new - old)).sum(-1)
    torch.testing.assert_close(later, expected, rtol=1e-6, atol=1e-8)
    assert_same_gradients(gradients(policy, later.sum()), gradients(policy, expected.sum()), rtol=1e-5, atol=1e-7)
    assert not any(parameter.requires_grad for parameter in target[0].layer.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_check_head_accepts_the_families_that_are_tested(family: str) -> None:
    policy = tiny_policy(family, temperature=0.5, autocast=torch.bfloat16)
    policy.check_head()
    assert (policy.temperature, policy.autocast) == (0.5, torch.bfloat16)


class ScaledHead(LlamaForCausalLM):
    """A model that scales its logits in a way that no attribute of its configuration tells."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = 1.5 * output.logits
        return output


def test_check_head_refuses_an_unknown_head() -> None:
    model = ScaledHead(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    policy = Policy(model, tiny_policy().tokenizer, temperature=0.7)
    with pytest.raises(TepoError, match=r"ScaledHead: its own log-probs .* differ .* not supported"):
        policy.check_head()
    assert policy.temperature == 0.7


def test_check_head_refuses_a_model_that_cannot_be_decoded_with_our_cache() -> None:
    """A state-space model takes no key-value cache and would be sampled from as if it had no memory."""
    model = tiny_model("mamba", state_size=4, conv_kernel=2, expand=2)
    with pytest.raises(TepoError, match=r"log-probs when decoding .* differ .* not supported"):
        Policy(model, tiny_policy().tokenizer).check_head()


def test_a_model_without_an_output_layer_is_named() -> None:
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        head.Head.of(tiny_model().model)


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5}),
        ("phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5}),
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5}),
    ],
)
def test_dropout_is_off_also_in_training_mode(family: str, rates: dict[str, float]) -> None:
    policy = tiny_policy(family, **rates)
    with policy.evaluating():
        expected = policy.score(ROWS).logp
    policy.model.train()
    assert torch.equal(policy.score(ROWS).logp.detach(), expected)


def test_evaluating_restores_the_mode_and_needs_no_gradient() -> None:
    policy = tiny_policy()
    policy.model.train()
    with policy.evaluating():
        assert not policy.model.training
        assert not policy.score(ROWS).logp.requires_grad
    assert policy.model.training
    with pytest.raises(ValueError, match="row 0"), policy.evaluating():
        policy.score([Row([], [])])
    assert policy.model.training
    assert torch.is_grad_enabled()


def test_the_padded_part_of_a_row_gets_no_gradient() -> None:
    """Only what a response token sees can have a gradient through it: here the embeddings of the real tokens."""
    model = tiny_model(tie_word_embeddings=False)
    policy = Policy(model, tiny_policy().tokenizer)
    scores = policy.score([Row([5], [6, 7]), Row([8] * 6, [9] * 6)])
    grads = gradients(policy, scores.logp[:2].sum())
    touched = grads["model.embed_tokens.weight"].abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [5, 6]  # the last token predicts nothing
    assert isinstance(model.get_output_embeddings(), nn.Linear)
