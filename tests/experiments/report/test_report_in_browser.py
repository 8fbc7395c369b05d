"""The report in a real browser, at the width of a phone, a tablet and a desktop; skipped without Chromium."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.experiments.report.report import Effort, build_report
from longspan.experiments.report.runs import read_run

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.flaky(reruns=2),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
SMALL = Effort(stream=200, sliding=20, targets=10, longest_context=50, attention=200, sample=20)


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


def test_it_is_readable_at_any_width(browser: Any, report: Path) -> None:
    for width in (360, 768, 1440):
        page = browser.new_page(viewport={"width": width, "height": 800})
        requests, messages = [], []
        page.on("request", lambda request, requests=requests: requests.append(request.url))
        page.on("console", lambda message, messages=messages: messages.append(message.text))
        page.on("pageerror", lambda error, messages=messages: messages.append(str(error)))
        page.goto(report.as_uri())
        assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]
        assert messages == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0 && i.alt.length > 0)")
        assert len(shown) == 12
        assert all(shown)
        small = page.evaluate(
            "[...document.querySelectorAll('p, td, th, pre, figcaption, a')]"
            ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"
        )
        assert small == 0
        # A point of a figure is at least 1.1 pixels; a row with a short run name has at most three lines.
        scales = page.evaluate("[...document.images].map(i => i.getBoundingClientRect().width / i.naturalWidth)")
        assert min(scales) * 96 / 72 > 1.1
        names = page.evaluate(
            "[...document.querySelectorAll('td:first-child')].map(e => [e.innerText, e.clientHeight])"
        )
        assert all(height < 90 for name, height in names if name == "xl")
        page.click("text=Sample text")
        assert page.evaluate("location.hash") == "#part-5"
        page.close()
