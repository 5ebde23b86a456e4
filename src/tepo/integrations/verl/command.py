"""`tepo verl`: a recipe as verl's command, printed, checked against what is installed, and run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tepo.config.recipe import Recipe
from tepo.errors import TepoError
from tepo.integrations.verl.estimate import summary
from tepo.integrations.verl.overrides import verl_overrides
from tepo.integrations.versions import check_version

MAIN = "verl.trainer.main_ppo"
TESTED = "0.9."
NEEDED = ("ray", "hydra", "transfer_queue", "wrapt", "vllm")
"""Modules without which a run cannot start."""


def run_verl(recipe: Recipe, dry_run: bool = False) -> int:
    """Print verl's command for a recipe and run it; -> its exit status. dry_run: print alone, nothing is written.

    Before it runs: versions are checked, and the problems are written as verl's Parquet files below `output`. Raises
    TepoError for keys that verl has no counterpart for, and for an environment in which the run could not start.
    """
    overrides = verl_overrides(recipe)
    tensorboard = str(Path(recipe.output).absolute() / "tensorboard")
    print(printed(overrides, tensorboard))
    faults = environment_faults()
    if dry_run:
        notes = [summary(recipe), *(faults or ["the installed versions are those tested"])]
        print("\n".join(f"note: {note}" for note in notes))
        return 0
    if faults:
        raise TepoError("\n".join(faults))
    from tepo.data import load_task
    from tepo.integrations.verl.parquet import write_parquet

    write_parquet(load_task(recipe.data, recipe.seed), Path(recipe.output).absolute() / "data")
    command = [sys.executable, "-m", MAIN, *overrides]
    return subprocess.run(command, env=os.environ | {"TENSORBOARD_DIR": tensorboard}, check=False).returncode


def printed(overrides: list[str], tensorboard: str) -> str:
    """The command as a shell takes it, one override a line."""
    lines = [f"TENSORBOARD_DIR={shlex.quote(tensorboard)} python -m {MAIN}", *map(shlex.quote, overrides)]
    return " \\\n    ".join(lines)


def environment_faults() -> list[str]:
    """Why a run could not start in this environment, one line each."""
    if find_spec("verl") is None:
        return ["verl is not installed and nothing was checked: pip install 'tepo[verl]' vllm"]
    faults = []
    try:
        check_version("verl", TESTED)
    except ImportError as error:
        faults.append(str(error))
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        faults.append(f"verl needs {', '.join(missing)}: pip install 'tepo[verl]' vllm")
    try:
        trl = version("trl")
    except PackageNotFoundError:
        return faults
    if find_spec("trl.experimental.ppo") is None and not _has_value_head(trl):
        faults.append(
            f"TRL {trl} is installed beside verl, whose workers look for a class in it that it no longer has and do "
            "not start: use an environment without TRL (pip uninstall trl)"
        )
    return faults


def _has_value_head(trl: str) -> bool:
    """Whether this TRL still has, at the top, the class that verl 0.9 patches (the last to have it: 0.27)."""
    major, minor = (int(part) for part in trl.split(".")[:2])
    return (major, minor) <= (0, 27)
