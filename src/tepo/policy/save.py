"""Saving a model in Hugging Face format."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model (an adapter alone where there is one) and the tokenizer to a folder, as safetensors."""
    # peft would ask the hub whether the vocabulary was resized; here it never is.
    options: dict[str, Any] = {"save_embedding_layers": False} if hasattr(model, "get_base_model") else {}
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
