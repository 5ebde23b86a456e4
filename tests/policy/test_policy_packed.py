"""Packed rows that share their prompts, against the plain padded forward of transformers."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from models import FAMILIES, character_tokenizer, model_folder, tiny_model, tiny_policy
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from tepo.config.recipe import LoraConfig, ModelConfig
from tepo.policy import Policy, Row, attention, load_model, packed
from tepo.policy.packed import Packing

# Groups in one another, uneven lengths, responses and prompts of one token, a group of one, a group of such responses.
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 3, 3], [5], [9, 8, 7], [2, 2])
RESPONSES = (
    (0, [4, 4, 5, 6, 2, 9, 8]), (1, [5, 6, 7]), (0, [3]), (2, [1]), (1, [8] * 11), (0, [7, 0, 1]), (3, [6, 5, 4, 3]),
    (2, [5]), (1, [9]), (0, list(range(3, 15))),
)  # fmt: skip
ROWS = [Row(PROMPTS[prompt], response) for prompt, response in RESPONSES]
N = sum(len(row.response) for row in ROWS)
WEIGHTS = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
LORA = LoraConfig(rank=2, alpha=4.0)


@pytest.fixture(autouse=True)
def _small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.policy.policy.LEAST_WEIGHTS", 0)


def padded_loss(policy: Policy, rows: list[Row]) -> Tensor:
    """Weighted log-probs and entropies, by transformers' own forward on rows padded on the right."""
    ids = pad_sequence([torch.tensor([*row.prompt, *row.response]) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    log_probs = torch.log_softmax(policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits, -1)
    kept = torch.cat([log_probs[i, len(row.prompt) - 1 : len(row) - 1] for i, row in enumerate(rows)])
    targets = torch.tensor([token for row in rows for token in row.response])
    entropy = -(kept.exp() * kept).sum(-1)
    weights = WEIGHTS.to(kept.dtype)
    return (weights[0] * kept.gather(-1, targets[:, None])[:, 0] + weights[1] * entropy).sum()


def our_loss(policy: Policy, rows: list[Row]) -> Tensor:
    scores = policy.score(rows, entropy_gradient=True)
    weights = WEIGHTS.to(scores.logp.dtype)
    return (weights[0] * scores.logp + weights[1] * scores.entropy).sum()


def gradient(policy: Policy, loss: Tensor) -> Tensor:
    """One vector."""
    policy.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in policy.model.parameters() if p.grad is not None])


def relative_difference(policy: Policy) -> float:
    assert policy.packs
    ours, theirs = gradient(policy, our_loss(policy, ROWS)), gradient(policy, padded_loss(policy, ROWS))
    return float((ours - theirs).norm() / theirs.norm())


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Policy:
    torch.manual_seed(0)
    model, tokenizer = load_model(ModelConfig(name=str(folder), **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which is 0 in a fresh adapter, and with it the gradient of the other factor
            nn.init.normal_(parameter, std=0.2)
    return Policy(model.to(dtype), tokenizer)


@pytest.fixture(params=["merged", "padded"])
def either_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for CPUs, and the attention of other devices and masks."""
    if request.param == "padded":

        def padded(query: Tensor, key: Tensor, value: Tensor, groups: Any, allowed: Any, scale: float) -> Tensor:
            return original(query, key, value, groups, allowed or (lambda q, k: k <= q), scale)

        original = packed.shared_attention
        monkeypatch.setattr(packed, "shared_attention", padded)
        monkeypatch.setattr(attention._PrefixAttention, "apply", None)


@pytest.mark.parametrize("checkpointing", [False, True, "elementwise"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_are_those_of_the_padded_forward(
    family: str,
    lora: LoraConfig | None,
    checkpointing: bool | Literal["elementwise"],
    tmp_path: Path,
    either_attention: None,
) -> None:
    if lora:
        pytest.importorskip("peft")
    policy = load(model_folder(tmp_path / "model", family), lora=lora, gradient_checkpointing=checkpointing)
    assert relative_difference(policy) < 1e-5


class Operations(TorchDispatchMode):
    """Counts what is computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_elementwise_checkpointing_repeats_no_product_and_no_attention(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama")
    counts = {}
    for checkpointing in (False, True, "elementwise"):
        policy = load(folder, gradient_checkpointing=checkpointing)
        policy.score(ROWS)
        with Operations() as seen:
            policy.score(ROWS).logp.sum().backward()
        counts[checkpointing] = seen.counts
    attention_kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for name in ("mm", attention_kernel):
        assert 0 < counts[False][name] == counts["elementwise"][name] < counts[True][name]
    assert counts[False]["silu"] < counts["elementwise"]["silu"] == counts[True]["silu"]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries_in_float64(heads: int, either_attention: None) -> None:
    policy = tiny_policy("gpt2" if heads == 4 else "llama", num_key_value_heads=heads, dtype=torch.float64)
    # Norms and rotations of Llama are in fp32.
    assert relative_difference(policy) < (1e-12 if heads == 4 else 1e-6)


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f != "gemma2"), "gemma3_text", "cohere2", "mixtral"])
def test_families_that_share_prompts(family: str) -> None:
    """Sliding windows of 4 tokens among them, in all layers or in some."""
    options: dict[str, Any] = {
        "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "qwen2": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
        "mixtral": {"num_local_experts": 2},
    }
    assert relative_difference(tiny_policy(family, **options.get(family, {}))) < 1e-5


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {}, "attention is eager"),  # soft-capped attention
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention is eager"),  # attention sinks
        ("bloom", {}, "attention is eager"),  # ALiBi
        ("stablelm", {}, "cannot be replaced"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "do not give what padded ones give"),
    ],
)
def test_other_families_fall_back_and_say_why(family: str, options: dict[str, Any], reason: str) -> None:
    policy = tiny_policy(family, **options)
    assert policy.unpacked_because is not None
    assert reason in policy.unpacked_because
    ours, theirs = gradient(policy, our_loss(policy, ROWS)), gradient(policy, padded_loss(policy, ROWS))
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert policy.base.config._attn_implementation != packed.IMPLEMENTATION


def test_the_cap_on_attention_is_not_left_out() -> None:
    """transformers' sdpa, the default, computes Gemma 2 without its attn_logit_softcapping and says nothing."""
    model = tiny_model("gemma2")
    ids = torch.arange(3, 13)[None]
    before = model(input_ids=ids).logits
    policy = Policy(model, character_tokenizer())
    assert (policy.model(input_ids=ids).logits - before).abs().max() > 1e-3
    assert policy.base.config._attn_implementation == "eager"


class Reversed(LlamaForCausalLM):
    """An architecture that no list knows: its decoder looks at the order of what it is given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_hook(self._mix)

    @staticmethod
    def _mix(_: nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + 0.1 * output.last_hidden_state.roll(1, dims=1)
        return output


def test_an_unknown_architecture_is_never_silently_wrong() -> None:
    policy = Policy(Reversed(tiny_model().config), character_tokenizer())
    assert policy.unpacked_because == "packed rows do not give what padded ones give"


def test_a_layer_that_makes_its_own_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None)
    assert tiny_policy().unpacked_because == "its attention makes its mask itself"


def test_another_decoder_of_the_same_shape() -> None:
    """A critic's: its own weights, the policy's rows."""
    policy, other = tiny_policy(), tiny_policy(seed=1)
    critic = copy.deepcopy(tiny_model(seed=1).get_decoder())
    states, targets = policy.hidden_states(ROWS, critic)
    expected, _ = other.hidden_states(ROWS)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)
    assert targets.tolist() == [token for row in ROWS for token in row.response]


def test_every_prompt_is_there_once() -> None:
    packing = Packing.of(ROWS)
    assert len(packing.ids) == sum(map(len, PROMPTS)) + sum(len(row.response) - 1 for row in ROWS)
    assert len(packing.predicts) == N
    assert [group.prompt for group in packing.groups] == [9, 1, 3, 2]


def test_saving_a_model_does_not_save_its_attention(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.score(ROWS)
    policy.model.save_pretrained(tmp_path)
    assert packed.IMPLEMENTATION not in (tmp_path / "config.json").read_text()


def test_bf16_is_as_near_to_fp32_as_the_padded_forward(either_attention: None) -> None:
    exact, policy = tiny_policy(), tiny_policy(autocast=torch.bfloat16)
    assert policy.unpacked_because is None
    expected = gradient(exact, padded_loss(exact, ROWS))
    ours = gradient(policy, our_loss(policy, ROWS))
    with policy.precision():
        loss = padded_loss(policy, ROWS)
    theirs = gradient(policy, loss)
    assert (ours - expected).norm() < 1.2 * (theirs - expected).norm()


def kept_elements(prompt: int, responses: int, *, window: int | None = None) -> int:
    """Elements that the decoder keeps for the backward pass, each tensor counted once."""
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    policy = tiny_policy("llama" if window is None else "mistral", max_position_embeddings=512, **options)
    rows = [Row([5] * prompt, [6] * 4)] * responses
    assert policy.unpacked_because is None
    parameters = {p.data_ptr() for p in policy.model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = policy.hidden_states(rows)
    assert states.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("window", [None, 4])
def test_memory_grows_with_the_prompt_once_per_group(window: int | None) -> None:
    """Exactly: what 100 more tokens of prompt cost is the same for 2 responses and for 12."""
    few, many = (
        kept_elements(200, count, window=window) - kept_elements(100, count, window=window) for count in (2, 12)
    )
    assert few == many > 0


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_on_the_output_layer_and_tied_embeddings(tied: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = tiny_model(tie_word_embeddings=tied)
    if tied:  # whole: the weight gets gradients as an embedding and as an output layer
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        model = peft.get_peft_model(model, config)
    assert relative_difference(Policy(model, character_tokenizer())) < 1e-5


def test_a_backward_pass_inside_autocast_is_that_outside_of_it() -> None:
    """accelerate and users may call it there; the output layer stays in fp32."""
    policy = tiny_policy(autocast=torch.bfloat16)
    found = []
    for inside in (False, True):
        policy.model.zero_grad()
        loss = our_loss(policy, ROWS)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append(policy.base.get_output_embeddings().weight.grad.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
