"""Layers that keep less for the backward pass, and compute it again there, with the results of the model's own.

Of a Llama-like layer autograd keeps, per token, the inputs of its norms and their normalised values, and of its MLP the
gate, its activation, the other branch and their product. Here norms keep their input, and an MLP the gate and the other
branch: a third less in all, for some per cent of time. Nothing is assumed of a class by its name: a module is
replaced when it has the parts, and gives on a sample what ours gives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), the quotient in fp32 or wider and rounded to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normalised = _wide(x) * scale
        above = _wide(gradients[0])
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (above * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        inner = above * weight
        along = (inner * normalised).mean(-1, keepdim=True)
        return inner.sub_(normalised.mul_(along)).mul_(scale).to(x.dtype), of_weight, None


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up, keeping the two alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return _through_product(gate, up, gradients[0])


class _GatedLinear(torch.autograd.Function):
    """(silu(gate) * up) weight^T, keeping no product either."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return nn.functional.linear(nn.functional.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        above = gradients[0]
        of_weight = None
        if ctx.needs_input_grad[2]:
            product = nn.functional.silu(gate).mul_(up)
            of_weight = (above.flatten(0, -2).T @ product.flatten(0, -2).to(above.dtype)).to(weight.dtype)
        return *_through_product(gate, up, above @ weight.to(above.dtype)), of_weight


def _through_product(gate: Tensor, up: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    of_gate = torch.ops.aten.silu_backward(above * up, gate)
    return of_gate, nn.functional.silu(gate).mul_(above)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return out


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    plain = type(module.down_proj) is nn.Linear and module.down_proj.bias is None
    out: Tensor = (
        _GatedLinear.apply(gate, up, module.down_proj.weight)
        if plain
        else module.down_proj(_GatedProduct.apply(gate, up))
    )
    return out


_PARTS: tuple[tuple[Callable[..., Tensor], tuple[str, ...]], ...] = (
    (_norm_forward, ("weight", "variance_epsilon")),
    (_mlp_forward, ("gate_proj", "up_proj", "down_proj", "act_fn")),
)


def make_lean(decoder: nn.Module) -> None:
    """Replace the forward methods of a decoder's norms and MLPs, where ours give the same."""
    for module in decoder.modules():
        for forward, parts in _PARTS:
            if (
                "forward" not in vars(module)
                and all(hasattr(module, part) for part in parts)
                and _same(module, forward)
            ):
                module.forward = MethodType(forward, module)


def undo_lean(decoder: nn.Module) -> None:
    """Give a decoder's modules their own forward methods back."""
    ours = {forward for forward, _ in _PARTS}
    for module in decoder.modules():
        if getattr(vars(module).get("forward"), "__func__", None) in ours:
            del module.forward


def _same(module: Any, forward: Callable[..., Tensor]) -> bool:
    parameter = next(module.parameters())
    width = parameter.shape[-1] if forward is _norm_forward else module.gate_proj.in_features
    sample = torch.linspace(-2, 3, 2 * width, dtype=parameter.dtype, device=parameter.device).view(1, 2, -1)
    with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
        try:
            theirs = module(sample)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            return False  # it wants to be called in another way
        return isinstance(theirs, Tensor) and torch.allclose(theirs, forward(module, sample), rtol=1e-4, atol=1e-6)
