"""Verdicts per second of the isolated judges, beside a plain loop over math-verify.

    python benchmarks/verdicts.py [ANSWER_PAIRS.jsonl ...] [--workers 2]

The answers are responses with a box around golds and predictions of data files (../shared/data by default), each asked
once, so that no cache helps. The plain loop is `verify(parse(gold), parse(response))` in this process with
math-verify's own time-out of 5 seconds: no isolation, no memory limit, and no other status than right or wrong.
"""

import argparse
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

from tepo.data.problem import Problem
from tepo.rewards import JudgePool, Request

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def load(files: list[Path], count: int) -> list[tuple[str, str]]:
    """(response, gold) pairs, no two alike: each gold with its prediction, with itself and with its neighbour's."""
    golds: list[str] = []
    pairs: list[tuple[str, str]] = []
    for file in files:
        for line in file.open(encoding="utf-8"):
            row = json.loads(line)
            golds.append(row.get("gold", row.get("answer")))
            if "prediction" in row:
                pairs.append((row["prediction"], row["gold"]))
    for number, (gold, other) in enumerate(zip(golds, golds[1:] + golds[:1], strict=True)):
        pairs += [
            (f"Step {number}: so the answer is $\\boxed{{{gold}}}$.", gold),
            (f"Step {number}: so the answer is $\\boxed{{{other}}}$.", gold),
        ]
    unique = list(dict.fromkeys(pairs))
    step = max(1, len(unique) // count)
    return unique[::step][:count]


def plain_loop(pairs: list[tuple[str, str]]) -> list[bool]:
    """What most training scripts do."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return [bool(verify(parse(f"${gold}$"), parse(response))) for response, gold in pairs]


def main() -> None:
    """Time both on the same answers."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("files", nargs="*", type=Path)
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--count", type=int, default=2000)
    given = arguments.parse_args()
    names = ("math500", "gsm8k_test", "minerva_math", "olympiadbench", "answer_pairs")
    pairs = load(given.files or [DATA / f"{name}.jsonl" for name in names], given.count)
    print(f"{len(pairs)} answers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    plain_loop(pairs[:20])  # loads SymPy and the grammar
    began = time.perf_counter()
    plain = plain_loop(pairs)
    alone = len(pairs) / (time.perf_counter() - began)
    print(f"plain math-verify loop: {alone:.0f} verdicts/s, {sum(plain)} right")
    for workers in sorted({1, given.workers}):
        with JudgePool(workers) as pool:
            pool.judge([Request("math", f"\\boxed{{{n}}}", Problem("", "", "x")) for n in range(4 * workers)])
            requests = [Request("math", response, Problem("", "", gold)) for response, gold in pairs]
            began = time.perf_counter()
            verdicts = pool.judge(requests)
            rate = len(pairs) / (time.perf_counter() - began)
            statuses = ", ".join(f"{count} {status}" for status, count in Counter(v.status for v in verdicts).items())
            print(f"tepo, isolated, {workers} workers: {rate:.0f} verdicts/s ({rate / alone:.1f} x); {statuses}")
            began = time.perf_counter()
            pool.judge(requests)
            print(f"  the same again, from the cache: {len(pairs) / (time.perf_counter() - began):.0f} verdicts/s")
    print("load at the end", f"{os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
