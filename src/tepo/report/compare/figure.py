"""Learning curves of a comparison, with bands over seeds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tepo.report.compare.outcome import Outcome
from tepo.report.compare.statistics import mean_over_seeds

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Okabe and Ito's, which people who confuse red and green tell apart; lines are dashed in turn for print."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
PANELS = (("curve", "held-out accuracy, %", 100), ("reward", "training reward", 1), ("entropy", "entropy, nats", 1))
WIDTH, HEIGHT = 1200, 420


def write_figure(path: Path, outcomes: Sequence[Outcome], title: str) -> list[Path]:
    """`path`.html, one file that needs no network; `path`.svg too, where kaleido is installed. -> what was written."""
    figure = draw(outcomes, title)
    page = path.with_suffix(".html")
    figure.write_html(page, include_plotlyjs=True)
    if importlib.util.find_spec("kaleido") is None:
        return [page]
    picture = path.with_suffix(".svg")
    figure.write_image(picture)
    return [page, picture]


def draw(outcomes: Sequence[Outcome], title: str) -> Any:
    """A plotly figure: a row for each task, a column for each panel, a line and its 95 % band for each objective."""
    from plotly.subplots import make_subplots

    tasks = list(dict.fromkeys(outcome.task for outcome in outcomes))
    names = list(dict.fromkeys(outcome.objective for outcome in outcomes))
    titles = [f"{escape(task)}: {label}" if len(tasks) > 1 else label for task in tasks for _, label, _ in PANELS]
    figure = make_subplots(len(tasks), len(PANELS), subplot_titles=titles, vertical_spacing=0.25 / len(tasks))
    for place, task in enumerate(tasks, 1):
        for index, name in enumerate(names):
            runs = [outcome for outcome in outcomes if (outcome.task, outcome.objective) == (task, name)]
            for column, (series, _, scale) in enumerate(PANELS, 1):
                _add(figure, runs, series, scale, name, index, place, column)
    seeds = len({outcome.seed for outcome in outcomes})
    figure.update_layout(
        title={"text": f"{escape(title)}: means of {seeds} seeds, with 95 % bands", "font": {"size": 16}},
        template="plotly_white",
        legend={"orientation": "h", "y": -0.15 / len(tasks), "yanchor": "top", "font": {"size": 14}},
        width=WIDTH,
        height=HEIGHT * len(tasks) + 60,
        margin={"l": 50, "r": 20, "t": 90, "b": 60},
    )
    figure.update_xaxes(title="step")
    return figure


def _add(
    figure: Any, runs: Sequence[Outcome], series: str, scale: float, name: str, index: int, row: int, column: int
) -> None:
    """The line of one objective in one panel, at the steps that all of its runs have."""
    curves = [dict(zip(*getattr(run, series), strict=True)) for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    if not steps:
        return
    means = [mean_over_seeds([scale * curve[step] for curve in curves]) for step in steps]
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    low, high = ([mean.interval[side] for mean in means if mean.interval] for side in (0, 1))
    if low:
        figure.add_scatter(
            x=steps + steps[::-1], y=high + low[::-1], mode="lines", line={"width": 0}, fill="toself",
            fillcolor=colour, opacity=0.15, hoverinfo="skip", showlegend=False, legendgroup=name, row=row, col=column,
        )  # fmt: skip
    figure.add_scatter(
        x=steps,
        y=[mean.mean for mean in means],
        mode="lines+markers" if series == "curve" else "lines",
        marker={"size": 5},
        line={"color": colour, "dash": dash, "width": 2},
        name=escape(name),
        legendgroup=name,
        showlegend=(row, column) == (1, 1),
        row=row,
        col=column,
    )
