"""One seed for each purpose: nothing random in a run has a state that would have to be saved."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2**63) for one purpose, such as ("rollout", 12); different purposes are unrelated."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
