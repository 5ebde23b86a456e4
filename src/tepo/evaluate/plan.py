"""What `tepo eval` is asked to do: which data sets, how many responses to a problem, at which temperature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo.config import DEFAULT_RECIPE, Recipe, load_recipe
from tepo.data.problem import Protocol
from tepo.data.read import is_file_name
from tepo.errors import TepoError
from tepo.rollout import Sampling

PAPER_TEMPERATURE = 0.6
"""Of samples of a benchmark whose papers measure greedily, when samples are asked for all the same."""


@dataclass(frozen=True)
class Pass:
    """One measurement of a data set: `samples` responses to each problem."""

    kind: str
    """`sampled` or `greedy`."""
    samples: int
    sampling: Sampling


def data_names(data: Sequence[str]) -> list[str]:
    """`["a,b", "c"]` as a, b, c. Raises TepoError for a name that is there twice."""
    names = [name.strip() for group in data for name in group.split(",") if name.strip()]
    for name in names:
        if names.count(name) > 1:
            raise TepoError(f"--data names {name} twice")
    return names


def recipe_for(model: str, data: str | None, config: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe that a model is measured with on one data set: `NAME`, `NAME=FILE`, or a file, all of whose problems
    are then asked; None is the recipe's own.

    Without `config`, a checkpoint brings the recipe of its run, and everything else the defaults.
    """
    folder = Path(model).expanduser().absolute().parent
    own = folder.parent / "config.yaml"
    # Any other config.yaml two folders up has nothing to do with the model.
    source = config or (str(own) if folder.name == "checkpoints" and own.is_file() else None)
    if source is None and data in (None, DEFAULT_RECIPE):
        source = DEFAULT_RECIPE
    chosen = [f"model.name={json.dumps(model)}"]
    if data is not None:
        name, equals, file = data.partition("=")
        chosen.append(f"data={json.dumps(name)}")
        if equals or is_file_name(name):
            chosen.append(f"data.test_file={json.dumps(file if equals else name)}")
    return load_recipe(source, [*chosen, *overrides])


def passes(recipe: Recipe, protocol: Protocol | None, samples: int | None, temperature: float | None) -> list[Pass]:
    """What is measured.

    protocol: the custom of a benchmark; None is for data of one's own: sampled as the recipe says, and greedy.
    samples, temperature: what the user asks for in place of either.

    Raises TepoError for several greedy responses, which would all be the same.
    """
    limit, config, stop = recipe.rollout.max_response_tokens, recipe.evaluation, tuple(recipe.rollout.stop)
    if temperature == 0 and (samples or 1) > 1:
        raise TepoError(f"--samples {samples} at --temperature 0: greedy responses to a problem are all the same")
    greedy = Pass("greedy", 1, Sampling(0.0, limit, stop=stop))
    if temperature == 0:
        return [greedy]

    def sampled(warmth: float, count: int) -> Pass:
        return Pass("sampled", count, Sampling(warmth, limit, config.top_p, config.top_k, stop))

    if protocol is None:
        own = recipe.rollout.temperature if config.temperature is None else config.temperature
        one = sampled(own if temperature is None else temperature, samples or config.samples)
        return [one, greedy] if config.greedy else [one]
    if samples is None and temperature is None and protocol.temperature == 0:
        return [greedy]
    warmth = temperature or protocol.temperature or PAPER_TEMPERATURE
    return [sampled(warmth, samples or protocol.samples)]
