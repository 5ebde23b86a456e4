"""How an objective or a task is named with settings of its own: `tepo+kl_mask=null+trainer.updates_per_rollout=8`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from tepo.config import Recipe
from tepo.errors import TepoError

THE_SAME = ("seed", "output", "model", "data", "evaluation", "checkpoint", "trackers")
"""Keys that an objective cannot bring: what is compared starts, meets its problems and is measured alike."""
OF_THE_COMPARISON = ("seed", "output")


@dataclass(frozen=True)
class Spec:
    """A name and the settings that go with it. text: as it was given, and shown; overrides: for the recipe."""

    text: str
    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """A name for a folder."""
        short = PurePath(self.name).stem if self.name.endswith((".jsonl", ".json", ".parquet")) else self.name
        return re.sub(r"[^\w.=-]+", "_", short + self.text[len(self.name) :])


def parse_spec(text: str, section: Literal["objective", "data"]) -> Spec:
    """`NAME+key=value+...`: a key is one of the section, unless it begins with a section of the recipe.

    Raises TepoError for a setting without a key, and for keys that must be the same for all that is compared.
    """
    name, *settings = re.split(r"\+(?=[A-Za-z_][\w.]*=)", text.strip())
    if not name or "=" in name:
        raise TepoError(f"{text!r}: a name is wanted, with settings after it as in tepo+kl_mask=null; found {name!r}")
    fixed = THE_SAME if section == "objective" else OF_THE_COMPARISON
    overrides = [f"{section}={name}"]
    for setting in settings:
        top = re.split(r"[.=]", setting, maxsplit=1)[0]
        if top in fixed:
            raise TepoError(
                f"{text!r}: {top} is the same for everything that is compared; it cannot be set for one {section}"
            )
        overrides.append(setting if top in Recipe.model_fields else f"{section}.{setting}")
    return Spec(text.strip(), name, tuple(overrides))


def parse_specs(text: str, section: Literal["objective", "data"]) -> list[Spec]:
    """Specs between commas; commas in brackets are part of a value. Raises TepoError for one that is there twice."""
    specs = [parse_spec(part, section) for part in _split(text)]
    _once([spec.text for spec in specs], text)
    _once([spec.slug for spec in specs], text)
    return specs


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _once(names: Sequence[str], text: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TepoError(f"{text!r}: {', '.join(twice)} is there more than once")
