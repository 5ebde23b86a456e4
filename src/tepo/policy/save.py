"""Saving a model in Hugging Face format."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model (an adapter alone where there is one) and the tokenizer to a folder, as safetensors."""
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
