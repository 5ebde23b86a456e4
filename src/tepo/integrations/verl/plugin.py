"""The entry point of the group `verl.plugins`: registers what is ours when verl's registries come into being.

verl loads it at the end of `import verl`, in every process, and passes over errors in silence: a version that was not
tested is therefore logged too, and nothing is registered, so that verl does not know the loss that it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from tepo.integrations.versions import check_version

try:
    check_version("verl", "0.9.")
except ImportError as error:
    logging.getLogger(__name__).error("%s", error)
    raise

from wrapt import register_post_import_hook


def _imports(module: str) -> Callable[[ModuleType], None]:
    def hook(_: ModuleType) -> None:
        import_module(module)

    return hook


# Hooks, because verl's trainers take seconds to import and most of its processes have no use for them.
register_post_import_hook(_imports("tepo.integrations.verl.losses"), "verl.trainer.ppo.core_algos")
register_post_import_hook(_imports("tepo.integrations.verl.trainer"), "verl.trainer.ppo.v1.trainer_sync")
