"""Which tokens end a response, and what fills rows up (bug 10)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from models import END, PAD, SECOND_END, VOCABULARY, character_tokenizer, random_rows, tiny_model
from transformers import GenerationConfig

from tepo.errors import TepoError
from tepo.policy import Policy


def test_all_end_tokens_count() -> None:
    """Those of the generation config, which may be several, of the model's config, and the tokenizer's own."""
    model = tiny_model(eos_token_id=[5])
    model.generation_config = GenerationConfig(eos_token_id=[SECOND_END, 7])
    assert Policy(model, character_tokenizer()).end_tokens == {SECOND_END, 5, 7, END}
    model.generation_config = GenerationConfig(eos_token_id=SECOND_END)
    assert Policy(model, character_tokenizer(eos_token=None)).end_tokens == {SECOND_END, 5}


def test_the_tokenizers_end_token_is_enough() -> None:
    model = tiny_model(eos_token_id=None)
    model.generation_config = GenerationConfig()
    assert Policy(model, character_tokenizer()).end_tokens == {END}


def test_the_token_0_can_be_the_end_token() -> None:
    model = tiny_model(eos_token_id=0)
    model.generation_config = GenerationConfig(eos_token_id=0)
    assert Policy(model, character_tokenizer(eos_token=None)).end_tokens == {0}


def test_no_end_token_is_an_error() -> None:
    model = tiny_model(eos_token_id=None)
    model.generation_config = GenerationConfig()
    with pytest.raises(TepoError, match="names an end token"):
        Policy(model, character_tokenizer(eos_token=None))


def test_pad_equal_to_end_leaves_the_end_token_an_end_token() -> None:
    """Bug 10: the end token is scored like any other though it also fills rows."""
    same = Policy(tiny_model(), character_tokenizer(pad_token="<end>"))
    other = Policy(tiny_model(), character_tokenizer())
    assert same.pad_token == END
    assert END in same.end_tokens
    assert other.pad_token == PAD
    rows = random_rows(4)
    rows[0] = type(rows[0])(rows[0].prompt, [*rows[0].response, END])
    scores = same.score(rows)
    assert len(scores.logp) == sum(len(row.response) for row in rows)
    assert scores.logp.tolist() == other.score(rows).logp.tolist()


def test_without_a_padding_token_an_end_token_serves() -> None:
    policy = Policy(tiny_model(), character_tokenizer(pad_token=None))
    assert policy.pad_token in policy.end_tokens


def test_a_padding_token_that_the_model_does_not_have_is_not_used() -> None:
    """A `[PAD]` added to the tokenizer alone has no embedding; rows of unequal length must still be scored."""
    tokenizer = character_tokenizer(pad_token="[PAD]")
    assert tokenizer.pad_token_id == VOCABULARY
    policy = Policy(tiny_model(), tokenizer)
    assert policy.pad_token in policy.end_tokens
    policy.score(random_rows(3))


def test_the_context_is_the_models() -> None:
    assert Policy(tiny_model("gpt2", max_position_embeddings=48), character_tokenizer()).context_length == 48
    assert Policy(tiny_model(), character_tokenizer()).context_length == 64
    policy = Policy(tiny_model(), character_tokenizer())
    policy.model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert policy.context_length is None
