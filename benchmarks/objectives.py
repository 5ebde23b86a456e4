"""Steps a second of every objective: 20 steps of the default recipe each, on the embedded model.

    python benchmarks/objectives.py [--steps 20] [--repeat 3] [NAME ...]

Prints a Markdown table: optimizer steps a second, where the time of a step goes (sampling and judging its share of a
rollout, scores before the updates, the update itself), and the update beside that of DAPO on the same machine in the
same run. Rounds over all objectives are repeated, and the median taken, so that a slow minute does not fall on one.
"""

import argparse
import io
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from tepo.config import load_recipe
from tepo.objectives import list_objectives
from tepo.train import train

PARTS = ("rollout", "old_scores", "update")


def seconds(objective: str, steps: int) -> dict[str, float]:
    """Seconds of a step, by what they went to: means over the steps of a run."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"trainer.steps={steps}",
            "evaluation.before=false",
            "evaluation.after=false",
            "evaluation.every=null",
            "checkpoint.every=null",
            f"objective={objective}",
            f"output={folder}/run",
        ]
        run = train(load_recipe("arithmetic", overrides), console=Console(file=io.StringIO()))
        records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {part: sum(record.get(f"seconds/{part}", 0.0) for record in records) / steps for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="objectives; all of them when none is named")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    names = arguments.names or list_objectives()
    names = names if "dapo" in names else ["dapo", *names]
    seconds("dapo", 4)  # whatever is loaded once
    rounds = [{name: seconds(name, arguments.steps) for name in names} for _ in range(arguments.repeat)]

    def median(name: str, part: str) -> float:
        return statistics.median(measured[name][part] for measured in rounds)

    print("| objective | steps/s | sampling, ms | scores before, ms | update, ms | update / DAPO's |")
    print("|---|---|---|---|---|---|")
    for name in names:
        rollout, before, update = (median(name, part) for part in PARTS)
        ratio = update / median("dapo", "update")
        cells = [f"{1000 * value:.0f}" for value in (rollout, before, update)]
        print(f"| `{name}` | {1 / (rollout + before + update):.1f} | {' | '.join(cells)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
