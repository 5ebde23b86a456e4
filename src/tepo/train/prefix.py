"""Groups whose responses share a beginning that the policy sampled itself (SKPO)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tepo.rollout import Engine, Response, Sampling
from tepo.seeds import derive_seed


def generate_sharing(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
) -> tuple[list[list[Response]], list[int]]:
    """`count` responses to each prompt that share their first t tokens, and t, for each prompt.

    One response of length L is sampled to each prompt and cut at t drawn uniformly from L/6 to L/2; the prefix is then
    completed `count` times. Responses hold prefix and completion, at most sampling.max_tokens together.
    """
    first = [group[0] for group in engine.generate(prompts, 1, sampling, derive_seed(seed, "prefix"))]
    draw = random.Random(derive_seed(seed, "cut"))
    cuts = [cut_point(len(response.ids), draw) for response in first]
    longer = [(*prompt, *response.ids[:cut]) for prompt, response, cut in zip(prompts, first, cuts, strict=True)]
    room = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - min(cuts))
    rest = engine.generate(longer, count, room, derive_seed(seed, "completion"))
    groups = [
        [_joined(response, cut, completion, sampling.max_tokens) for completion in group]
        for response, cut, group in zip(first, cuts, rest, strict=True)
    ]
    return groups, cuts


def cut_point(length: int, draw: random.Random) -> int:
    """t of a response of `length` tokens: from length/6, rounded up, to length/2; its last token is never included."""
    return draw.randint(min(-(-length // 6), length // 2), length // 2)


def _joined(first: Response, cut: int, completion: Response, limit: int) -> Response:
    """The prefix and one completion of it, cut off at `limit` tokens as if it had been sampled with that limit."""
    ids, logps = first.ids[:cut] + completion.ids, first.logps[:cut] + completion.logps
    return Response(ids[:limit], logps[:limit], completion.finished and len(ids) <= limit)
