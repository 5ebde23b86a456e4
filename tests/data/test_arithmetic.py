"""The built-in task (worked addition) and the model shipped for it."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tepo.data import arithmetic
from tepo.data.problem import Problem
from tepo.errors import TepoError

COLUMN = re.compile(r"(\d)\+(\d)(\+1)?=(\d+)")
RESPONSE = re.compile(r"(?:\d\+\d(?:\+1)?=\d{1,2} )+####\d+")


def pairs(problems: list[Problem]) -> set[frozenset[int]]:
    return {frozenset((problem.info["a"], problem.info["b"])) for problem in problems}


def test_train_and_test_share_no_pair_and_repeat_none() -> None:
    train, test = arithmetic.generate(3, digits=2, train=2000, test=800)
    assert len(pairs(train)) == 2000
    assert len(pairs(test)) == 800
    assert not pairs(train) & pairs(test)
    assert len({problem.id for problem in train + test}) == 2800


def test_held_out_pairs_are_held_out_under_every_seed() -> None:
    held_out = pairs([p for seed in range(5) for p in arithmetic.generate(seed, train=0, test=500)[1]])
    trained = pairs([p for seed in range(5) for p in arithmetic.generate(seed, train=5000, test=0)[0]])
    assert not held_out & trained


def test_the_seed_decides() -> None:
    assert arithmetic.generate(7, train=50, test=20) == arithmetic.generate(7, train=50, test=20)
    assert arithmetic.generate(7, train=50, test=20) != arithmetic.generate(8, train=50, test=20)


@pytest.mark.parametrize("digits", [2, 3])
def test_the_first_problems_do_not_depend_on_how_many_are_asked_for(digits: int) -> None:
    few, many = arithmetic.generate(1, digits, train=10, test=9), arithmetic.generate(1, digits, train=3000, test=800)
    assert few == (many[0][:10], many[1][:9])


def test_known_problems_stay_the_same() -> None:
    """Run folders name their problems: a change here makes old and new runs incomparable."""
    train, test = arithmetic.generate(0, train=2, test=2)
    assert [problem.prompt for problem in train + test] == ["341+788=", "186+882=", "746+686=", "954+311="]


@pytest.mark.parametrize("digits", [1, 2])
def test_every_pair_has_one_number(digits: int) -> None:
    total = arithmetic.count_pairs(digits)
    found = {arithmetic.pair(number, digits) for number in range(total)}
    assert len(found) == total
    assert all(a >= b and len(str(a)) == len(str(b)) == digits for a, b in found)


def test_both_parts_hold_every_combination_of_final_digits() -> None:
    train, test = arithmetic.generate(0, digits=2, train=3000, test=800)
    for problems in (train, test):
        assert len({(p.info["a"] % 10, p.info["b"] % 10) for p in problems}) == 100


@given(seed=st.integers(), digits=st.integers(1, arithmetic.MAX_DIGITS))
def test_problems_are_as_described(seed: int, digits: int) -> None:
    train, test = arithmetic.generate(seed, digits, train=11, test=11)
    for problem in train + test:
        a, b = problem.info["a"], problem.info["b"]
        assert problem.prompt == f"{a}+{b}="
        assert problem.answer == str(a + b)
        assert problem.info["digits"] == len(str(a)) == len(str(b)) == digits
        # a carry turns ten of one column into one of the next: the digits' sum falls by nine
        assert 9 * problem.info["carries"] == digit_sum(a) + digit_sum(b) - digit_sum(a + b)


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


@given(a=st.integers(0, 10**9), b=st.integers(0, 10**9))
def test_every_demonstration_is_right(a: int, b: int) -> None:
    response = arithmetic.worked_response(a, b)
    assert RESPONSE.fullmatch(response)
    working, _, answer = response.partition(" ####")
    assert answer == str(a + b)
    columns = [COLUMN.fullmatch(word) for word in working.split(" ")]
    carry, digits = 0, ""
    for place, column in enumerate(columns):
        assert column is not None
        x, y, plus, total = column.groups()
        assert (int(x), int(y)) == (a // 10**place % 10, b // 10**place % 10)
        assert (plus is not None) == bool(carry)
        assert int(total) == int(x) + int(y) + carry
        carry, digits = int(total) // 10, str(int(total) % 10) + digits
    assert int(f"{carry}{digits}") == a + b


def test_the_example_of_the_documentation() -> None:
    assert arithmetic.worked_response(482, 739) == "2+9=11 8+3+1=12 4+7+1=12 ####1221"
    assert arithmetic.carries(482, 739) == 3


@pytest.mark.parametrize("digits", [0, 10, -1, 2.5, "3", True, None])
def test_impossible_digits_are_named(digits: object) -> None:
    with pytest.raises(TepoError, match=f"digits={re.escape(repr(digits))} .* 1 to 9"):
        arithmetic.generate(0, digits=digits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "count"), [("train", 45), ("test", 12)])
def test_more_problems_than_exist(name: str, count: int) -> None:
    sizes = {"train": 44, "test": 11}
    train, test = arithmetic.generate(0, digits=1, **sizes)
    assert len(train) == 44
    assert len(test) == 11
    with pytest.raises(TepoError, match=f"{name}={count} .* there are {sizes[name]}"):
        arithmetic.generate(0, digits=1, **{**sizes, name: count})


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_count_is_a_whole_number(count: object) -> None:
    with pytest.raises(TepoError, match="train="):
        arithmetic.generate(0, train=count)  # type: ignore[arg-type]


@pytest.mark.parametrize(("digits", "count"), [(1, 44), (2, 3276), (3, 20_000)])
def test_by_default_there_are_as_many_training_problems_as_exist_up_to_a_limit(digits: int, count: int) -> None:
    assert len(arithmetic.generate(0, digits, test=0)[0]) == count


def test_numbers_outside_the_range_are_errors() -> None:
    with pytest.raises(TepoError, match="no pair 55"):
        arithmetic.pair(55, 1)
    with pytest.raises(TepoError, match="negative"):
        arithmetic.worked_response(-1, 2)


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(str(resources.files("tepo"))) / "assets" / "embedded"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_the_model_is_small_and_finite(model: PreTrainedModel, folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= 4 * 1024 * 1024
    assert 500_000 < model.num_parameters() < 1_100_000
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_end_and_padding_differ(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for settings_ in (model.config, model.generation_config):
        assert settings_.eos_token_id == tokenizer.eos_token_id
        assert settings_.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template is None


def test_a_prompt_gets_nothing_added(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("482+739=")["input_ids"]
    assert len(ids) == 8
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(tokenizer("####12")["input_ids"]) == ["####", "1", "2"]


@settings(deadline=None)
@given(a=st.integers(0, 10**9), b=st.integers(0, 10**9))
def test_text_survives_encoding(tokenizer: PreTrainedTokenizerBase, a: int, b: int) -> None:
    text = arithmetic.prompt(a, b) + arithmetic.worked_response(a, b)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_foreign_characters_are_unknown_not_lost(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("1é\n#")["input_ids"] == [tokenizer.convert_tokens_to_ids("1")] + 3 * [tokenizer.unk_token_id]


def test_greedy_decoding_gives_worked_responses(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    _, problems = arithmetic.generate(0, train=0, test=64)
    encoded = tokenizer([problem.prompt for problem in problems], return_tensors="pt")
    out = model.generate(**encoded, do_sample=False, max_new_tokens=40)
    responses = tokenizer.batch_decode(out[:, encoded["input_ids"].shape[1] :])
    ended = [response.partition(tokenizer.eos_token) for response in responses]
    assert all(end and RESPONSE.fullmatch(text) for text, end, _ in ended)
    right = sum(text.endswith(f" ####{p.answer}") for (text, _, _), p in zip(ended, problems, strict=True))
    assert 0.4 < right / len(problems) < 0.95
