"""Size of the report of a long run, and how long Chromium takes to open it.

    python benchmarks/report.py RUN [STEPS]

The run of STEPS steps (2,000) is made of the rows, rollouts and evaluations of a real run, again and again. Two times
from the start of loading, the medians of seven openings: until the page can be read (its text and the responses are
there), and until the last curve is drawn.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import sync_playwright

from tepo.report.page_report import write_report
from tepo.report.run import Run

OPENINGS = 7
MARKS = "Object.fromEntries(performance.getEntriesByType('mark').map(mark => [mark.name, mark.startTime]))"


def repeat(source: Run, folder: Path, steps: int) -> None:
    """A run folder of `steps` steps from those of `source`."""
    updates, rollouts = source.recipe.trainer.updates_per_rollout, source.rollouts()
    recipe = source.recipe.model_dump(mode="json")
    recipe["trainer"]["steps"] = steps
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copy(source.folder / "environment.json", folder)
    shutil.copytree(source.folder / "evaluations", folder / "evaluations")
    rows = [source.metrics[i % len(source.metrics)] | {"step": i + 1, "rollout": i // updates} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rollout in range(steps // updates):
        for kind in ("jsonl", "safetensors"):
            from_ = source.folder / "rollouts" / f"rollout_{rollouts[rollout % len(rollouts)]:06d}.{kind}"
            shutil.copy(from_, folder / "rollouts" / f"rollout_{rollout:06d}.{kind}")
    every = source.evaluations[1]["step"]
    again = [
        source.evaluations[i % len(source.evaluations)] | {"step": step}
        for i, step in enumerate(range(0, steps + 1, every))
    ]
    last = {"step": steps, "accuracy": again[-1]["sampled"]["accuracy"], "interval": again[-1]["sampled"]["interval"]}
    (folder / "eval.json").write_text(json.dumps(last | {"evaluations": again}))


def open_times(page: Path) -> tuple[float, float]:
    """Milliseconds until the page can be read and until all is drawn."""
    times: list[dict[str, Any]] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(OPENINGS):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn=all]")
            times.append(tab.evaluate(MARKS))
            context.close()
        browser.close()
    return tuple(statistics.median(time[name] for time in times) for name in ("readable", "drawn"))  # type: ignore[return-value]


def main() -> None:
    source, steps = Run.open(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        repeat(source, folder, steps)
        page = write_report(Run.open(folder))
        readable, drawn = open_times(page)
        size = page.stat().st_size / 1e6
        print(f"{steps} steps: {size:.1f} MB; can be read after {readable:.0f} ms, all drawn after {drawn:.0f} ms")


if __name__ == "__main__":
    main()
