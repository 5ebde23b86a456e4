"""What there is to choose from, as tables on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tepo.config import recipe_names, recipe_text
from tepo.data import task_names


def list_recipes() -> None:
    """The packaged recipes, each with the first line of its comment, and the tasks."""
    table = Table(title="recipes: tepo train --config NAME", title_justify="left")
    table.add_column("name")
    table.add_column("what it does")
    for recipe in recipe_names():
        about = [line.removeprefix("# ") for line in recipe_text(recipe).splitlines() if line.startswith("# ")]
        table.add_row(recipe, about[0] if about else "")
    console = Console()
    console.print(table)
    console.print(f"tasks for data.name: {', '.join(task_names())}, gym:TASK, a file, or a hub id", markup=False)


def list_objectives() -> None:
    """The objectives, and what each is made of."""
    from tepo.objectives import describe

    console = Console()
    separated = console.width < 140  # where most rows take more than one line
    table = Table(title="objectives: objective=NAME", title_justify="left", show_lines=separated)
    for column in describe.COMPACT:
        table.add_column(column, no_wrap=column == "name")
    for row in describe.compact_all():
        table.add_row(*(row[column] for column in describe.COMPACT))
    console.print(table)
    console.print("all settings: tepo objectives --markdown; equalities: tepo objectives --relatives", markup=False)
