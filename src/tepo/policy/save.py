"""Saving a model in Hugging Face format."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model (an adapter alone where there is one) and the tokenizer to a folder, as safetensors."""
    adapter = hasattr(model, "get_base_model")
    # peft would ask the hub whether the vocabulary was resized; here it never is.
    options: dict[str, Any] = {"save_embedding_layers": False} if adapter else {}
    model.save_pretrained(folder, **options)
    if adapter:  # peft's model card: a form that nobody filled in, with the folders of this machine
        (folder / "README.md").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
