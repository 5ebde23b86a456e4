"""The policy: a causal language model, its tokenizer, and one function that scores response tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from tepo.errors import TepoError
from tepo.policy.head import Head, HeadOutput, score_hidden
from tepo.policy.packed import CannotPack, Packing, install, uninstall
from tepo.policy.row import Row, check_rows


@dataclass(frozen=True)
class TokenScores:
    """Values of the N response tokens of some rows, row after row. See TokenBatch.

    hidden: [N, D] states that predict the tokens; kept for the exact KL, without a gradient.
    """

    logp: Tensor
    entropy: Tensor
    entropy_direction: Tensor | None
    top_entropy: Tensor | None
    exact_kl: Tensor | None
    hidden: Tensor


LEAST_WEIGHTS = 1e6
"""Weights a layer, embeddings included, from which on rows are packed: SmolLM2-135M has 4.5e6, ours inside 2e5."""


class Policy:
    """A model that is trained or frozen. Both the old and the new log-probs and entropies come from `score`.

    temperature: divides the logits, as when sampling. autocast: dtype of the arithmetic inside the model, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        temperature: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.autocast = autocast
        disable_dropout(model)
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            self.base.set_attn_implementation(
                "eager"
            )  # the sdpa of transformers leaves the cap out and does not say so
        # What is left of training mode is gradient checkpointing, which transformers leaves out of evaluation mode.
        model.train(self.base.is_gradient_checkpointing)
        self.end_tokens = end_tokens(model, tokenizer)
        self.pad_token = pad_token(tokenizer, self.end_tokens, self.vocabulary)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model itself, inside adapters if there are any."""
        wrapped: Any = self.model
        base: PreTrainedModel = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
        return base

    @property
    def context_length(self) -> int | None:
        """The longest prompt and response that the model's positions allow, in tokens."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def _name(self) -> str:
        return self.model.config.name_or_path or type(self.base).__name__

    @property
    def head(self) -> Head:
        return Head.of(self.base)

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context in which the model's arithmetic runs."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def score(
        self,
        rows: Sequence[Row],
        *,
        entropy_gradient: bool = False,
        entropy_direction: bool = False,
        top_entropy: float | None = None,
        kl_target: tuple[Head, Tensor] | None = None,
    ) -> TokenScores:
        """Log-probs and entropies of the response tokens of `rows`, at the policy's temperature.

        Every row must have a token of prompt and one of response. kl_target: head and hidden states [N, D] of another
        policy for the same tokens. The other options: `score_hidden`.
        """
        with self.precision():
            hidden, targets = self.hidden_states(rows)
            out: HeadOutput = score_hidden(
                self.head,
                hidden,
                targets,
                self.vocabulary,
                self.temperature,
                entropy_gradient=entropy_gradient,
                entropy_direction=entropy_direction,
                top_entropy=top_entropy,
                kl_target=kl_target,
            )
        return TokenScores(**vars(out), hidden=hidden.detach())

    def hidden_states(self, rows: Sequence[Row], decoder: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """States [N, D] that predict the N response tokens of `rows`, row after row, and the tokens' ids [N].

        Rows with equal prompts share one pass over it where that pays (`packs`).
        decoder: another decoder of the same shape (a critic's) in the place of the policy's own.
        """
        check_rows(rows)
        targets = torch.tensor([token for row in rows for token in row.response], device=self.device)
        decoder = decoder or self.base.get_decoder()
        if not self.packs:
            return self._padded_states(rows, decoder), targets
        install(decoder)
        return Packing.of(rows).hidden_states(decoder, self.device), targets

    @functools.cached_property
    def packs(self) -> bool:
        """Whether rows are packed: where they can be, and the layers are large enough for it to pay.

        The attention of packed rows is called for one sequence after the other; in small layers the calls take longer
        than the padding and the repeated prompts that they save. One answer for all rows of a model: old and new
        entropies are compared, and must not differ by how they were computed.
        """
        decoder = self.base.get_decoder()
        layers = int(self.model.config.get_text_config().num_hidden_layers)
        weights = sum(parameter.numel() for parameter in decoder.parameters()) / layers
        return weights >= LEAST_WEIGHTS and self.unpacked_because is None

    def _padded_states(self, rows: Sequence[Row], decoder: nn.Module) -> Tensor:
        """The states [N, D] by way of one row a response, padded on the right."""
        ids, attention, predicts = (x.to(self.device) for x in _pad(rows, self.pad_token))
        states: Tensor = decoder(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return states[predicts]

    @functools.cached_property
    def unpacked_because(self) -> str | None:
        """None if packed rows give what padded ones give, tried once; else why rows are padded and prompts repeated."""
        tokens = [i % self.vocabulary for i in range(1, 9)]
        prompts = tokens[:3], tokens[3:4]
        rows = [Row(prompt, tokens[i:]) for i in (7, 0, 4) for prompt in prompts]
        decoder = self.base.get_decoder()
        try:
            with self.evaluating(), torch.autocast(self.device.type, enabled=False):
                install(decoder)
                packed = Packing.of(rows).hidden_states(decoder, self.device)
                padded = self._padded_states(rows, decoder)
            if torch.allclose(packed, padded, rtol=1e-3, atol=1e-3 * float(padded.abs().max())):
                return None
            reason = "packed rows do not give what padded ones give"
        except CannotPack as error:
            reason = str(error)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            reason = f"its decoder fails on packed rows ({type(error).__name__}: {error})"
        uninstall(decoder)
        return reason

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """`evaluating`, in the policy's precision, with the weights of its layers cast once.

        Autocast casts them anew in each call without a gradient, which for a decoding step costs as much as the step.
        """
        head = self.base.get_output_embeddings()
        layers = [
            module for module in self.base.modules() if isinstance(module, torch.nn.Linear) and module is not head
        ]
        whole = [layer.weight.data for layer in layers]
        try:
            for layer in layers if self.autocast is not None else ():
                layer.weight.data = layer.weight.data.to(self.autocast)
            with self.evaluating(), self.precision():
                yield
        finally:
            for layer, weight in zip(layers, whole, strict=True):
                layer.weight.data = weight

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def check_head(self) -> None:
        """Compare `score` with the model's own logits on a few tokens, and with decoding after a left-padded prompt.

        Packed rows are compared with padded ones before (`unpacked_because`).

        Raises TepoError when they differ: the model's output layer does something that tepo does not know of, or its
        positions or its cache do.
        """
        ids = torch.arange(1, 7, device=self.device) % self.vocabulary
        saved, self.temperature, self.autocast = (self.temperature, self.autocast), 1.0, None
        try:
            with self.evaluating():
                ours = self.score([Row(ids[:2].tolist(), ids[2:].tolist())]).logp
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0, 1:-1]
                decoded = self._decode(ids)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise TepoError(
                f"model {self._name}: it cannot be called as tepo calls models ({error}); this architecture is not "
                "supported"
            ) from error
        finally:
            self.temperature, self.autocast = saved
        for what, other in (("its own log-probs", logits), ("its log-probs when decoding", decoded)):
            theirs = torch.log_softmax(other.to(ours.dtype), -1).gather(-1, ids[2:, None]).squeeze(-1)
            if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
                raise TepoError(
                    f"model {self._name}: {what} {theirs.tolist()} differ from those that tepo trains on "
                    f"{ours.tolist()}; this architecture is not supported"
                )

    def _decode(self, ids: Tensor) -> Tensor:
        """Logits [K - 2, V] that predict ids[2:], from a cache over a prompt of two tokens behind two of padding."""
        decoder, head, cache = self.base.get_decoder(), self.head, DynamicCache(config=self.base.config)
        fed = torch.cat([ids.new_full((2,), self.pad_token), ids])
        real = torch.arange(len(fed), device=ids.device) >= 2
        logits = []
        for start, end in [(0, 4), *((i, i + 1) for i in range(4, len(fed) - 1))]:
            states = decoder(
                input_ids=fed[None, start:end],
                attention_mask=real[None, :end].long(),
                position_ids=(torch.arange(start, end, device=ids.device)[None] - 2).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(head(states.last_hidden_state[0, -1:]))
        return torch.cat(logits)


def _pad(rows: Sequence[Row], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> ids, attention mask, which positions predict a response token: [rows, longest], padded on the right."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    attention = torch.zeros((len(rows), width), dtype=torch.long)
    predicts = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor([*row.prompt, *row.response])
        attention[i, : len(row)] = 1
        predicts[i, len(row.prompt) - 1 : len(row) - 1] = True
    return ids, attention, predicts


def disable_dropout(model: PreTrainedModel) -> None:
    """Dropout would make the ratio noise: old and new log-probs must come from the same network."""
    for module in model.modules():
        # The rates of functional dropout are plain attributes: attention_dropout, resid_pdrop, layerdrop, ...
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        if isinstance(module, _DropoutNd):
            rates.append("p")
        for name in rates:
            setattr(module, name, 0.0)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token id that ends a response: the generation config may name several, the tokenizer one more."""
    named: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        named += value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not named:
        raise TepoError(
            f"model {model.config.name_or_path}: neither the generation config nor the tokenizer names an end token "
            "(eos_token_id); without one a response cannot end"
        )
    return frozenset(named)


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], vocabulary: int) -> int:
    """A token id to fill rows with. It is never attended to or scored: an end token serves as well.

    A padding token that was added to the tokenizer alone is not among the model's embeddings.
    """
    named = tokenizer.pad_token_id
    return int(named) if isinstance(named, int) and named < vocabulary else min(ends)
