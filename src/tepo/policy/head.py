"""From hidden states to what the objectives read, a chunk of tokens at a time.

The matrix [tokens, vocabulary] never exists whole: each chunk's logits are made, reduced to one number a token and,
where a gradient is wanted, made again in the backward pass. Log-prob and entropy, which every objective reads, have a
backward pass of their own; the other outputs have autograd's.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK_ELEMENTS = 2**24
"""Logits (tokens x vocabulary) computed at once: 64 MiB in fp32."""

BLOCK_ELEMENTS = 2**21
"""Logits of a chunk reduced at once on a processor: what is made of them on the way fits into its cache."""


@dataclass(frozen=True)
class HeadOutput:
    """Values [N] in fp32 or wider; entropy in nats. For the others see TokenBatch; None when not asked for."""

    logp: Tensor
    entropy: Tensor
    entropy_direction: Tensor | None = None
    top_entropy: Tensor | None = None
    exact_kl: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """The model's own output layer with its scaling and soft-capping: hidden states [C, D] -> logits [C, V] in fp32.

    In mixed precision the rest of the model runs in bf16 and this layer does not: its rounding would be larger than
    the range that sequence-level ratios are clipped to.
    """

    layer: nn.Module
    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Raises ValueError for a model without an output layer."""
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings: a causal language model is wanted")
        config = model.config.get_text_config()
        # Granite divides the logits, Cohere multiplies them, Gemma 2 caps them.
        factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(layer, factor, getattr(config, "final_logit_softcapping", None))

    def frozen(self) -> Head:
        """A copy that stays as it is now while the model is trained on."""
        return dataclasses.replace(self, layer=copy.deepcopy(self.layer).requires_grad_(False))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.scaled(self.project(hidden))

    def project(self, hidden: Tensor) -> Tensor:
        """What the layer itself gives."""
        with torch.autocast(hidden.device.type, enabled=False):
            projected: Tensor = self.layer(hidden.to(next(self.layer.parameters()).dtype))
        return projected

    def scaled(self, projected: Tensor) -> Tensor:
        """The logits, from what the layer gives."""
        logits = projected if projected.dtype == torch.float64 else projected.float()
        if self.factor != 1:
            logits = logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def unscaled(self, slopes: Tensor, logits: Tensor) -> Tensor:
        """The gradient of what the layer gives, from that of the logits; may be written over `slopes`."""
        if self.factor != 1:
            slopes = slopes.mul_(self.factor)
        return slopes if self.softcap is None else slopes.mul_(1 - (logits / self.softcap).square_())


def score_hidden(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    vocabulary: int,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    entropy_direction: bool = False,
    top_entropy: float | None = None,
    kl_target: tuple[Head, Tensor] | None = None,
) -> HeadOutput:
    """Log-probability and entropy of tokens from the hidden states that predict them.

    hidden: [N, D]; targets: [N] token ids; vocabulary: V, to size the chunks; temperature: divides the logits.
    entropy_gradient: let the entropy carry a gradient. entropy_direction: give it too (TokenBatch).
    top_entropy: give the entropy without this share of the vocabulary, the least likely of it, with a gradient.
    kl_target: head and hidden states [N, D] of another policy; gives exact_kl, with a gradient.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    if not entropy_direction and top_entropy is None and kl_target is None:
        trained = [parameter for parameter in head.layer.parameters() if parameter.requires_grad]
        return HeadOutput(*_LogpAndEntropy.apply(head, temperature, rows, entropy_gradient, hidden, targets, *trained))
    recompute = torch.is_grad_enabled() and len(hidden) > rows

    def score(part: Tensor, ids: Tensor, other: Tensor | None) -> dict[str, Tensor]:
        log_probs = torch.log_softmax(head(part) / temperature, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = _entropy(log_probs if entropy_gradient else log_probs.detach())
        outputs = {"logp": log_probs.gather(-1, ids[:, None]).squeeze(-1), "entropy": entropy}
        if entropy_direction:
            outputs["entropy_direction"] = _direction(log_probs.detach(), entropy.detach(), ids)
        if top_entropy is not None:
            outputs["top_entropy"] = _top_entropy(log_probs, top_entropy)
        if kl_target is not None and other is not None:
            with torch.no_grad():
                other_log_probs = torch.log_softmax(kl_target[0](other) / temperature, dim=-1)
            outputs["exact_kl"] = (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)
        return outputs

    chunks = []
    for part in _chunks(len(hidden), rows):
        other = None if kl_target is None else kl_target[1][part]
        arguments = (hidden[part], targets[part], other)
        chunks.append(checkpoint(score, *arguments, use_reentrant=False) if recompute else score(*arguments))
    return HeadOutput(**{name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]})


class _LogpAndEntropy(torch.autograd.Function):
    """(logp, entropy) [N] of tokens; keeps their hidden states and nothing of size V for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
        hidden: Tensor,
        targets: Tensor,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for part in _chunks(len(hidden), rows):
            logits, ids = head(hidden[part]), targets[part]
            for block in _blocks(logits):
                log_probs = torch.log_softmax(_tempered(logits[block], temperature), dim=-1)
                parts.append((log_probs.gather(-1, ids[block, None]).squeeze(-1), _entropy(log_probs)))
        logp, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, targets, entropy, *trained)
        ctx.head, ctx.temperature, ctx.rows = head, temperature, rows
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        hidden, targets, entropy, *trained = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        sums = [torch.empty_like(parameter) for parameter in trained]
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[4] else None
        through = _through_linear if type(ctx.head.layer) is nn.Linear else _through_any
        for part in _chunks(len(hidden), ctx.rows):
            outer = [None if gradient is None else gradient[part] for gradient in gradients]
            chunk = _Chunk(hidden[part].detach(), targets[part], entropy[part], outer, first=part.start == 0)
            of_states = through(ctx, chunk, trained, sums)
            if of_hidden is not None and of_states is not None:
                of_hidden[part] = of_states
        return None, None, None, None, of_hidden, None, *sums


@dataclass(frozen=True)
class _Chunk:
    """Tokens of a backward pass: states [C, D], targets, entropy, outer gradients of log-prob and of entropy [C]."""

    states: Tensor
    targets: Tensor
    entropy: Tensor
    outer: list[Tensor | None]
    first: bool


def _through_linear(ctx: Any, chunk: _Chunk, trained: list[Tensor], sums: list[Tensor]) -> Tensor | None:
    """Add a chunk's share to the sums of the trained parameters' gradients, or set them to the first chunk's.

    -> gradient of its states [C, D], if it is wanted. The chunk's slopes are written over its logits, and no other
    tensor of the size of the weight is made.
    """
    slopes = ctx.head.project(chunk.states)
    _slopes(ctx, slopes, chunk, slopes)
    with torch.autocast(slopes.device.type, enabled=False):
        for total in sums:
            if total.dim() == 2:
                total.addmm_(slopes.T, chunk.states.to(total.dtype), beta=0 if chunk.first else 1)
            elif chunk.first:
                torch.sum(slopes, 0, out=total)
            else:
                total += slopes.sum(0)
        return slopes @ ctx.head.layer.weight if ctx.needs_input_grad[4] else None


def _through_any(ctx: Any, chunk: _Chunk, trained: list[Tensor], sums: list[Tensor]) -> Tensor | None:
    """As `_through_linear`, for a layer that knows its own gradient alone, such as one with adapters."""
    states = chunk.states
    with torch.enable_grad():
        states.requires_grad_(ctx.needs_input_grad[4])
        projected = ctx.head.project(states)
    slopes = torch.empty_like(projected)
    _slopes(ctx, projected.detach(), chunk, slopes)
    wanted = [*trained, states] if states.requires_grad else trained
    with torch.autocast(states.device.type, enabled=False):
        found = torch.autograd.grad(projected, wanted, slopes)
    for total, share in zip(sums, found, strict=False):
        total.copy_(share) if chunk.first else total.add_(share)
    return found[-1] if states.requires_grad else None


def _slopes(ctx: Any, projected: Tensor, chunk: _Chunk, out: Tensor) -> None:
    """Write to `out` [C, V], which may be `projected` itself, the gradient of what the layer gives."""
    for block in _blocks(projected):
        logits = ctx.head.scaled(projected[block])
        gradients = (None if gradient is None else gradient[block] for gradient in chunk.outer)
        slopes = _logit_gradient(
            _tempered(logits, ctx.temperature), chunk.targets[block], chunk.entropy[block], *gradients
        )
        out[block] = ctx.head.unscaled(_tempered(slopes, ctx.temperature), logits)


def _logit_gradient(
    logits: Tensor, targets: Tensor, entropy: Tensor, of_logp: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """[C, V]: g (1[j = a] - p_j) - h p_j (log p_j + H), from the gradients g, h [C] of log-prob and entropy H."""
    log_probs = torch.log_softmax(logits, dim=-1)
    g = torch.zeros_like(entropy) if of_logp is None else of_logp
    if of_entropy is None:
        slopes = log_probs.exp_().mul_(-g[:, None])
    else:
        probs = log_probs.exp()
        slopes = log_probs.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(g[:, None]).mul_(probs)
    return slopes.scatter_add_(-1, targets[:, None], g[:, None])


def _chunks(tokens: int, rows: int) -> list[slice]:
    """At least one, which is empty where there are no tokens."""
    return [slice(start, start + rows) for start in range(0, max(tokens, 1), rows)]


def _blocks(logits: Tensor) -> list[slice]:
    rows = len(logits) if logits.device.type != "cpu" else BLOCK_ELEMENTS // logits.shape[-1]
    return _chunks(len(logits), max(1, rows))


def _tempered(values: Tensor, temperature: float) -> Tensor:
    return values if temperature == 1 else values / temperature


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _top_entropy(log_probs: Tensor, dropped: float) -> Tensor:
    """Entropy of the distribution without its int(dropped * V) least likely tokens, renormalised."""
    vocabulary = log_probs.shape[-1]
    kept = log_probs.topk(vocabulary - int(dropped * vocabulary), dim=-1).values
    return _entropy(torch.log_softmax(kept, dim=-1))


def _direction(log_probs: Tensor, entropy: Tensor, ids: Tensor) -> Tensor:
    """sum_j p_j S_j - S_a with S_j = p_j (log p_j + H)."""
    probs = log_probs.exp()
    slope = probs * (log_probs + entropy[:, None])
    return (probs * slope).sum(-1) - slope.gather(-1, ids[:, None]).squeeze(-1)
