"""What a comparison runs: a recipe for each task, seed and objective, and the folder where each belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo.config import Recipe, load_recipe
from tepo.errors import TepoError
from tepo.report.compare.spec import Spec


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; its recipe says everything, `output` and `seed` included."""

    task: str
    objective: str
    recipe: Recipe

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output)

    @property
    def name(self) -> str:
        return f"{self.task}, {self.objective}, seed {self.seed}"


def make_plan(
    source: str, overrides: Sequence[str], objectives: Sequence[Spec], tasks: Sequence[Spec], seeds: int, output: Path
) -> list[Cell]:
    """All runs, seed by seed, so that what is finished at any time can be compared in pairs.

    The seeds are that of the recipe and the following ones: a seed decides the order of the problems, what is held out
    and every draw, for all objectives alike. No tasks: the one of the recipe. Raises TepoError for what cannot run.
    """
    base = load_recipe(source, overrides)
    if not base.evaluation.after:
        raise TepoError("evaluation.after = False: a comparison needs the accuracy at the end of each run; leave it on")
    cells = []
    for task in tasks or (None,):
        for seed in range(base.seed, base.seed + seeds):
            for objective in objectives:
                of_task = [] if task is None else _task_overrides(task, base)
                recipe = load_recipe(source, [*overrides, *of_task, *objective.overrides])
                name = base.data.name if task is None else task.text
                where = Spec(name, name, ()).slug if task is None else task.slug
                keep = recipe.checkpoint.model_copy(update={"keep": recipe.checkpoint.keep or 1})
                folder = output / where / objective.slug / f"seed_{seed}"
                changes = {"seed": seed, "output": str(folder), "checkpoint": keep}
                cells.append(Cell(name, objective.text, recipe.model_copy(update=changes)))
    return cells


def _task_overrides(task: Spec, base: Recipe) -> list[str]:
    """The recipe's own task keeps what the recipe says of it; another one starts from the defaults."""
    if task.name == base.data.name:
        return list(task.overrides[1:])
    return list(task.overrides)
