"""The table of objectives in words, derived from their parts; `pages.py` makes documentation of it."""

from __future__ import annotations

import dataclasses

from tepo.objectives.objective import Objective
from tepo.objectives.table import TABLE

COMPACT = ("name", "what it is", "parts")
COLUMNS = (
    "name", "what it is", "advantage", "ratio", "surrogate", "aggregate", "selection, shaping", "terms", "reads",
    "checked",
)  # fmt: skip

FIELDS = {
    "entropy": "entropy",
    "entropy_gradient": "a gradient through the entropy",
    "old_entropy": "entropy when sampled",
    "ref_logp": "reference policy",
    "exact_kl": "KL over the vocabulary",
    "entropy_direction": "derivative of the entropy",
    "top_entropy": "entropy of the likely tokens",
    "old_values": "a critic's values",
    "process_reward": "process reward model",
    "baseline": "earlier rewards of the prompt",
    "shared": "shared prefix",
    "selected": "selected tokens",
}
"""Fields of TokenBatch in words; log-probs and rewards are read by all."""

GOLDEN, TRL, VERL, DEFINITION = "golden", "TRL", "verl", "definition"
EVIDENCE = {
    GOLDEN: "losses and gradients that TRL 1.16 or verl 0.9.1 computed on fixed batches (tests/objectives/test_golden)",
    TRL: "TRL 1.16's own code on random batches (tests/differential; a job of its own, .ci/differential)",
    VERL: "verl 0.9.1's own code on random batches (the same place)",
    DEFINITION: "a second implementation in plain Python, token by token, and central differences of it "
    "(tests/objectives/test_definition)",
}
"""What an objective can be checked against. All of them pass `tepo.testing.check_objective` besides."""

CHECKED: dict[str, tuple[str, ...]] = {
    "tepo": (GOLDEN, TRL, DEFINITION),
    "tepo_v1": (GOLDEN, TRL, VERL, DEFINITION),
    "grpo": (GOLDEN, TRL, VERL, DEFINITION),
    "dr_grpo": (GOLDEN, TRL, VERL, DEFINITION),
    "dapo": (GOLDEN, TRL, VERL, DEFINITION),
    "gspo": (GOLDEN, TRL, VERL, DEFINITION),
    "gspo_token": (TRL, VERL, DEFINITION),
    "luspo": (GOLDEN, TRL, DEFINITION),
    "gmpo": (GOLDEN, TRL, VERL, DEFINITION),
    "hoelder": (TRL, DEFINITION),
    "hoelder_token": (TRL, VERL, DEFINITION),
    "cispo": (GOLDEN, TRL, VERL, DEFINITION),
    "sapo": (GOLDEN, TRL, VERL, DEFINITION),
    "gpg": (GOLDEN, VERL, DEFINITION),
    "rloo": (VERL, DEFINITION),
    "reinforce_pp": (TRL, VERL, DEFINITION),
    "reinforce_pp_baseline": (TRL, VERL, DEFINITION),
    "clip_cov": (VERL, DEFINITION),
    "kl_cov": (GOLDEN, VERL, DEFINITION),
    "forking_tokens": (TRL, DEFINITION),
    "entropy_advantage": (DEFINITION,),
    "aent": (DEFINITION,),
    "em_ft": (DEFINITION,),
    "em_rl_sequence": (DEFINITION,),
    "em_rl_token": (DEFINITION,),
    "gtpo": (DEFINITION,),
    "grpo_s": (DEFINITION,),
    "policy_kl": (DEFINITION,),
    "ppo": (VERL, DEFINITION),
    "prpo": (TRL, VERL, DEFINITION),
    "skpo": (VERL, DEFINITION),
    "dpo": (TRL, DEFINITION),
    "orpo": (TRL, DEFINITION),
}
"""By name; a test looks each claim up in the tests. What is not here has been checked by `check_objective` alone."""

LIMITS = {
    "tepo": "in golden and TRL without its KL mask, which neither has",
    "hoelder": "in TRL at p = 0",
    "hoelder_token": "in TRL and verl at p = 1",
    "gpg": "with the paper's alpha in the place of verl's",
    "clip_cov": "where all eligible tokens are chosen",
    "forking_tokens": "with TRL's loss divided by the selected tokens",
    "ppo": "in verl without the KL in the reward",
    "prpo": "in TRL and verl the loss alone, as GRPO's",
    "skpo": "in verl the loss alone, from those of its two levels",
    "dpo": "in TRL where every group gives a pair",
    "orpo": "in TRL one pair at a time",
}
"""What a comparison leaves out."""


def describe(objective: Objective) -> dict[str, str]:
    """One row of the complete table: column -> text, settings included."""
    extra = [part for part in (objective.selection, objective.shaping) if part is not None]
    return {
        "name": objective.name,
        "what it is": f"{objective.title} ({objective.paper})",
        "advantage": _settings(objective.advantage),
        "ratio": " ".join([objective.ratio.name, *_fields(objective.ratio)]),
        "surrogate": _settings(objective.surrogate),
        "aggregate": " ".join([objective.aggregate.name, *_fields(objective.aggregate)]),
        "selection, shaping": "; ".join(_settings(part) for part in extra) or "none",
        "terms": "; ".join(_settings(term) for term in objective.terms) or "none",
        "reads": ", ".join(_reads(objective)) or "nothing more",
        "checked": _checked(objective.name),
    }


def compact(objective: Objective) -> dict[str, str]:
    """One row of the table for a terminal: what the parts are, with the numbers that matter most."""
    parts = [
        objective.advantage.name,
        "" if objective.ratio.name == "none" else f"{objective.ratio.name} ratio",
        f"{type(objective.surrogate).__name__}{_bounds(objective.surrogate)}",
        objective.aggregate.name,
        *(type(part).__name__ for part in (objective.selection, objective.shaping) if part is not None),
        *(f"{term.name} {getattr(term, term.strength):g}" for term in objective.terms),
    ]
    return {"name": objective.name, "what it is": objective.title, "parts": ", ".join(part for part in parts if part)}


def compact_all() -> list[dict[str, str]]:
    """A compact row for each objective, in the order of the table."""
    return [compact(objective) for objective in TABLE]


def _reads(objective: Objective) -> list[str]:
    needs = objective.reads - {"logp", "old_logp"}
    if objective.selection is not None:
        needs |= {"selected"}
    reference = ["reference policy"] if objective.needs_reference and "ref_logp" not in needs else []
    pairs = ["pairs of a group"] if objective.surrogate.pairs else []
    return [meaning for name, meaning in FIELDS.items() if name in needs] + reference + pairs


def _checked(name: str) -> str:
    evidence = ", ".join(CHECKED.get(name, ())) or "check_objective alone"
    return f"{evidence} ({LIMITS[name]})" if name in LIMITS else evidence


def _bounds(part: object) -> str:
    return "".join(f" {value:g}" if i == 0 else f"/{value:g}" for i, value in enumerate(_numbers(part)))


def _numbers(part: object) -> list[float]:
    values = (getattr(part, field.name) for field in dataclasses.fields(part))  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, float)]


def _settings(part: object) -> str:
    return " ".join([type(part).__name__, *_fields(part)])


def _fields(part: object) -> list[str]:
    values = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))  # type: ignore[arg-type]
    return [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values
        if value is not None
    ]
