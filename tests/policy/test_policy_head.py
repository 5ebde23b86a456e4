"""`score_hidden`: entropy, its direction, the exact KL, and chunks that are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tepo.policy import head
from tepo.policy.head import Head, HeadOutput, score_hidden

TOKENS, WIDTH, V = 23, 6, 11
CHUNK = 4  # tokens


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", CHUNK * V + 3)


def make_head(seed: int = 0, **options: Any) -> Head:
    torch.manual_seed(seed)
    return Head(nn.Linear(WIDTH, V).double(), **options)


def make_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(V, (TOKENS,), generator=generator)


def test_factor_and_soft_cap() -> None:
    hidden, _ = make_inputs()
    layer = make_head().layer
    expected = 5 * torch.tanh(0.25 * layer(hidden) / 5)
    torch.testing.assert_close(Head(layer, 0.25, 5.0)(hidden), expected)
    torch.testing.assert_close(Head(layer)(hidden), layer(hidden))


def test_a_bf16_head_still_gives_fp32_values() -> None:
    """Weights in bf16 (not tepo's way, but a caller's): sums are accumulated in fp32 after the matrix product."""
    hidden, targets = make_inputs()
    low = Head(nn.Linear(WIDTH, V).bfloat16())
    out = score_hidden(low, hidden.float(), targets, V)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    log_probs = torch.log_softmax(low.layer(hidden.bfloat16()).float(), -1)
    torch.testing.assert_close(out.entropy, -(log_probs.exp() * log_probs).sum(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_entropy_direction_is_the_derivative_of_the_entropy(temperature: float) -> None:
    """dH along dz = onehot(a) - p, z the logits after the temperature: what raising token a's log-prob does to H."""
    logits = 2 * torch.randn(TOKENS, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    targets = torch.cat([logits[:12].argmax(-1), torch.arange(TOKENS - 12) % V])  # likely tokens and others
    identity = Head(nn.Linear(V, V, bias=False).double())
    identity.layer.weight.data = torch.eye(V, dtype=torch.float64)
    out = score_hidden(identity, logits, targets, V, temperature, entropy_direction=True)
    scaled = logits / temperature
    step = nn.functional.one_hot(targets, V) - torch.softmax(scaled, -1)

    def entropy(z: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=z).entropy()

    eps = 1e-5
    numeric = (entropy(scaled + eps * step) - entropy(scaled - eps * step)) / (2 * eps)
    torch.testing.assert_close(out.entropy_direction, numeric, rtol=1e-6, atol=1e-8)
    assert (numeric < 0).any()
    assert (numeric > 0).any()
    torch.testing.assert_close(out.entropy, entropy(scaled))


def test_entropy_direction_is_the_first_order_test_of_the_specification() -> None:
    """Falling entropy where S_a > sum_j p_j S_j with S_j = p_j (log p_j + H)."""
    hidden, targets = make_inputs()
    out = score_hidden(make_head(), hidden, targets, V, entropy_direction=True)
    p = torch.softmax(make_head()(hidden), -1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    s = p * (p.log() + entropy)
    falls = s.gather(-1, targets[:, None])[:, 0] > (p * s).sum(-1)
    assert out.entropy_direction is not None
    assert torch.equal(out.entropy_direction < 0, falls)
    assert not out.entropy_direction.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl_and_its_gradient(temperature: float) -> None:
    hidden, targets = make_inputs()
    mine, other = make_head(0), make_head(1, factor=0.5, softcap=3.0)
    other_hidden = make_inputs(1)[0].requires_grad_()
    hidden.requires_grad_()
    out = score_hidden(mine, hidden, targets, V, temperature, kl_target=(other, other_hidden))
    p = torch.distributions.Categorical(logits=mine(hidden) / temperature)
    q = torch.distributions.Categorical(logits=other(other_hidden).detach() / temperature)
    expected = torch.distributions.kl_divergence(p, q)
    assert out.exact_kl is not None
    torch.testing.assert_close(out.exact_kl, expected)
    wanted = [hidden, *mine.layer.parameters()]
    ours = torch.autograd.grad(out.exact_kl.sum(), wanted, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), wanted))
    assert torch.autograd.grad(out.exact_kl.sum(), [other_hidden], allow_unused=True) == (None,)


def all_outputs(policy_head: Head, hidden: Tensor, targets: Tensor, *, entropy_gradient: bool) -> HeadOutput:
    target = (make_head(1), make_inputs(1)[0])
    return score_hidden(
        policy_head,
        hidden,
        targets,
        V,
        0.8,
        entropy_gradient=entropy_gradient,
        entropy_direction=True,
        kl_target=target,
    )


def values_and_gradients(*, entropy_gradient: bool) -> tuple[HeadOutput, list[Tensor]]:
    hidden, targets = make_inputs()
    hidden.requires_grad_()
    policy_head = make_head(softcap=4.0)
    out = all_outputs(policy_head, hidden, targets, entropy_gradient=entropy_gradient)
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    assert out.exact_kl is not None
    loss = (weights * out.logp).sum() + (weights.flip(0) * out.entropy + weights**2 * out.exact_kl).sum()
    return out, list(torch.autograd.grad(loss, [hidden, *policy_head.layer.parameters()]))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [1, CHUNK, TOKENS - 1, TOKENS, 1000])
def test_chunks_change_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk: int, entropy_gradient: bool
) -> None:
    whole, expected = values_and_gradients(entropy_gradient=entropy_gradient)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk * V)
    chunked, ours = values_and_gradients(entropy_gradient=entropy_gradient)
    for name in ("logp", "entropy", "entropy_direction", "exact_kl"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
    assert chunked.entropy.requires_grad == entropy_gradient


def test_a_vocabulary_larger_than_a_chunk_goes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = values_and_gradients(entropy_gradient=True)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", V - 1)
    chunked, ours = values_and_gradients(entropy_gradient=True)
    torch.testing.assert_close(chunked.logp, whole.logp)
    torch.testing.assert_close(ours, expected)


def test_no_tokens_give_empty_values() -> None:
    out = score_hidden(make_head(), torch.zeros(0, WIDTH).double(), torch.zeros(0).long(), V)
    assert out.logp.shape == out.entropy.shape == (0,)


class LargestLogits(TorchDispatchMode):
    """Records the most rows that any tensor [rows, V] has, in the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[-1] == V and tensor.shape[0] != WIDTH:
                self.rows = max(self.rows, tensor.shape[0])
        return out


@contextmanager
def kept_for_backward() -> Iterator[list[tuple[int, ...]]]:
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield shapes


def test_the_matrix_of_all_logits_never_exists(small_chunks: None) -> None:
    """Neither at once in either pass, nor in pieces kept from one to the other."""
    hidden, targets = make_inputs()
    hidden.requires_grad_()
    with LargestLogits() as seen, kept_for_backward() as kept:
        out = all_outputs(make_head(), hidden, targets, entropy_gradient=True)
        assert out.exact_kl is not None
        (out.logp + out.entropy + out.exact_kl).sum().backward()
    assert seen.rows == CHUNK
    assert not [shape for shape in kept if shape[-1:] == (V,) and shape[0] > 1]


def test_without_chunks_the_logits_are_kept() -> None:
    """The two instruments above do see the matrix where it is kept."""
    hidden, targets = make_inputs()
    hidden.requires_grad_()
    with LargestLogits() as seen, kept_for_backward() as kept:
        all_outputs(make_head(), hidden, targets, entropy_gradient=True).logp.sum().backward()
    assert seen.rows == TOKENS
    assert (TOKENS, V) in kept


@pytest.mark.parametrize("options", [{}, {"factor": 0.4, "softcap": 3.0}])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_backward_pass_of_log_prob_and_entropy(
    small_chunks: None, entropy_gradient: bool, options: dict[str, Any]
) -> None:
    """Against finite differences, to hidden states, weight and bias; and against autograd's log-softmax."""
    policy_head = make_head(**options)
    hidden, targets = make_inputs()
    hidden.requires_grad_()
    parameters = list(policy_head.layer.parameters())

    def scores(*_: Tensor) -> tuple[Tensor, ...]:
        out = score_hidden(policy_head, hidden, targets, V, 0.7, entropy_gradient=entropy_gradient)
        return (out.logp, out.entropy) if entropy_gradient else (out.logp,)

    assert torch.autograd.gradcheck(scores, (hidden, *parameters))
    log_probs = torch.log_softmax(policy_head(hidden) / 0.7, -1)
    plain = (log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1))
    weights = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours, theirs = (
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, values, strict=False)), [hidden, *parameters])
        for values in (scores(), plain[: 1 + entropy_gradient])
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_a_loss_of_one_of_the_two(which: str) -> None:
    hidden, targets = make_inputs()
    hidden.requires_grad_()
    policy_head = make_head()
    log_probs = torch.log_softmax(policy_head(hidden), -1)
    plain = {"logp": log_probs.gather(-1, targets[:, None])[:, 0], "entropy": -(log_probs.exp() * log_probs).sum(-1)}
    ours = getattr(score_hidden(policy_head, hidden, targets, V, entropy_gradient=True), which)
    found = torch.autograd.grad(ours.sum(), [hidden, policy_head.layer.weight])
    expected = torch.autograd.grad(plain[which].sum(), [hidden, policy_head.layer.weight])
    torch.testing.assert_close(found, expected)


def test_only_what_is_trained_gets_a_gradient(small_chunks: None) -> None:
    """A frozen head under a trained decoder, and a trained head over a frozen one."""
    hidden, targets = make_inputs()
    policy_head = make_head()
    policy_head.layer.bias.requires_grad_(False)
    score_hidden(policy_head, hidden, targets, V).logp.sum().backward()
    assert policy_head.layer.bias.grad is None
    expected = torch.autograd.grad(
        torch.log_softmax(policy_head(hidden), -1).gather(-1, targets[:, None]).sum(), policy_head.layer.weight
    )[0]
    torch.testing.assert_close(policy_head.layer.weight.grad, expected)
    assert not score_hidden(policy_head.frozen(), hidden, targets, V).logp.requires_grad
    states = hidden.clone().requires_grad_()
    score_hidden(policy_head.frozen(), states, targets, V).logp.sum().backward()
    assert states.grad is not None


def kept_bytes(vocabulary: int) -> int:
    """What log-prob and entropy keep for the backward pass besides the layer's weights."""
    hidden, _ = make_inputs()
    hidden.requires_grad_()
    layer = nn.Linear(WIDTH, vocabulary).double()
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = score_hidden(Head(layer), hidden, torch.zeros(TOKENS).long(), vocabulary, entropy_gradient=True)
    assert out.logp.requires_grad
    return sum(kept)


def test_memory_does_not_grow_with_the_vocabulary(small_chunks: None) -> None:
    """What is kept is a hidden state, an id and an entropy a token; what is made at once is one chunk (above)."""
    assert kept_bytes(V) == kept_bytes(100 * V) == TOKENS * (WIDTH + 2) * 8
