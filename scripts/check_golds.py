"""Which gold answers of data files are not judged correct against themselves in `\\boxed{}`, and why.

    python scripts/check_golds.py FOLDER_OR_FILE... [--json OUT]

Prints one Markdown table a file; tests/rewards/gold_exceptions.json, which the tests compare with, is what --json
writes for the project's shared data.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

from tepo.data.problem import Problem
from tepo.rewards import JudgePool, Request, Status

PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def own_verdicts(file: Path, pool: JudgePool) -> dict[str, str]:
    """Why the gold of a problem is not correct against itself, by id."""
    rows = [json.loads(line) for line in file.open(encoding="utf-8")]
    requests = [Request("math", f"\\boxed{{{row['answer']}}}", Problem("", "", row["answer"])) for row in rows]
    return {
        row["id"]: reason(row["answer"], verdict.status)
        for row, verdict in zip(rows, pool.judge(requests), strict=True)
        if not verdict.correct
    }


def reason(gold: str, status: Status) -> str:
    """A class of golds that cannot be read."""
    if status is not Status.ERROR:
        return f"judged {status.value}"
    words = PROSE.findall(re.sub(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?", " ", gold))
    if len(words) > 3:
        return "sentences around the answer, or an explanation"
    if gold.count("\\begin") > 1 or "\\begin{aligned}" in gold:
        return "an equation of matrices, or a derivation"
    if gold.count("{") != gold.count("}") or re.search(r"[-+=]\s*\$?$", gold):
        return "cut off"
    return "a form that the parser does not read"


def main() -> None:
    """Check what the command line names."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("paths", nargs="+", type=Path)
    arguments.add_argument("--json", type=Path, help="write the exceptions as JSON")
    given = arguments.parse_args()
    files = [f for path in given.paths for f in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    found: dict[str, dict[str, str]] = {}
    with JudgePool() as pool:
        for file in files:
            if file.name == "answer_pairs.jsonl" or file.name.startswith("countdown"):
                continue  # pairs, and targets that are no answers
            began = time.perf_counter()
            exceptions = own_verdicts(file, pool)
            count = sum(1 for _ in file.open("rb"))
            print(
                f"{file.name}: {count} golds, {len(exceptions)} exceptions, {time.perf_counter() - began:.1f} s",
                file=sys.stderr,
            )
            if exceptions:
                found[file.name] = exceptions
    for name, exceptions in found.items():
        print(f"\n`{name}`\n\n| id | why |\n|---|---|")
        for key, why in exceptions.items():
            print(f"| `{key}` | {why} |")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
