"""Losses and advantages computed by verl: its registered functions, put together as its `workers/utils/losses.py` does.

Nothing of verl is imported before it is called.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

from foreign import GROUP_SIZE, Advantages, Loss, Step, Window
from torch import Tensor

NO_DUAL_CLIP = 1e9
"""verl's dual clip is always on; this `clip_ratio_c` puts it out of reach."""


@functools.cache
def verl_core() -> Any:
    """verl.trainer.ppo.core_algos. Importing verl imports ray for the name of one type: without ray, a stub has it."""
    stub = None
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        stub = types.ModuleType("ray")
        stub.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        stub.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]
        sys.modules["ray"] = stub
    try:
        return importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        if stub is not None:
            del sys.modules["ray"]


def verl(
    loss_mode: str,
    aggregate: str = "token-mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    length: int | None = None,
    kl: tuple[float, str] | None = None,
    entropy: float = 0.0,
    policy: dict[str, float] | None = None,
    value_clip: float | None = None,
    **settings: Any,
) -> Loss:
    """A policy loss of verl's registry, plus coefficient * KL to the reference, minus entropy * bonus, plus a critic's.

    length: its `loss_scale_factor`. policy: fields of its PolicyLossConfig. settings: of its ActorConfig.
    """

    def loss(part: Step, whole: Window) -> Tensor:
        core = verl_core()
        from verl.workers.config import ActorConfig, PolicyLossConfig

        # One part: verl counts for itself. Several: its trainer hands the counts of the whole step to each.
        counts = {"batch_num_tokens": whole.tokens, "global_batch_size": whole.sequences} if whole.parts > 1 else {}
        scale: dict[str, Any] = {**counts, "loss_scale_factor": length}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=GROUP_SIZE,
            ppo_micro_batch_size_per_gpu=len(part.mask),
            clip_ratio_low=clip_low,
            clip_ratio_high=clip_high,
            loss_agg_mode=aggregate,
            policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(policy or {})),
            global_batch_info=scale,
            **settings,
        )
        mask = part.mask.double()
        value: Tensor
        value, _ = core.get_policy_loss_fn(loss_mode)(
            old_log_prob=part.old_logp,
            log_prob=part.logp,
            advantages=part.token_advantages(),
            response_mask=mask,
            loss_agg_mode=aggregate,
            config=config,
        )
        if entropy:
            value = value - entropy * core.agg_loss(part.entropy, mask, aggregate, **scale)
        if kl is not None:
            coefficient, estimator = kl
            tokens = core.kl_penalty(part.logp, part.ref_logp, estimator)
            value = value + coefficient * core.agg_loss(tokens, mask, aggregate, **scale)
        if value_clip is not None:
            critics = (part.values, part.returns, part.old_values, mask, value_clip, aggregate)
            value = value + core.compute_value_loss(*critics, **scale)[0]
        return value

    return loss


def verl_advantages(estimator: str, **settings: Any) -> Advantages:
    """An advantage estimator of verl's registry: [S, T], 0 in the padding."""

    def advantages(step: Step) -> Tensor:
        core = verl_core()
        found: Tensor = core.get_adv_estimator_fn(estimator)(
            token_level_rewards=step.token_rewards(),
            response_mask=step.mask.double(),
            config=types.SimpleNamespace(gamma=1.0),
            **({} if estimator == "reinforce_plus_plus" else {"index": step.groups.numpy()}),
            **settings,
        )[0]
        return found

    return advantages


def verl_gae(step: Step, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [S, T] of verl's GAE, 0 in the padding."""
    found: tuple[Tensor, Tensor] = verl_core().get_adv_estimator_fn("gae")(
        token_level_rewards=step.token_rewards(),
        values=step.old_values,
        response_mask=step.mask.double(),
        gamma=gamma,
        lam=lam,
    )
    return found[0] * step.mask, found[1] * step.mask


def verl_gae_advantages(gamma: float, lam: float) -> Advantages:
    """The advantages alone."""
    return lambda step: verl_gae(step, gamma, lam)[0]
