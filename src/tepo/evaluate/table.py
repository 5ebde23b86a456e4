"""The tables that `tepo eval` prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from tepo.evaluate.accuracy import Accuracy

Interval = tuple[float, float] | list[float]


def percent(value: float, interval: Interval | None = None) -> str:
    """`43.8 % [39.5, 48.2]`."""
    shown = f"{100 * value:.1f} %"
    return shown if interval is None else f"{shown} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def how(result: Accuracy) -> str:
    """How the responses were sampled, in a few words."""
    return f"sampled, T = {result.temperature:g}, {result.samples} each" if result.temperature else "greedy"


def data_tables(model: str, name: str, results: Mapping[str, Accuracy]) -> list[Table]:
    """One data set: a column for each way of sampling; then tables by subject and by level, where there are some."""
    columns = list(results.values())
    title = f"{model} on {name}: {columns[0].problems} problems, 95 % intervals"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in columns:
        table.add_column(how(result))
    several = max(result.samples for result in columns)
    label = f"accuracy (avg@{several})" if several > 1 else "accuracy"
    table.add_row(label, *(percent(r.accuracy, r.interval) for r in columns))
    for k in sorted({k for result in columns for k in result.pass_at_k if k > 1}):
        values = (percent(r.pass_at_k[k], r.pass_intervals[k]) if k in r.pass_at_k else "" for r in columns)
        table.add_row(f"pass@{k}", *values)
    if several > 1:
        values = ("" if r.majority is None else percent(r.majority, r.majority_interval) for r in columns)
        table.add_row(f"maj@{several}", *values)
    for status in columns[0].verdicts:
        if status != "correct" and any(result.verdicts[status] for result in columns):
            table.add_row(status.replace("_", " "), *(percent(result.verdicts[status]) for result in columns))
    table.add_row("truncated", *(percent(result.truncated) for result in columns))
    table.add_row("tokens a response", *(f"{result.mean_tokens:.1f}" for result in columns))
    return [table, *(_group_table(name, grouping, results) for grouping in columns[0].groups)]


def _group_table(name: str, grouping: str, results: Mapping[str, Accuracy]) -> Table:
    table = Table(title=f"{name} by {grouping}", title_justify="left")
    table.add_column(grouping)
    table.add_column("problems", justify="right")
    columns = [result.groups[grouping] for result in results.values()]
    for result in results.values():
        table.add_column(how(result))
    for value in columns[0]:
        rows = [column[value] for column in columns]
        table.add_row(value, str(rows[0]["problems"]), *(percent(row["accuracy"], row["interval"]) for row in rows))
    return table


def overview(model: str, results: Mapping[str, Mapping[str, Accuracy]]) -> Table:
    """Several data sets: a row for each way of sampling each of them, and the mean of the accuracies."""
    table = Table(title=f"{model}: 95 % intervals over problems", title_justify="left")
    for column in ("data", "accuracy", "pass@k", "maj@k"):
        table.add_column(column)
    for name, kinds in results.items():
        for result in kinds.values():
            most = max(result.pass_at_k)
            sampled = f"{result.samples} x T = {result.temperature:g}" if result.temperature else "greedy"
            solved = f"@{most} {percent(result.pass_at_k[most], result.pass_intervals[most])}" if most > 1 else ""
            voted = (
                ""
                if result.majority is None
                else f"@{result.samples} {percent(result.majority, result.majority_interval)}"
            )
            table.add_row(f"{name}, {sampled}", percent(result.accuracy, result.interval), solved, voted)
    firsts = [next(iter(kinds.values())).accuracy for kinds in results.values()]
    table.add_section()
    table.add_row("mean of the data sets", percent(sum(firsts) / len(firsts)))
    return table
