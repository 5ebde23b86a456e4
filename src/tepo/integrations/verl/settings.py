"""Which objectives verl can carry, under which names, and with which of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepo.objectives import Objective, get_objective, list_objectives
from tepo.objectives.own import is_own
from tepo.objectives.terms import Term

PREFIX = "tepo_"

SIGNATURE = frozenset({"logp", "old_logp"})
"""What verl's policy losses are given, beside advantages."""

WHOLE_BATCH = SIGNATURE | {"entropy", "entropy_gradient", "old_entropy", "ref_logp"}
"""What a loss in the engine is given."""

OF_VERLS_LOSSES = {
    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
    "loss_agg_mode": "token-mean", "loss_scale_factor": None, "tau_pos": 1.0, "tau_neg": 1.05,
}  # fmt: skip
"""Settings of verl's actor that belong to its own losses, with their defaults: an objective has options instead."""

OF_VERLS_TERMS = {"entropy_coeff": 0, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
"""Settings of terms that verl adds to a policy loss, and that a loss in the engine takes the place of."""


def verl_name(objective: str) -> str:
    """The name of an objective in verl's registries: `tepo`, `tepo_v1`, and `tepo_` before the others."""
    return objective if objective.startswith("tepo") or is_own(objective) else PREFIX + objective


def objective_name(loss_mode: str) -> str:
    """The objective that a `loss_mode` of ours names."""
    plain = loss_mode.removeprefix(PREFIX)
    return plain if plain in list_objectives() else loss_mode


def objective_of(policy_loss: Mapping[str, Any]) -> Objective:
    """The objective of verl's section `policy_loss`. Raises ValueError for names and options that there are not."""
    options = {name: _plain(value) for name, value in (policy_loss.get("options") or {}).items()}
    return get_objective(objective_name(policy_loss.get("loss_mode", "tepo")), **options)


def _plain(value: Any) -> Any:
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def verl_names() -> dict[str, Objective]:
    """The objectives of the table that verl can carry, by their names there."""
    objectives = [get_objective(name) for name in list_objectives()]
    return {verl_name(objective.name): objective for objective in objectives if obstacle(objective) is None}


def obstacle(objective: Objective) -> str | None:
    """Why verl cannot carry an objective, or None where it can."""
    if objective.surrogate.pairs:
        return "two responses of a group in one micro-batch"
    if objective.needs_whole_step:
        return "a look at the whole mini-batch before its first micro-batch"
    if missing := sorted(objective.reads - WHOLE_BATCH):
        return ", ".join(missing)
    adaptive = [term.name for term in objective.terms if type(term).adapted is not Term.adapted]
    if adaptive:
        return f"a coefficient that adapts after each optimizer step ({', '.join(adaptive)})"
    return None


def carried(objective: Objective) -> Objective:
    """The objective itself. Raises ValueError where verl does not give what it needs."""
    if why := obstacle(objective):
        raise ValueError(f"objective {objective.name} needs {why}, which verl does not give: use tepo train")
    return objective


def check_actor(actor: Any, objective: Objective, whole_batch: bool) -> None:
    """Raise ValueError for an objective that cannot be had so, and for settings of verl that would be without effect.

    actor: verl's section `actor_rollout_ref.actor`. whole_batch: for a loss in the engine, not a policy loss.
    """
    carried(objective)
    if not whole_batch and (more := sorted(objective.reads - SIGNATURE)):
        raise ValueError(
            f"objective {objective.name} reads {', '.join(more)}, which verl's policy losses are not given: set "
            "trainer.v1.trainer_mode=tepo, whose loss is"
        )
    if not whole_batch and objective.schedules:
        options = ", ".join(option for option, _ in objective.schedules)
        raise ValueError(
            f"{options} follow a schedule over rollouts: set trainer.v1.trainer_mode=tepo, which counts them"
        )
    settings = OF_VERLS_LOSSES | (OF_VERLS_TERMS if whole_batch else {})
    if changed := [name for name, default in settings.items() if actor.get(name, default) != default]:
        raise ValueError(
            f"actor_rollout_ref.actor.{', '.join(changed)}: of no effect on objective {objective.name}, which takes "
            "the place of verl's own loss; leave them out and set actor_rollout_ref.actor.policy_loss.options"
        )
