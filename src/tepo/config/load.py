"""From a recipe file and `key=value` overrides to a validated Recipe, with errors that name the key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from tepo.config.base import Section
from tepo.config.recipe import SHORT_FORMS, ObjectiveConfig, Recipe
from tepo.errors import TepoError

DEFAULT_RECIPE = "arithmetic"
"""What `tepo train` alone runs."""


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = files("tepo.config") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML of a packaged recipe. Raises TepoError for an unknown name."""
    if name not in recipe_names():
        nearest = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise TepoError(
            f"no recipe named {name!r}{hint}; packaged: {', '.join(recipe_names())}; or a path to a .yaml file"
        )
    return (files("tepo.config") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, put the overrides on top and validate the whole.

    source: path of a YAML file, or the name of a packaged recipe; None is the defaults of every key.
    overrides: `a.b=value`, values in YAML; a short form (`model=PATH`) replaces its section, `model.name=PATH` keeps
        the rest of it.
    Raises TepoError naming the key, what was found, what is allowed and the nearest valid key.
    """
    tree = {} if source is None else _read(str(source))
    for override in overrides:
        tree = _apply(tree, override)
    return validate(tree, str(source or "of defaults"))


def validate(tree: dict[str, Any], origin: str) -> Recipe:
    """A Recipe from plain values. Raises TepoError with one line for each fault."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise TepoError("\n".join([f"recipe {origin} cannot be used:", *(f"  {line}" for line in lines)])) from None


def _read(source: str) -> dict[str, Any]:
    is_path = source.endswith((".yaml", ".yml")) or Path(source).exists()
    if Path(source).is_dir():
        raise TepoError(f"recipe {source} is a folder; a YAML file or the name of a packaged recipe is wanted")
    if is_path and not Path(source).is_file():
        raise TepoError(f"recipe file {source} does not exist; packaged recipes: {', '.join(recipe_names())}")
    try:
        text = Path(source).read_text(encoding="utf-8") if is_path else recipe_text(source)
        loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except UnicodeDecodeError as error:
        raise TepoError(f"recipe {source}: byte {error.start + 1} is not UTF-8; the file must be UTF-8") from None
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise TepoError(f"recipe {source} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise TepoError(f"recipe {source} holds a {type(loaded).__name__}; keys with values are wanted")
    return {str(key): value for key, value in loaded.items()}


def _apply(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, _ = override.partition("=")
    if not equals or not key.strip() or key != key.strip():
        raise TepoError(f"override {override!r} is not of the form key=value (for example trainer.steps=100)")
    section, _, rest = key.partition(".")
    if section in SHORT_FORMS and isinstance(tree.get(section), str) and rest:
        tree = tree | {section: {"name": tree[section]}}
    if section in SHORT_FORMS and not rest:
        tree = {name: value for name, value in tree.items() if name != section}
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(tree, OmegaConf.from_dotlist([override])), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise TepoError(f"override {override!r} cannot be applied: {' '.join(str(error).split())}") from None
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The Section that a field may hold, whether optional or not."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            yield candidate


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key below a section, dotted."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for nested in _sections(field.annotation):
            yield from _keys(nested, f"{prefix}{name}.")


def _explain(detail: ErrorDetails) -> str:
    """One validation error as `key: what was found; what is allowed`."""
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        section: type[BaseModel] = Recipe
        for part in path[:-1]:
            section = next(_sections(section.model_fields[part].annotation), section)
        nearest = (
            [known for known in _keys(Recipe) if known.split(".")[-1] == path[-1]]
            or difflib.get_close_matches(key, _keys(Recipe), n=1, cutoff=0.7)
            or difflib.get_close_matches(path[-1], section.model_fields, n=1)
        )
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        where = f"in {'.'.join(path[:-1])}" if path[:-1] else "at the top"
        return f"{key}: unknown key{hint}; allowed {where}: {', '.join(section.model_fields)}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and issubclass(next(_sections(_annotation(path)), Section), ObjectiveConfig):
        return f"{key}: {message}"
    if detail["type"] == "value_error" and isinstance(detail["input"], dict | BaseModel):
        return f"{key}: {message}" if key else message
    return f"{key} = {detail['input']!r}: {message[0].lower()}{message[1:]}"


def _annotation(path: Sequence[str]) -> Any:
    section: type[BaseModel] = Recipe
    annotation: Any = None
    for part in path:
        if part not in section.model_fields:
            return None
        annotation = section.model_fields[part].annotation
        section = next(_sections(annotation), Section)
    return annotation
