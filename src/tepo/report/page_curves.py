"""The curves of a report, as plain values that its script draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tepo.report.page_kl import Drift
from tepo.report.run import Run

POINTS = 1000
"""Points of a curve at most."""

Values = Sequence[float]
Chart = dict[str, Any]

CLIPPED = "Share of tokens whose ratio was clipped, by the sign of their advantage: what they say is not learned."
SIMPLE: tuple[tuple[str, str, str, tuple[tuple[str, str], ...], dict[str, Any]], ...] = (
    ("reward", "Reward", "Mean over the responses of each rollout.", (("reward", "reward"),), {"rollout": True}),
    ("entropy", "Entropy", "Nats a token, of the policy as it is trained.", (("entropy", "entropy"),), {}),
    (
        "kl",
        "KL divergence",
        "Nats a token: from the policy that sampled (how far the updates of one rollout go), and from the reference "
        "where the objective measures it.",
        (("approx_kl", "to the sampling policy"), ("ref_kl", "to the reference")),
        {"log": True},
    ),
    (
        "clip",
        "Clipped",
        CLIPPED,
        (("clip_fraction_positive", "advantage above 0"), ("clip_fraction_negative", "below 0")),
        {"share": True},
    ),
    (
        "mask",
        "KL mask",
        "Share of tokens that gain reward while losing entropy, which the KL mask holds back.",
        (("kl_mask_fraction", "masked"),),
        {"share": True},
    ),
    (
        "length",
        "Response length",
        "Tokens.",
        (("response/tokens", "mean"), ("response/tokens_max", "longest")),
        {"rollout": True},
    ),
    (
        "verdicts",
        "Verdicts",
        "Shares of the sampled responses.",
        (
            ("verdict/correct", "correct"),
            ("verdict/wrong", "wrong"),
            ("verdict/unparsable", "unparsable"),
            ("verdict/no_answer", "no answer"),
            ("response/truncated", "cut off"),
        ),
        {"rollout": True, "share": True, "skip_zero": True},
    ),
    (
        "groups",
        "Groups without a signal",
        "Share of prompts whose responses all earned the same: they teach nothing.",
        (
            ("groups/zero_variance", "equal rewards"),
            ("groups/all_correct", "all right"),
            ("groups/all_wrong", "all wrong"),
        ),
        {"rollout": True, "share": True},
    ),
    ("gradient", "Gradient norm", "Before it is scaled down.", (("grad_norm", "norm"),), {"log": True}),
    (
        "mismatch",
        "Sampling against scoring",
        "Nats: how far the log-probs of sampling are from the recomputed ones. It should stay below the clip range.",
        (("mismatch", "mean"), ("mismatch_max", "largest")),
        {"log": True},
    ),
    ("speed", "Tokens a second", "Trained tokens over all time so far.", (("tokens_per_second", "tokens/s"),), {}),
)
"""Id, title, what it shows, metrics with their labels, options. rollout: one value a rollout. share: per cent."""

PARTS = {
    "seconds/sampling": "sampling",
    "seconds/verdicts": "verdicts",
    "seconds/old_scores": "scoring",
    "seconds/update": "updates",
    "seconds/weights": "weights to the engine",
}
"""The parts of a step's time. `seconds/rollout` is sampling and verdicts together."""


def charts(run: Run, drift: Sequence[Drift]) -> list[Chart]:
    """All curves of a run; those without a measurement are left out."""
    found = [
        _accuracy(run),
        *(_simple(run, *row) for row in SIMPLE),
        _time(run),
        _drift(drift),
        _overoptimised(run, drift),
    ]
    return [chart for chart in found if chart["series"]]


def thin(xs: Sequence[float], ys: Values, limit: int = POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points of a curve: the least and the largest value of each stretch of it, in their order.

    Values that are not finite are left out first.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if len(points) > limit:
        count = limit // 2
        kept = []
        for part in range(count):
            stretch = points[part * len(points) // count : (part + 1) * len(points) // count]
            pair = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
            kept += sorted(pair)
        points = kept
    return [x for x, _ in points], [float(f"{y:.5g}") for _, y in points]


def smooth(ys: Values, width: int) -> list[float]:
    """The mean over `width` values around each one; fewer at the ends."""
    sums = [0.0]
    for y in ys:
        sums.append(sums[-1] + y)
    half = width // 2
    out = []
    for i in range(len(ys)):
        low, high = max(i - half, 0), min(i + half + 1, len(ys))
        out.append((sums[high] - sums[low]) / (high - low))
    return out


def _curve(name: str, xs: Sequence[float], ys: Values, **options: Any) -> list[Chart]:
    """A curve; a long one as it is and, above it, its running mean."""
    finite = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if not finite:
        return []
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    thin_x, thin_y = thin(xs, ys)
    line = {"name": name, "x": thin_x, "y": thin_y, "kind": "line", **options}
    if len(xs) < 60:
        return [line]
    mean_x, mean_y = thin(xs, smooth(ys, max(len(xs) // 25, 3)))
    return [line | {"kind": "raw"}, line | {"x": mean_x, "y": mean_y}]


def _numbered(series: list[list[Chart]]) -> list[Chart]:
    """Each curve with the colour of its place; a curve and its mean have one."""
    return [part | {"colour": place} for place, parts in enumerate(series) for part in parts]


def _simple(
    run: Run, name: str, title: str, about: str, metrics: Sequence[tuple[str, str]], options: Mapping[str, Any]
) -> Chart:
    factor = 100 if options.get("share") else 1
    series = []
    for key, label in metrics:
        xs, ys = _per_rollout(run, key) if options.get("rollout") else run.series(key)
        if options.get("log"):  # nothing to draw at 0
            xs, ys = [x for x, y in zip(xs, ys, strict=True) if y > 0], [y for y in ys if y > 0]
        if options.get("skip_zero") and not any(ys):
            continue
        series.append(_curve(label, xs, [factor * y for y in ys]))
    return {
        "id": name,
        "title": title,
        "about": about,
        "x": "step",
        "unit": "%" if options.get("share") else "",
        "log": bool(options.get("log")),
        "series": _numbered(series),
    }


def _per_rollout(run: Run, key: str) -> tuple[list[int], list[float]]:
    """A metric of rollouts, which every step of one repeats: at the step after which it was sampled."""
    values = {int(row["rollout"]): row[key] for row in run.metrics if key in row}
    return [run.step_of(rollout) for rollout in values], list(values.values())


def _accuracy(run: Run) -> Chart:
    steps, values = _per_rollout(run, "accuracy")
    series = [_curve("training", steps, [100 * value for value in values])]
    for kind, label in (("sampled", "held out, sampled"), ("greedy", "held out, greedy")):
        entries = [entry for entry in run.evaluations if kind in entry]
        if entries:
            series.append([_held_out(label, [entry["step"] for entry in entries], [e[kind] for e in entries])])
    about = "Share of right answers; bars are 95 % intervals over problems."
    return {
        "id": "accuracy", "title": "Accuracy", "about": about, "x": "step", "unit": "%", "log": False, "wide": True,
        "series": _numbered(series),
    }  # fmt: skip


def _held_out(label: str, xs: Values, measured: Sequence[Mapping[str, Any]]) -> Chart:
    percent = [100 * entry["accuracy"] for entry in measured]
    return {
        "name": label,
        "kind": "points",
        "x": list(xs),
        "y": [round(value, 3) for value in percent],
        "above": [100 * entry["interval"][1] - value for entry, value in zip(measured, percent, strict=True)],
        "below": [value - 100 * entry["interval"][0] for entry, value in zip(measured, percent, strict=True)],
    }


def _time(run: Run) -> Chart:
    """Seconds of each rollout and its updates, by part, one above the other; totals in the legend."""
    spent: dict[str, dict[int, float]] = {}
    for row in run.metrics:
        for key, label in PARTS.items():
            if key in row:
                part, rollout = spent.setdefault(label, {}), int(row["rollout"])
                part[rollout] = part.get(rollout, 0.0) + row[key]
    whole = sum(sum(part.values()) for part in spent.values())
    rollouts = sorted({rollout for part in spent.values() for rollout in part})
    width = max(len(rollouts) // (POINTS // 2), 1)
    series = []
    for label, part in spent.items():
        total = sum(part.values())
        if total < 0.001 * whole:
            continue
        # Stacked curves need common places: means over equal stretches, not the extremes of each.
        means = smooth([part.get(rollout, 0.0) for rollout in rollouts], width)[::width]
        places = [run.step_of(rollout) for rollout in rollouts][::width]
        series.append([{
            "name": f"{label}: {total:.0f} s, {total / whole:.0%}", "kind": "stack", "x": places,
            "y": [float(f"{mean:.4g}") for mean in means],
        }])  # fmt: skip
    about = "Seconds a rollout, with the updates made from it. Evaluations and checkpoints are not in it."
    return {
        "id": "time", "title": "Where the time goes", "about": about, "x": "step", "unit": "s", "log": False,
        "series": _numbered(series),
    }  # fmt: skip


def _drift(drift: Sequence[Drift]) -> Chart:
    spread = [round(1.96 * d.error, 5) for d in drift]
    curve = {
        "name": "KL to the start", "kind": "line", "x": [d.step for d in drift], "y": [round(d.kl, 5) for d in drift],
        "above": spread, "below": spread,
    }  # fmt: skip
    series = [[curve]] if drift else []
    about = "Nats a response, from the policy before training: of stored responses, scored by it; 95 % intervals."
    return {
        "id": "drift", "title": "Distance from the start", "about": about, "x": "step", "unit": "", "log": False,
        "series": _numbered(series),
    }  # fmt: skip


def _overoptimised(run: Run, drift: Sequence[Drift]) -> Chart:
    """Training reward and held-out accuracy against the square root of the KL divergence from the start."""
    rewards = dict(zip(*_per_rollout(run, "reward"), strict=True))
    places = [(math.sqrt(max(d.kl, 0.0)), rewards[d.step]) for d in drift if d.step in rewards]
    series = []
    if places:
        path = {"name": "training reward", "kind": "path", "x": [x for x, _ in places], "y": [y for _, y in places]}
        series.append([path])
        last = {d.step: math.sqrt(max(d.kl, 0.0)) for d in drift}
        near = run.recipe.trainer.updates_per_rollout  # an evaluation and the rollout of the same policy, or nearly
        entries = [
            (entry, step)
            for entry in run.evaluations
            for step in [max((s for s in last if s <= entry["step"]), default=None)]
            if step is not None and entry["step"] - step <= near
        ]
        points = _held_out(
            "held-out accuracy, %", [last[step] for _, step in entries], [e["sampled"] for e, _ in entries]
        )
        series.append([points | {"axis": 2}] if entries else [])
    about = (
        "From left to right as the policy moves away from where it began (square root of the KL divergence, nats a "
        "response). Reward that rises while held-out accuracy falls is over-optimisation."
    )
    return {
        "id": "overoptimisation", "title": "Reward and accuracy against the distance from the start", "about": about,
        "x": "square root of the KL to the start", "unit": "", "log": False, "wide": True, "series": _numbered(series),
    }  # fmt: skip
