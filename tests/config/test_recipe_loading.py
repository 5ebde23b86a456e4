"""Recipes: what they resolve to, and what is said when they cannot be used."""

from pathlib import Path

import pytest

from tepo.config import DEFAULT_RECIPE, Recipe, load_recipe, recipe_names
from tepo.errors import TepoError
from tepo.train.run_folder import to_yaml


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_loads_and_survives_being_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(written) == recipe


def test_overrides_go_on_top_of_the_recipe() -> None:
    recipe = load_recipe(DEFAULT_RECIPE, ["trainer.steps=7", "trainer.learning_rate=3e-5", "data.options.digits=2"])
    assert recipe.trainer.steps == 7
    assert recipe.trainer.learning_rate == 3e-5
    assert recipe.data.options == {"digits": 2}


def test_a_short_form_replaces_its_section_and_a_dotted_key_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("objective: {name: tepo, clip_low: 0.1}\nmodel: {name: embedded, dtype: bf16}\n")
    assert load_recipe(file, ["objective=grpo"]).objective.build().surrogate.low == 0.2
    assert load_recipe(file, ["model=smollm2"]).model.dtype == "fp32"
    assert load_recipe(file, ["model.name=smollm2"]).model.dtype == "bf16"


def test_a_short_form_in_the_file_can_be_refined() -> None:
    recipe = load_recipe(None, ["objective=tepo", "objective.kl_mask.beta=0.5", "objective.clip_high=0.1"])
    objective = recipe.objective.build()
    assert objective.surrogate.high == 0.1
    assert objective.terms[0].beta == 0.5  # type: ignore[attr-defined]


FAULTS = {
    "mistyped key": (["trainer.learning_rat=1"], ["trainer.learning_rat", "trainer.learning_rate", "unknown key"]),
    "key in the wrong section": (["steps=4"], ["steps", "trainer.steps"]),
    "key below a value": (["trainer.steps.x=4"], ["trainer.steps"]),
    "word for a number": (["trainer.steps=ten"], ["trainer.steps", "ten", "integer"]),
    "fraction for a count": (["trainer.steps=1.5"], ["trainer.steps", "1.5"]),
    "zero steps": (["trainer.steps=0"], ["trainer.steps", "greater than or equal to 1"]),
    "negative rate": (["trainer.learning_rate=-1"], ["trainer.learning_rate", "greater than 0"]),
    "unknown objective": (["objective=grop"], ["objective", "grop", "grpo"]),
    "unknown option of an objective": (["objective.clip_lo=3"], ["clip_lo", "clip_low"]),
    "option that the objective does not use": (
        ["objective=grpo", "objective.length_normalizer=4"],
        ["length_normalizer", "SequenceMean"],
    ),
    "option out of range": (["objective.clip_low=1.5"], ["clip_low", "1.5"]),
    "unknown choice inside an option": (["objective.kl_mask.target=future"], ["kl_mask.target", "future", "old"]),
    "truth value for a coefficient": (["objective.kl_mask=true"], ["kl_mask.beta", "True"]),
    "server of another engine": (["rollout.vllm_server=http://host:1"], ["rollout", "vllm_server", "transformers"]),
    "server without a scheme": (
        ["rollout.engine=vllm", "rollout.vllm_server=host:8000"],
        ["rollout.vllm_server", "host:8000"],
    ),
    "truncated sampling": (["rollout.top_p=0.9"], ["rollout.top_p", "0.9", "ratio"]),
    "greedy training": (["rollout.temperature=0"], ["rollout.temperature", "greater than 0"]),
    "prompts that cannot be shared out": (
        ["trainer.prompts_per_rollout=15", "trainer.updates_per_rollout=4"],
        ["prompts_per_rollout (15)", "updates_per_rollout (4)"],
    ),
    "group of one": (["trainer.responses_per_prompt=1"], ["responses_per_prompt", "at least 2"]),
    "two treatments of truncation": (
        ["trainer.overlong_filtering=true", "reward.overlong.cache=5"],
        ["overlong_filtering", "reward.overlong"],
    ),
    "unknown precision": (["model.dtype=fp8"], ["model.dtype", "fp8", "bf16"]),
    "unknown tracker": (["trackers=[mlfow]"], ["trackers", "mlfow", "wandb"]),
    "section given as a value": (["trainer=5"], ["trainer", "5"]),
    "not key=value": (["--steps"], ["--steps", "key=value"]),
    "empty key": (["=3"], ["=3", "key=value"]),
    "broken yaml value": (["trainer.betas=[0.9"], ["trainer.betas=[0.9"]),
    "missing interpolation": (["trainer.steps=${nothing}"], ["trainer.steps", "nothing"]),
    "unknown column": (["data.columns.problm=q"], ["data.columns.problm", "data.columns.problem"]),
    "negative seed": (["seed=-1"], ["seed", "greater than or equal to 0"]),
    "empty output": (["output="], ["output"]),
}


@pytest.mark.parametrize(("overrides", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_named(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(TepoError) as caught:
        load_recipe(DEFAULT_RECIPE, overrides)
    message = str(caught.value)
    for part in named:
        assert part in message
    assert "pydantic" not in message
    assert "validation error" not in message


def test_all_faults_of_a_recipe_are_told_at_once() -> None:
    with pytest.raises(TepoError) as caught:
        load_recipe(DEFAULT_RECIPE, ["trainer.stepz=1", "model.dtyp=fp32"])
    assert "trainer.stepz" in str(caught.value)
    assert "model.dtyp" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"trainer: [1\n", "cannot be read"),
        (b"- 1\n- 2\n", "list"),
        (b"\xff\xfe\x00", "byte 1 is not UTF-8"),
        (b"just a word\n", "key"),
    ],
)
def test_broken_recipe_files(content: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(content)
    with pytest.raises(TepoError, match=named) as caught:
        load_recipe(file)
    assert str(file) in str(caught.value)


def test_missing_recipe() -> None:
    with pytest.raises(TepoError, match=r"no_such\.yaml does not exist"):
        load_recipe("no_such.yaml")
    with pytest.raises(TepoError, match="did you mean arithmetic"):
        load_recipe("arithmetc")


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("")
    assert load_recipe(file) == Recipe()
