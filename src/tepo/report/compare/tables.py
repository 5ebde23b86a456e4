"""A comparison as tables: for the terminal, in Markdown, and in LaTeX as a paper prints it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from tepo.report.compare.statistics import Mean, Reached
from tepo.report.compare.summary import Comparison, Row, TaskSummary

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": "$<$",
    ">": "$>$",
} | {character: "\\" + character for character in "&%$#_{}"}


@dataclass(frozen=True)
class Grid:
    """A table of texts. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> Table:
        table = Table(title=escape(self.title), title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(escape(name), justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

        ruled = line(["---", *["---:"] * (len(self.header) - 1)])
        return f"**{self.title}**\n\n{line(self.header)}{ruled}" + "".join(map(line, self.rows))

    def latex(self) -> str:
        """For `booktabs`."""

        def line(cells: Iterable[str]) -> str:
            return " & ".join("".join(LATEX.get(c, c) for c in cell) for cell in cells) + r" \\" + "\n"

        caption = "".join(LATEX.get(c, c) for c in self.title)
        columns = "l" + "r" * (len(self.header) - 1)
        body = f"\\toprule\n{line(self.header)}\\midrule\n{''.join(map(line, self.rows))}\\bottomrule\n"
        tabular = f"\\begin{{tabular}}{{{columns}}}\n{body}\\end{{tabular}}\n"
        return f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n{tabular}\\end{{table}}\n"


def grids(comparison: Comparison) -> list[Grid]:
    """For each task what was reached and how fast; above them, where there are several, a table of all tasks."""
    out = [_all_tasks(comparison)] if len(comparison.tasks) > 1 else []
    for task in comparison.tasks:
        out += [_accuracy(task, comparison.baseline), _speed(task), _stability(task)]
    return out


def notes(comparison: Comparison) -> list[str]:
    """How the figures were computed."""
    return [
        "Seeds: each decides the order of the problems, what is held out and all draws, for every objective alike. "
        "Intervals are 95 %, Student's t over seeds; those of accuracies are cut off at 0 and 100.",
        f"Difference: paired by seed, less {comparison.baseline}. p: paired t-test; with five pairs a permutation of "
        f"signs cannot go below 0.06. p (Holm): corrected for all {comparison.comparisons} differences; below 0.05 it "
        "counts. No difference shown is not the same as no difference.",
        "Threshold: reached at the first evaluation with at least that accuracy. The mean is restricted: runs that did "
        "not get there count with their whole length, so that it is a lower bound where some did not. Seconds are of "
        "training alone, without evaluations and loading.",
        "Collapsed: ended more than ten points below its own best evaluation, intervals apart.",
        f"Machine: {'; '.join(comparison.machines)}.",
    ]


def percent(mean: Mean) -> str:
    """`95.8 [93.9, 97.7]`."""
    if mean.interval is None:
        return f"{100 * mean.mean:.1f}"
    low, high = max(mean.interval[0], 0.0), min(mean.interval[1], 1.0)
    return f"{100 * mean.mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def points(mean: Mean) -> str:
    """`+1.2 [−0.4, +2.8]`: a difference of accuracies."""
    bounds = () if mean.interval is None else mean.interval
    shown, *within = (f"{100 * value:+.1f}".replace("-", "−") for value in (mean.mean, *bounds))
    return f"{shown} [{', '.join(within)}]" if within else shown


def _accuracy(task: TaskSummary, baseline: str) -> Grid:
    greedy = all(row.greedy is not None for row in task.rows)
    header = ["objective", "seeds", "accuracy, %", *(["greedy, %"] if greedy else []), f"less {baseline}, points"]
    return Grid(
        f"{task.task}: held-out accuracy after {task.steps} steps",
        (*header, "p", "p (Holm)", "verdict"),
        tuple(_accuracy_row(row, greedy) for row in task.rows),
    )


def _accuracy_row(row: Row, greedy: bool) -> tuple[str, ...]:
    cells = [row.objective, str(row.accuracy.count), percent(row.accuracy)]
    if greedy and row.greedy is not None:
        cells.append(percent(row.greedy))
    difference = row.difference
    if difference is None:
        return (*cells, "", "", "", row.verdict)
    shown = ["-" if p is None else f"{p:.2g}" for p in (difference.p, difference.adjusted)]
    return (*cells, points(difference.mean), *shown, row.verdict)


def _speed(task: TaskSummary) -> Grid:
    return Grid(
        f"{task.task}: until {100 * task.threshold:.1f} % of the held-out problems are solved",
        ("objective", "reached it", "steps, restricted mean", "seconds, restricted mean"),
        tuple((row.objective, _count(row.steps), _time(row.steps), _time(row.seconds)) for row in task.rows),
    )


def _count(reached: Reached) -> str:
    return f"{reached.reached} of {reached.count}"


def _time(reached: Reached) -> str:
    mean = reached.restricted
    if not reached.reached:
        return f"> {mean.mean:.0f}"
    bound = "≥ " if reached.reached < reached.count else ""
    interval = "" if mean.interval is None else f" [{max(0.0, mean.interval[0]):.0f}, {mean.interval[1]:.0f}]"
    return f"{bound}{mean.mean:.0f}{interval}"


def _stability(task: TaskSummary) -> Grid:
    return Grid(
        f"{task.task}: stability",
        ("objective", "worst seed, %", "collapsed", "did not finish"),
        tuple(
            (
                row.objective,
                f"{100 * row.worst[1]:.1f} (seed {row.worst[0]})",
                _seeds(row.collapsed, row.accuracy.count),
                _seeds(row.missing, row.accuracy.count + len(row.missing)),
            )
            for row in task.rows
        ),
    )


def _seeds(which: Sequence[int], count: int) -> str:
    named = f" (seed {', '.join(map(str, which))})" if which else ""
    return f"{len(which)} of {count}{named}"


def _all_tasks(comparison: Comparison) -> Grid:
    """Objectives x tasks, as in a paper, with the mean of the tasks."""
    names = list(dict.fromkeys(row.objective for task in comparison.tasks for row in task.rows))
    found = [{row.objective: row for row in task.rows} for task in comparison.tasks]
    rows = []
    for name in names:
        means = [of[name].accuracy if name in of else None for of in found]
        known = [mean.mean for mean in means if mean is not None]
        average = f"{100 * sum(known) / len(known):.1f}" if len(known) == len(means) else "-"
        rows.append((name, *("-" if mean is None else percent(mean) for mean in means), average))
    header = ("objective", *(task.task for task in comparison.tasks), "mean of the tasks")
    return Grid("held-out accuracy, %", header, tuple(rows))
