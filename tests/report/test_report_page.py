"""`tepo report`: what it says, how it draws, and that nothing a model wrote is ever more than text."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tepo.cli import app
from tepo.errors import TepoError
from tepo.report import page_kl
from tepo.report.page import finite, script_json, visible
from tepo.report.page_curves import smooth, thin
from tepo.report.page_report import write_report
from tepo.report.run import Run

HOSTILE = (
    '<script>document.title="taken"; alert(1)</script><img src=x onerror="alert(2)"><svg/onload=alert(3)>'
    "</script><!--<script>\u202eevil\u2066 \u200bzero &amp; &lt;b&gt; javascript:alert(4) \u2028 ]]> 'quoted' \x00"
)
"""What a model may write: script blocks, event handlers, the end of our own block, direction marks, entities."""


def rewrite(path: Path, **fields: Any) -> None:
    """Put fields into every record of a file."""
    records = [json.loads(line) | fields for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_without_a_browser(run_copy: Path) -> None:
    run = Run.open(run_copy)
    assert run.steps == 8
    assert run.rollouts() == [0, 1]
    assert list(run.checkpoints()) == [4, 8]
    assert [run.step_of(rollout) for rollout in run.rollouts()] == [0, 4]
    assert len(list(run.responses(1))) == 32
    with pytest.raises(TepoError, match="rollout 7 is not stored; those that are: 2, from 0 to 1"):
        run.responses(7)
    with pytest.raises(TepoError, match="not a run folder"):
        Run.open(run_copy / "rollouts")


def test_a_line_that_is_being_written_is_left_out(run_copy: Path) -> None:
    with (run_copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    assert Run.open(run_copy).steps == 8
    with (run_copy / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(TepoError, match=r"metrics.jsonl: line 9 is damaged"):
        Run.open(run_copy)


def test_kl_to_the_start_is_that_of_the_definition(run_copy: Path) -> None:
    """Where sampling and start are one policy it is 0; later, the mean difference of summed log-probs."""
    run = Run.open(run_copy)
    start, later = page_kl.measure(run)
    assert (start.step, later.step) == (0, 4)
    assert abs(start.kl) < 1e-4
    tokens, policy = run.tokens(1), page_kl.starting_policy(run)
    differences = []
    for index in range(32):
        where, prompt = tokens.response(index), tokens.prompt(index)
        ids = torch.tensor([[*prompt, *tokens.ids[where].tolist()]])
        with torch.no_grad():
            logits = torch.log_softmax(policy.model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
        theirs = logits.gather(-1, ids[0, len(prompt) :, None]).sum()
        differences.append(float(tokens.logp[where].double().sum() - theirs))
    assert later.kl == pytest.approx(sum(differences) / 32, abs=1e-4)
    assert later.error == pytest.approx(float(torch.tensor(differences).std()) / math.sqrt(32), rel=1e-3)
    (run_copy / "checkpoints").rename(run_copy / "gone")
    assert page_kl.measure(Run.open(run_copy)) == [start, later]  # kept in the folder


def test_thinned_curves_keep_extremes_and_leave_out_what_is_not_finite() -> None:
    ys = [math.sin(i / 50) for i in range(20_000)]
    ys[777], ys[15_001], ys[4] = 9.0, -9.0, math.nan
    xs, kept = thin(range(20_000), ys, 1000)
    assert len(kept) <= 1000
    assert xs == sorted(xs)
    assert (max(kept), min(kept)) == (9.0, -9.0)
    assert xs[kept.index(9.0)] == 777
    assert smooth([1.0, 1.0, 4.0, 1.0, 1.0], 3) == [1.0, 2.0, 2.0, 2.0, 1.0]


def test_data_cannot_end_its_block() -> None:
    text = script_json({"text": HOSTILE, "value": math.nan, "list": [math.inf, 1.5]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"text": HOSTILE, "value": None, "list": [None, 1.5]}
    assert finite({1: math.nan}) == {"1": None}
    assert visible("a\u202e<b>") == 'a<span class="mark">U+202E</span>&lt;b&gt;'


@pytest.fixture
def hostile_run(run_copy: Path) -> Path:
    for path in [*run_copy.glob("rollouts/*.jsonl"), *run_copy.glob("evaluations/*.jsonl")]:
        rewrite(path, response=HOSTILE, problem=HOSTILE, answer=HOSTILE, extracted=HOSTILE)
    return run_copy


def test_hostile_text_is_shown_and_nothing_else(hostile_run: Path, open_page: Any) -> None:
    page = open_page(write_report(Run.open(hostile_run)))
    assert page.title() == "run"
    shown = page.locator("#list li").first
    assert '<script>document.title="taken"; alert(1)</script>' in shown.locator(".text").last.inner_text()
    marks = shown.locator(".text").last.locator(".mark").all_inner_texts()
    assert marks == ["U+202E", "U+2066", "U+200B", "U+2028", "U+0000"]
    assert page.locator("#list img, #list svg, #list script, #list b").count() == 0
    page.fill("#search", "<IMG SRC=X")  # what was searched for is marked, and is text as well
    assert page.locator("#list .hit").first.inner_text() == "<img src=x"
    assert page.locator("#list img").count() == 0


def test_what_gets_in_all_the_same_does_not_run(run_copy: Path, browser: Any) -> None:
    """The page's policy is the second wall."""
    page = browser.new_page()
    page.goto(write_report(Run.open(run_copy), measure_kl=False).as_uri())
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.evaluate("""() => {
        document.body.insertAdjacentHTML("beforeend", '<img src="x:" onerror="document.title=\\'taken\\'">');
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken'";
        document.body.append(script);
    }""")
    page.wait_for_timeout(300)
    assert page.title() == "run"
    assert sum("Content Security Policy" in text for text in refused) >= 2
    page.close()


def test_the_report_in_a_browser(run_copy: Path, open_page: Any) -> None:
    page = open_page(write_report(Run.open(run_copy)))
    page.wait_for_selector("html[data-drawn=all]")
    titles = page.locator(".chart h3").all_inner_texts()
    wanted = ["Accuracy", "Reward", "Entropy", "KL divergence", "Clipped", "KL mask", "Response length", "Verdicts"]
    wanted += ["Groups without a signal", "Gradient norm", "Sampling against scoring", "Tokens a second"]
    wanted += ["Where the time goes", "Distance from the start"]
    wanted += ["Reward and accuracy against the distance from the start"]
    assert titles == wanted
    assert page.locator(".plot .main-svg").count() >= len(titles)
    assert page.locator(".plot path.js-line, .plot path.point").count() > len(titles)
    evaluation = json.loads((run_copy / "eval.json").read_text())
    assert f"{100 * evaluation['accuracy']:.1f} %" in page.locator(".tiles").inner_text()
    assert "trainer" in page.locator("details pre").first.text_content()


def test_search_and_filters(run_copy: Path, open_page: Any) -> None:
    page = open_page(write_report(Run.open(run_copy), measure_kl=False))
    everything = page.locator("#count").inner_text()
    page.click("[data-verdict=wrong]")
    assert set(page.locator("#list .verdict").all_inner_texts()) == {"wrong"}
    assert page.locator("#count").inner_text() != everything
    page.click("[data-verdict=wrong]")
    assert page.locator("#count").inner_text() == everything
    page.select_option("#step", "4")
    page.select_option("#source", "training")
    assert all("step 4" in text and "training" in text for text in page.locator("#list .meta").all_inner_texts())
    problem = page.locator("#list .problem").first.inner_text()
    page.fill("#search", problem)
    assert set(page.locator("#list .problem").all_inner_texts()) == {problem}
    page.fill("#search", "no response has this")
    assert page.locator("#count").inner_text().startswith("0 of")


def test_phone_dark_and_print(run_copy: Path, open_page: Any) -> None:
    report = write_report(Run.open(run_copy), measure_kl=False)
    page = open_page(report, viewport={"width": 360, "height": 740}, is_mobile=True, color_scheme="dark")
    page.wait_for_selector("html[data-drawn=all]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    assert page.locator("#theme").inner_text() == "Light"
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    page.click("#theme")
    assert page.evaluate(ground) == dark
    page.emulate_media(media="print")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert not page.locator("#controls").is_visible()


def test_a_run_that_was_stopped_has_a_report(run_copy: Path, open_page: Any) -> None:
    (run_copy / "eval.json").unlink()
    for path in run_copy.glob("rollouts/*.safetensors"):
        path.unlink()
    lines = (run_copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_copy / "metrics.jsonl").write_text("".join(lines[:3]))
    page = open_page(write_report(Run.open(run_copy)))
    notes = " ".join(page.locator(".note").all_inner_texts())
    assert "stands at step 3 of 8" in notes
    assert "No held-out accuracy" in notes
    assert "is not measured" in notes or "is not known" in notes


def test_the_command_writes_the_page(run_copy: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.html"
    result = CliRunner().invoke(app, ["report", str(run_copy), "-o", str(target), "--no-kl"])
    assert result.exit_code == 0
    assert target.stat().st_size < 10e6
    markup = target.read_text().split('<script type="application/json"')[0]
    assert not any(loads in markup for loads in ("src=", "<link", "@import", "url("))
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2
