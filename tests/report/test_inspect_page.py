"""`tepo inspect` in a browser: colours, objectives side by side, sorting, filters, numbers, long and hostile texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_inspect_credit import made_subject
from test_report_page import HOSTILE, rewrite
from typer.testing import CliRunner

from tepo.cli import app
from tepo.report import inspect_page
from tepo.report.inspect_credit import objectives
from tepo.report.inspect_page import inspect_prompt, inspect_run

NAMES = ("tepo", "grpo", "dapo", "gspo")


@pytest.fixture
def page(run_copy: Path, open_page: Any) -> Any:
    page = open_page(inspect_run(run_copy, names=NAMES, count=12))
    page.locator(".row").last.locator(".token").first.wait_for()
    return page


def colours(page: Any, row: int = 0) -> list[str]:
    return (
        page.locator(".row").nth(row).locator(".token").evaluate_all("all => all.map(one => one.style.backgroundColor)")
    )


def test_colours_and_objectives(page: Any) -> None:
    assert page.locator("#colour").input_value() == "weight"
    assert page.locator("#objective option").all_inner_texts() == ["tepo (this run)", "grpo", "dapo", "gspo"]
    rewards = page.locator(".row .meta").all_inner_texts()
    right = next(place for place, text in enumerate(rewards) if text.startswith("correct"))
    wrong = next(place for place, text in enumerate(rewards) if text.startswith("wrong"))
    assert all("--plus" in colour for colour in colours(page, right) if colour)
    assert all("--minus" in colour for colour in colours(page, wrong) if colour)
    by_weight = colours(page, right)
    page.select_option("#colour", "entropy")
    assert colours(page, right) != by_weight
    assert "Entropy now" in page.locator("#about").inner_text()
    assert "≥" in page.locator("#scale").inner_text()
    page.select_option("#colour", "mask")
    masked = page.locator(".token.flagged").count()
    assert 0 < masked < page.locator(".token").count()
    page.select_option("#objective", "1")  # GRPO has no mask
    assert "has no KL mask" in page.locator("#scale").inner_text()
    assert page.locator(".token.flagged").count() == 0
    assert page.locator(".token.unknown").count() == page.locator(".token").count()


def test_side_by_side(page: Any) -> None:
    page.click("#beside")
    first = page.locator(".row").first
    assert first.locator("h4").all_inner_texts() == ["tepo (this run)", "grpo", "dapo", "gspo"]
    assert len(set(first.locator(".tokens").all_inner_texts())) == 1
    page.click("#columns button >> text=dapo")
    assert first.locator("h4").all_inner_texts() == ["tepo (this run)", "grpo", "gspo"]
    page.click("#beside")
    assert first.locator("h4").count() == 0


def test_sort_filter_and_search(page: Any) -> None:
    def said(label: str) -> list[float]:
        facts = [text for text in page.locator(".row .meta span").all_inner_texts() if text.startswith(label)]
        return [float(text.removeprefix(label)) for text in facts]

    page.select_option("#sort", "reward")
    assert said("reward ") == sorted(said("reward "), reverse=True)
    page.select_option("#sort", "entropy")
    entropies = said("mean entropy ")
    assert entropies == sorted(entropies, reverse=True)
    page.select_option("#field", "reward")
    page.fill("#low", "0.5")
    assert set(said("reward ")) == {1.0}
    kept = page.locator(".row").count()
    assert page.locator("#count").inner_text() == f"{kept} of 12 responses"
    page.fill("#low", "")
    page.fill("#search", page.locator(".row .problem").first.inner_text())
    assert 0 < page.locator(".row").count() <= 8


def test_numbers_of_a_token(page: Any, run_copy: Path) -> None:
    assert "Point at a token" in page.locator("#detail").inner_text()
    page.locator(".row").first.locator(".token").nth(3).hover()
    shown = page.locator("#detail").inner_text()
    assert "4 of " in shown
    assert all(name in shown for name in ("log-prob", "entropy", "at sampling", *NAMES, "Likeliest here"))
    assert page.locator("#detail .likely li").count() == 5
    assert page.locator("#detail .likely .taken").count() <= 1
    page.locator(".row").first.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "5 of " in page.locator("#detail").inner_text()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#detail").inner_text() == shown


def test_hostile_tokens_are_text(run_copy: Path, open_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = inspect_page.token_texts
    monkeypatch.setattr(inspect_page, "token_texts", lambda policy, ids: dict.fromkeys(texts(policy, ids), HOSTILE))
    for path in run_copy.glob("rollouts/*.jsonl"):
        rewrite(path, problem=HOSTILE, answer=HOSTILE, extracted=HOSTILE)
    page = open_page(inspect_run(run_copy, names=["grpo"], count=4))
    token = page.locator(".token").first
    assert '<script>document.title="taken"' in token.inner_text()
    assert token.locator(".mark").all_inner_texts() == ["U+202E", "U+2066", "U+200B", "U+2028", "U+0000"]
    token.hover(position={"x": 3, "y": 3})
    assert "<img src=x" in page.locator("#detail .likely code").first.inner_text().replace("␣", " ")
    assert page.locator("main img, main svg, main script, main b").count() == 0
    assert page.title() == "run"


def test_thousands_of_tokens(open_page: Any, tmp_path: Path) -> None:
    subject = made_subject((4000, 3000, 4000, 4000, 4000, 4000, 50, 60), context=4096)
    path = tmp_path / "long.html"
    inspect_page._write(subject, objectives(["tepo", "gspo"], None), None, 5, path)
    page = open_page(path)
    rows = page.locator(".row")
    assert rows.count() == 8
    rows.first.locator(".token").nth(3999).wait_for(state="attached")
    # What is far from the screen is not drawn, and given up again when it is left.
    assert rows.nth(6).locator(".token").count() == 0
    rows.nth(7).scroll_into_view_if_needed()
    rows.nth(7).locator(".token").nth(59).wait_for(state="attached")
    rows.first.locator(".token").first.wait_for(state="detached")
    page.select_option("#sort", "tokens")
    assert "4,000 tokens" in page.locator(".row .meta").first.inner_text()


def test_on_a_phone(run_copy: Path, open_page: Any) -> None:
    path = inspect_run(run_copy, names=NAMES, count=8)
    page = open_page(path, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    page.locator(".token").nth(2).tap()
    assert "3 of " in page.locator("#detail").inner_text()
    page.click("#beside")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_model_and_a_prompt(finished_run: Path, tmp_path: Path, open_page: Any) -> None:
    model = str(finished_run / "checkpoints" / "step_8")
    judged = inspect_prompt(model, "412+319=", answer="731", names=NAMES, count=4, output=tmp_path / "judged.html")
    page = open_page(judged)
    assert page.locator(".row").count() == 4
    assert page.locator("#objective option").all_inner_texts() == list(NAMES)
    assert {text.split(" ")[0] for text in page.locator(".verdict").all_inner_texts()} <= {"correct", "wrong", "no"}
    open_ended = inspect_prompt(model, "412+319=", names=NAMES, count=2, output=tmp_path / "open.html")
    page = open_page(open_ended)
    assert page.locator("#objective, #beside").count() == 0
    assert page.locator("#colour").input_value() == "surprise"
    assert any(colours(page))


def test_the_command(run_copy: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run_copy), "--rollout", "0", "--objectives", "cispo", "-k", "4"])
    assert result.exit_code == 0, result.output
    text = (run_copy / "inspect.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [one["name"] for one in data["objectives"]] == ["tepo (this run)", "cispo"]
    assert len(data["rows"]) == 4
    assert torch.tensor([row["tokens"] for row in data["rows"]]).gt(0).all()
    for wrong in (["--answer", "3"], ["--objectives", "ppo"], ["--rollout", "9"]):
        assert CliRunner().invoke(app, ["inspect", str(run_copy), *wrong]).exit_code == 2
