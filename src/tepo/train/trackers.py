"""Where curves are shown beside metrics.jsonl: TensorBoard, W&B, trackio. None of them can stop a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from tepo.config import Recipe
from tepo.errors import TepoError
from tepo.train.run_folder import RunFolder


def check_installed(names: Sequence[str]) -> None:
    """Raise TepoError for a tracker whose package is not there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TepoError(f"trackers: {name} is not installed: pip install 'tepo[{name}]'")


class Trackers:
    """TensorBoard in the run folder, and others by name. One that fails is told once and left out from then on.

    folder: of the run; None shows nothing. step: where the run goes on; what a TensorBoard file of before says of later
    steps is hidden, and W&B and trackio go on with the run of the same identity and name.
    """

    def __init__(self, folder: RunFolder | None, recipe: Recipe, step: int, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.trackers: dict[str, GeneralTracker] = {}
        if folder is None:
            return
        name = folder.path.name
        options: dict[str, dict[str, Any]] = {
            "tensorboard": {"logging_dir": folder.path, "purge_step": step + 1 if step else 0},
            "wandb": {"name": name, "dir": folder.path, "id": folder.identity, "resume": "allow"},
            "trackio": {"name": name, "resume": "allow"},
        }
        config = flat(recipe.model_dump(mode="json"))
        for tracker in ("tensorboard", *recipe.trackers):
            self._try(tracker, partial(self._start, tracker, options[tracker], config))

    def _start(self, name: str, options: dict[str, Any], config: Mapping[str, Any]) -> None:
        tracker = LOGGER_TYPE_TO_CLASS[name]("tepo", **options)
        tracker.start()
        tracker.store_init_configuration(config)
        self.trackers[name] = tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Metrics of a step."""
        for name, tracker in list(self.trackers.items()):
            self._try(name, partial(tracker.log, dict(values), step=step))

    def close(self) -> None:
        """Close all of them."""
        for name, tracker in list(self.trackers.items()):
            self._try(name, tracker.finish)
        self.trackers.clear()

    def _try(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # another program's client: of its network and its disk anything can come
            self.trackers.pop(name, None)
            self.warn(
                f"tracker {name} failed and is left out from here on ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}); metrics.jsonl has everything"
            )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as dotted keys with values that trackers take."""
    found: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return found
