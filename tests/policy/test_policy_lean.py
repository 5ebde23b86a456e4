"""Norms and MLPs that keep less: the values and gradients of the layers they stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import FAMILIES, tiny_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tepo.policy.lean import make_lean, undo_lean

CONFIG = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2)
MODULES = {"norm": lambda: LlamaRMSNorm(8, eps=1e-3), "mlp": lambda: LlamaMLP(CONFIG)}


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A layer, and the same made lean."""
    torch.manual_seed(0)
    plain = MODULES[name]().to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    lean = copy.deepcopy(plain)
    make_lean(lean)
    assert "forward" in vars(lean)
    return plain, lean


@pytest.mark.parametrize("name", MODULES)
def test_gradients_in_float64(name: str) -> None:
    """Against finite differences of the layer and of its parameters."""
    _, lean = make(name)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    parameters = list(lean.parameters())

    def value(x: Tensor, *_: Tensor) -> Tensor:
        return lean(x)

    assert torch.autograd.gradcheck(value, (x, *parameters))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_as_the_layer_itself(name: str, autocast: bool, frozen: bool) -> None:
    results = []
    for layer in make(name, torch.float32):
        layer.requires_grad_(not frozen)
        torch.manual_seed(1)
        x = torch.randn(2, 5, 8, dtype=torch.bfloat16 if autocast else torch.float32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    tolerance = {"rtol": 0.03, "atol": 0.03} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    for theirs, ours in zip(*results, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert theirs.dtype == ours.dtype
            scale = float(theirs.detach().abs().max())
            torch.testing.assert_close(ours / scale, theirs / scale, **tolerance)


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes of the tensors kept for the backward pass, parameters aside, each storage once."""
    storages: dict[int, int] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total[0] = sum(storages.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def test_a_model_keeps_a_third_less() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **shape)).model
    ids = torch.arange(32).view(1, -1)
    with kept_bytes() as before:
        plain = model(input_ids=ids, use_cache=False).last_hidden_state
    make_lean(model)
    with kept_bytes() as after:
        lean = model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(lean, plain)
    assert after[0] < 0.7 * before[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_replaced_gives_the_same_and_can_be_undone(family: str) -> None:
    model = tiny_model(family)
    ids = torch.arange(3, 11).view(1, -1)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        make_lean(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)
    undo_lean(model)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_norm_that_counts_its_weight_from_one_is_left_alone() -> None:
    norm = Gemma3RMSNorm(8)
    norm.variance_epsilon = norm.eps  # even with the attributes of the other kind
    nn.init.normal_(norm.weight)
    make_lean(norm)
    assert "forward" not in vars(norm)
