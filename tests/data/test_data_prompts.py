"""Prompts as token ids: templates, instructions, and the begin token once."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tepo.data.problem import Problem
from tepo.data.prompts import drop_long_prompts, render_prompt, resolve_template
from tepo.errors import TepoError

WORDS = ["<unk>", "<bos>", "<eos>", "user", "system", "assistant", "two", "and", "three", "think", "kind", "Q", ":"]
ID = {word: index for index, word in enumerate(WORDS)}
CHAT = (
    "{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %} assistant : {% endif %}"
)
PROBLEM = Problem("p", "two and three", "5")


def tokenizer(*, adds_bos: bool = True, chat: bool = False) -> Any:
    core = Tokenizer(WordLevel(ID, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    if adds_bos:
        core.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = CHAT if chat else None
    return made


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


def test_plain_takes_the_tokenizers_own_begin_token_and_never_its_end_token() -> None:
    assert render_prompt(PROBLEM, tokenizer(), "plain") == ids("<bos> two and three")
    assert render_prompt(PROBLEM, tokenizer(adds_bos=False), "plain") == ids("two and three")
    with_bos = Problem("p", "<bos> two and three", "5")
    assert render_prompt(with_bos, tokenizer(), "plain") == ids("<bos> two and three")


def test_chat_has_one_begin_token_and_asks_for_a_response() -> None:
    made = render_prompt(PROBLEM, tokenizer(chat=True), "chat", system="kind", instruction="think")
    assert made == ids("<bos> system : kind user : two and three think assistant :")
    assert made.count(ID["<bos>"]) == 1


def test_chat_messages_keep_their_roles_and_a_system_message_of_the_recipe_replaces_theirs() -> None:
    messages = ({"role": "system", "content": "and"}, {"role": "user", "content": "two"})
    problem = Problem("p", messages, "2")
    assert render_prompt(problem, tokenizer(chat=True), "chat") == ids("<bos> system : and user : two assistant :")
    assert render_prompt(problem, tokenizer(chat=True), "chat", system="kind") == ids(
        "<bos> system : kind user : two assistant :"
    )
    assert render_prompt(problem, tokenizer(), "plain") == ids("<bos> and two")


def test_a_text_template_leaves_braces_alone() -> None:
    problem = Problem("p", "two", "2")
    assert render_prompt(problem, tokenizer(), "Q : {problem} think", instruction="and") == ids(
        "<bos> Q : two and think"
    )
    braces = Problem("p", "two {x} {0}", "2")
    assert len(render_prompt(braces, tokenizer(), "Q : {problem}")) > 4


def test_auto_takes_chat_where_there_is_one() -> None:
    assert resolve_template("auto", tokenizer(chat=True)) == "chat"
    assert resolve_template("auto", tokenizer()) == "plain"


def test_faults() -> None:
    with pytest.raises(TepoError, match="no chat template"):
        render_prompt(PROBLEM, tokenizer(), "chat")
    with pytest.raises(TepoError, match=r"data\.system: only a chat template"):
        render_prompt(PROBLEM, tokenizer(), "plain", system="kind")
    with pytest.raises(TepoError, match=r"contains \{problem\}"):
        render_prompt(PROBLEM, tokenizer(), "solve it")
    with pytest.raises(TepoError, match="no tokens"):
        render_prompt(Problem("p", " ", "1"), tokenizer(adds_bos=False), "plain")


def test_long_prompts_are_dropped_with_a_count() -> None:
    problems = [Problem(str(n), "two " * n, "1") for n in range(1, 6)]
    kept, dropped = drop_long_prompts(problems, lambda p: render_prompt(p, tokenizer(), "plain"), 4)
    assert ([problem.id for problem in kept], dropped) == (["1", "2", "3"], 2)
    with pytest.raises(TepoError, match=r"data\.max_prompt_tokens=1: all 5 prompts are longer"):
        drop_long_prompts(problems, lambda p: render_prompt(p, tokenizer(), "plain"), 1)
