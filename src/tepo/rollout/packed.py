"""Linear layers with their weights laid out once for many products with few rows: decoding on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST_WEIGHTS = 2**24
"""Weights of a model below which a new layout gains less than it costs."""


@contextmanager
def packed_layers(model: nn.Module) -> Iterator[None]:
    """The linear layers of a model on a CPU in oneDNN's own layout, which torch otherwise makes anew in each product.

    A third of the time of a decoding step goes there. The weights must not change meanwhile.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module.weight)]
    if sum(layer.weight.numel() for layer in layers) < LEAST_WEIGHTS:
        layers = []
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            layer.forward = functools.partial(_linear, packed, layer.bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            del layer.forward


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    bias = bias if bias is None else bias.to(weight.dtype)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.to(weight.dtype), weight, bias, "none", [], "")
    return product
