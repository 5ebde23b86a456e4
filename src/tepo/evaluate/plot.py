"""pass@k against k, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tepo.evaluate.accuracy import Accuracy

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def write_plot(path: Path, model: str, results: Mapping[str, Mapping[str, Accuracy]]) -> bool:
    """Write a line with its 95 % band for each data set that has several responses to a problem; False without any."""
    curves = [(name, r) for name, kinds in results.items() for r in kinds.values() if r.samples > 1]
    if not curves:
        return False
    import plotly.graph_objects as go

    figure = go.Figure()
    for (name, result), colour in zip(curves, COLOURS * len(curves), strict=False):
        ks = list(result.pass_at_k)
        low = [100 * result.pass_intervals[k][0] for k in ks]
        high = [100 * result.pass_intervals[k][1] for k in ks]
        band = {
            "x": ks + ks[::-1],
            "y": high + low[::-1],
            "mode": "lines",
            "fill": "toself",
            "fillcolor": colour,
            "opacity": 0.15,
        }
        figure.add_scatter(**band, line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=name)
        figure.add_scatter(
            x=ks,
            y=[100 * result.pass_at_k[k] for k in ks],
            name=f"{name} ({result.problems} problems, T = {result.temperature:g})",
            mode="lines+markers",
            line={"color": colour},
            legendgroup=name,
        )
    ticks = sorted({k for _, result in curves for k in result.pass_at_k})
    figure.update_layout(
        title=f"pass@k of {model}, with 95 % intervals over problems",
        template="plotly_white",
        legend={"x": 0.02, "y": 0.98},
    )
    figure.update_xaxes(title="k, responses to a problem", type="log", tickvals=ticks, ticktext=[str(k) for k in ticks])
    figure.update_yaxes(title="problems solved at least once, %", rangemode="tozero")
    figure.write_html(path, include_plotlyjs=True)
    return True
