"""The report in a real browser, at the width of a phone and of a desk; skipped where there is none."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.analysis.report import Effort, build_report
from longspan.analysis.runs import read_run

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
SMALL = Effort(scored=200, slid=20, targets=10, longest=50, looked=200, written=20)


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def report(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    runs = [read_run(make_run("xl", memory=20)), read_run(make_run("a-run-with-a-very-long-name-" * 4, "vanilla"))]
    (tmp_path / "scratch").mkdir()
    html = build_report(runs, tmp_path / "scratch", torch.device("cpu"), torch.float32, SMALL)
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    return tmp_path / "report.html"


def test_it_opens_well_at_any_width(browser: Any, report: Path) -> None:
    for width in (360, 768, 1440):
        page = browser.new_page(viewport={"width": width, "height": 800})
        asked, said = [], []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.goto(report.as_uri())
        assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0 && i.alt.length > 0)")
        assert len(shown) == 12
        assert all(shown)
        small = page.evaluate(
            "[...document.querySelectorAll('p, td, th, pre, figcaption, a')]"
            ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"
        )
        assert small == 0
        # A point of a picture is a pixel or more; a run's name stays in sight, and in one piece where it can.
        scales = page.evaluate("[...document.images].map(i => i.getBoundingClientRect().width / i.naturalWidth)")
        assert min(scales) * 96 / 72 > 1.1
        names = page.evaluate(
            "[...document.querySelectorAll('td:first-child')].map(e => [e.innerText, e.clientHeight])"
        )
        assert all(height < 60 for name, height in names if name == "xl")
        page.click("text=Sample text")
        assert page.evaluate("location.hash") == "#part-5"
        page.close()
