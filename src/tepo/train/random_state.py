"""The random numbers of this process that are nobody's own: Python's, numpy's and torch's.

What tepo draws has seeds for each purpose (`tepo.seeds`); a user's reward function may draw from these.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Plain values and tensors."""
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numbers = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": {"key": numbers["key"].tolist(), "pos": int(numbers["pos"])}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`. A device that was not there then keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numbers = state["numpy"]["state"]
    key = np.array(numbers["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": {"key": key, "pos": numbers["pos"]}})
    torch.set_rng_state(state["torch"])
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)
