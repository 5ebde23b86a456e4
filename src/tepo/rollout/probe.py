"""Whether the slots' attention stands in for a model's own."""

from __future__ import annotations

import weakref

import torch

from tepo.policy import Policy, Row
from tepo.rollout.slots import SlotDecoder

_probed: weakref.WeakKeyDictionary[Policy, str | None] = weakref.WeakKeyDictionary()


def why_no_slots(policy: Policy, capacity: int) -> str | None:
    """What about the model rules SlotDecoder out for rows of `capacity` tokens, or None.

    By what its config says of its layers, and by decoding a few tokens, once for each policy.
    """
    config = policy.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if other := kinds - {"full_attention", "sliding_attention"}:
        return f"layers of {', '.join(sorted(other))}"
    if window is not None and window < capacity:
        return f"a sliding window of {window} tokens"
    if policy not in _probed:
        _probed[policy] = _probe(policy)
    return _probed[policy]


def _probe(policy: Policy) -> str | None:
    """Rows of different lengths that enter one after the other, and one that leaves, against the whole rows at once."""
    rows = [Row([1, 2, 3], [4, 5, 6]), Row([2, 1], [3, 4])]
    rows = [
        Row([i % policy.vocabulary for i in row.prompt], [i % policy.vocabulary for i in row.response]) for row in rows
    ]
    decoder = SlotDecoder(policy, 3, 8)
    with policy.evaluating():
        whole, _ = policy.hidden_states(rows)
        try:
            with decoder.running():
                first = [decoder.admit([rows[0].prompt], [1])[0], decoder.step([rows[0].response[0]])[0]]
                second = [decoder.admit([rows[1].prompt], [2])[0]]
                decoder.keep([2, 0])
                last = decoder.step([rows[1].response[0], rows[0].response[1]])
        except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, RuntimeError) as error:
            return f"an attention that cannot be replaced ({type(error).__name__}: {error})"
    ours = torch.stack([*first, last[1], *second, last[0]])
    scale = float(whole.abs().max())
    if not torch.allclose(ours, whole, rtol=1e-3, atol=1e-3 * scale):
        return f"an attention that cannot be replaced (states differ by {float((ours - whole).abs().max()):.2g})"
    return None
