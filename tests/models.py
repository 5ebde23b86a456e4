"""Tiny random models of many families, and a character tokenizer: made here, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tepo.policy import Policy, Row, save_model

PAD, END, SECOND_END = 0, 1, 2
PIECES = ("<pad>", "<end>", "<stop>", *"0123456789+=# ", "12")
VOCABULARY = len(PIECES)

# Values that make what is special about a family visible in a tiny model: caps that bite, windows shorter than rows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "sliding_window": 4},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.3},
    "mistral": {"sliding_window": 4},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "phi": {},
}
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": END,
}


def tiny_model(
    family: str = "llama", *, seed: int = 0, vocabulary: int = VOCABULARY, **options: Any
) -> PreTrainedModel:
    """A model of width 16 with large random weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SHAPE | {"vocab_size": vocabulary} | FAMILIES.get(family, {}) | options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.4)
        else:  # away from the neutral 0 of biases and 1 of norms
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def character_tokenizer(**special: str | None) -> PreTrainedTokenizerFast:
    """One token a character, and one for the pair `12`, so that decoding and encoding again can change the tokens."""
    pieces = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<pad>"))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex("12|."), "isolated")
    pieces.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **({"eos_token": "<end>", "pad_token": "<pad>"} | special))


def tiny_policy(
    family: str = "llama",
    *,
    temperature: float = 1.0,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> Policy:
    model = tiny_model(family, seed=seed, **options).to(dtype)
    return Policy(model, character_tokenizer(), temperature, autocast)


def model_folder(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A tiny model and its tokenizer, saved."""
    save_model(tiny_model(family, **options), character_tokenizer(), folder)
    return folder


def random_rows(count: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Row]:
    """Prompts of 1 to 9 and responses of 1 to 9 tokens, any ids, padding and end tokens among them."""
    generator = torch.Generator().manual_seed(seed)

    def ids() -> list[int]:
        length = int(torch.randint(1, 10, (), generator=generator))
        drawn: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
        return drawn

    return [Row(ids(), ids()) for _ in range(count)]


def plain_log_probs(policy: Policy, rows: Sequence[Row]) -> Tensor:
    """[N, V]: log-softmax of the model's own logits, each row alone, without padding, at the policy's temperature."""
    parts = []
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.response]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1]
        parts.append(torch.log_softmax(logits / policy.temperature, dim=-1))
    return torch.cat(parts)


def response_tokens(rows: Sequence[Row]) -> Tensor:
    """[N]: the response tokens of rows, one after the other."""
    return torch.tensor([token for row in rows for token in row.response])


def plain_scores(policy: Policy, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] by their definitions."""
    log_probs = plain_log_probs(policy, rows)
    logp = log_probs.gather(-1, response_tokens(rows)[:, None]).squeeze(-1)
    return logp, -(log_probs.exp() * log_probs).sum(-1)
