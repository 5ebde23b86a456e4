"""The default recipe with several seeds: held-out accuracy before and after, and the seconds of each whole command.

usage: python benchmarks/default_recipe.py [--seeds 0 1 2 3 4] [--output FOLDER] [key=value ...]
Prints a Markdown table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def cell(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{100 * entry['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, help="folder for the runs; a temporary one by default")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    output = arguments.output or Path(tempfile.mkdtemp())
    print("| seed | sampled before, % | sampled after, % | greedy before, % | greedy after, % | seconds |")
    print("|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        folder = output / f"seed_{seed}"
        began = time.monotonic()
        command = [sys.executable, "-m", "tepo", "train", f"seed={seed}", f"output={folder}", *arguments.overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        evaluations = json.loads((folder / "eval.json").read_text())["evaluations"]
        before, after = evaluations[0], evaluations[-1]
        cells = [cell(entry[kind]) for kind in ("sampled", "greedy") for entry in (before, after)]
        print(f"| {seed} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
