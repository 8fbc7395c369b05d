"""The page in a real browser; skipped without Chromium.

The server runs in this process, so a test can compare what the page shows with the model itself.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

import longspan
from longspan.serving.app import create_app
from longspan.serving.page import routes
from longspan.serving.settings import Settings
from longspan.text_model import TextModel
from tests.serving.conftest import tiny

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.flaky(reruns=2),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
AXE = next(
    (
        path
        for path in (
            Path(os.environ.get("AXE_CORE", "axe.min.js")),
            Path("node_modules/axe-core/axe.min.js"),
            Path("/usr/lib/node_modules/axe-core/axe.min.js"),
        )
        if path.is_file()
    ),
    None,
)
TABS = ("write", "look", "compare", "measure", "status")
SHORT = "Captain Ellisworth came to the harbour, and Captain Ellisworth went home again. "


class Server(uvicorn.Server):
    """In a thread, where signals cannot be handled."""

    def install_signal_handlers(self) -> None:
        pass


def serve(texts: dict[str, TextModel], folder: Path, key: str | None = None) -> Iterator[str]:
    app = create_app(texts, Settings(width=4, rows=4, state_folder=folder, api_key=key))
    server = Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def text() -> TextModel:
    """Writes letters: other bytes would often be parts of no character, which nobody can click."""
    made = tiny()
    with torch.no_grad():
        made.model.head.biases[0][ord("a") : ord("z") + 1] += 8.0  # type: ignore[union-attr,index]
    return made


@pytest.fixture(scope="module")
def address(text: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    lstm = longspan.init("lstm", layers=1, width=16, device="cpu", reading={"segment": 16})
    yield from serve({"tiny": text, "other": tiny(1), "lstm": lstm}, tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def problems() -> list[str]:
    """Messages of the browser and requests to anywhere else. At the end there must be none."""
    return []


@pytest.fixture
def open_page(browser: Any, address: str, problems: list[str]) -> Iterator[Open]:
    """Opens a tab of the page."""
    opened = []

    def open_(tab: str, *, width: int = 1280, scheme: str = "light", base: str = address, key: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(90_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(base) or problems.append(request.url))
        # The example is long for a slow machine.
        if base == address:
            page.route("**/static/example.txt", lambda route: route.fulfill(body=SHORT * 3))
        page.goto(f"{base}/#{tab}")
        for tried in ("wrong", key) if key else ():
            page.locator("#key-dialog[open]").wait_for()
            assert page.is_visible("#key-wrong") == (tried == key)
            page.fill("#key", tried)
            page.keyboard.press("Enter")
        page.locator("body[data-ready]").wait_for()
        opened.append(context)
        return page

    yield open_
    for context in opened:
        context.close()
    assert problems == []


def until(page: Any, script: str, seconds: float = 90) -> Any:
    """Waits for a value. `wait_for_function` cannot be used: the policy of the page forbids its `eval`."""
    end = time.monotonic() + seconds
    while not (value := page.evaluate(script)):
        assert time.monotonic() < end, script
        page.wait_for_timeout(40)
    return value


def idle(page: Any) -> None:
    """Waits until nothing is being written."""
    until(page, "document.getElementById('write-text').getAttribute('aria-busy') === 'false'")


def written(page: Any) -> str:
    return str(page.evaluate("document.getElementById('write-text').textContent"))


def looked(page: Any) -> None:
    """Waits until the text was read and a token is shown."""
    page.locator("#look-candidates li").first.wait_for()
    page.locator("#look-progress").wait_for(state="hidden")


def write(page: Any, text: str, count: int) -> None:
    """Starts again with a text of its own."""
    idle(page)
    page.fill("#write-count", str(count))
    page.click("#write-new")
    page.fill("#write-edited", text)
    page.click("#write-edited-go")
    page.locator("#write-text .t:not(.given)").first.wait_for()


def test_write_streams_shades_stops_and_continues(open_page: Open) -> None:
    page = open_page("write")
    page.locator("#write-text .t:not(.given)").nth(3).wait_for()  # it starts by itself
    assert SHORT.strip()[:40] in written(page)
    page.click("#write-stop")
    idle(page)
    page.fill("#write-temperature", "0")
    write(page, "abcabc", 5000)
    page.locator("#write-text .t:not(.given)").nth(10).wait_for()
    page.click("#write-stop")
    idle(page)
    stopped = page.locator("#write-text .t:not(.given)").count()
    assert 10 < stopped < 5000
    page.wait_for_timeout(200)
    assert page.locator("#write-text .t:not(.given)").count() == stopped
    page.fill("#write-count", "8")
    page.click("#write-go")
    idle(page)
    assert page.locator("#write-text .t:not(.given)").count() == stopped + 8
    # The shade follows the surprisal that is shown for a token.
    page.locator("#write-text .t:not(.given)").first.click()
    shown = page.inner_text("#write-detail")
    bits = float(re.search(r": ([\d.]+) bits", shown)[1])  # type: ignore[index]
    level = sum(bits >= edge for edge in (0.25, 1, 2, 3, 4.5, 6.5))
    assert f"s{level}" in page.locator("#write-text .t:not(.given)").first.get_attribute("class").split()
    assert "Candidates" in shown


def test_write_survives_a_lost_session_and_an_empty_field(open_page: Open, problems: list[str]) -> None:
    page = open_page("write")
    page.fill("#write-count", "4")
    page.click("#write-stop")
    idle(page)
    with page.expect_request("**/continue") as asked:
        page.click("#write-go")
    idle(page)
    assert page.request.delete(asked.value.url.removesuffix("/continue")).ok  # as after a crash of the server
    before = page.locator("#write-text .t:not(.given)").count()
    page.click("#write-go")
    until(page, f"document.querySelectorAll('#write-text .t:not(.given)').length === {before + 4}")
    idle(page)
    problems[:] = [problem for problem in problems if "404" not in problem]
    page.fill("#write-count", "")
    page.click("#write-go")
    page.get_by_text("Tokens must be a number from 1 to 5,000").wait_for()


def test_write_gives_what_the_model_gives(open_page: Open, text: TextModel) -> None:
    page = open_page("write")
    page.click("#write-stop")
    idle(page)
    page.fill("#write-temperature", "0")
    write(page, "the harbour ", 24)
    idle(page)
    assert written(page) == "the harbour " + text.generate("the harbour ", 24, temperature=0)
    # Two moments of one session, saved: the first is loaded and continues with the same bytes.
    page.click("#write-save")
    page.get_by_text("Saved with its sessions.").wait_for()
    page.fill("#write-count", "9")
    page.fill("#write-temperature", "1.5")
    page.click("#write-go")
    idle(page)
    once = written(page)
    page.click("#write-go")
    idle(page)
    page.click("#write-save")
    page.get_by_text("Saved with its sessions.").wait_for()
    page.select_option("#write-saved", "1")
    page.click("#write-load")
    until(page, f"document.getElementById('write-text').textContent.length === {len('the harbour ') + 24}")
    page.click("#write-go")
    idle(page)
    assert written(page) == once
    page.fill("#write-temperature", "0")
    page.fill("#write-count", "24")
    # An edit continues from there: the text after it is that of the edited text.
    page.click("#write-edit")
    page.fill("#write-edited", "the harp")
    page.click("#write-edited-go")
    idle(page)
    assert written(page) == "the harp" + text.generate("the harp", 24, temperature=0)
    labels = page.locator("#write-tree button").all_inner_texts()
    assert len(labels) == 3  # "the har", and two ways to go on
    assert labels[0].startswith("the har")


def test_write_forks_saves_and_loads(open_page: Open) -> None:
    page = open_page("write")
    page.click("#write-stop")
    write(page, "one two three", 12)
    idle(page)
    page.click("#write-fork")
    idle(page)
    first = written(page)
    assert page.locator("#write-tree button").count() == 3
    page.locator("#write-tree button").nth(2).click()
    second = written(page)
    assert first != second
    shared = page.locator("#write-tree button").first
    shared.click()
    base = written(page)
    assert first.startswith(base)
    assert second.startswith(base)
    # Another branch from a token in the middle, by keyboard: it keeps what is before the token.
    page.focus("#write-text")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    idle(page)
    prefix = "one two three" + base[13:17]
    assert written(page).startswith(prefix)
    assert page.locator("#write-tree button").count() == 5
    kept = written(page)
    page.click("#write-save")
    page.get_by_text("Saved with its sessions.").wait_for()
    page.reload()
    page.locator("body[data-ready]").wait_for()
    page.locator("#write-text .t:not(.given)").first.wait_for()
    page.click("#write-stop")
    idle(page)
    page.click("#write-load")
    until(page, f"document.getElementById('write-text').textContent === {kept!r}")
    assert page.locator("#write-tree button").count() == 5
    page.fill("#write-count", "6")
    page.click("#write-go")
    idle(page)
    assert written(page).startswith(kept)
    assert page.locator("#write-text .t:not(.given)").count() >= 12


def point_at(page: Any, token: int) -> None:
    """Move the pointer over a token until it is selected. The example's own selection may arrive after a move."""
    for _ in range(100):
        page.mouse.move(0, 0)
        page.locator("#look-text .t").nth(token).hover()
        for _ in range(10):
            if f"token {token}." in page.text_content("#look-detail"):
                return
            page.wait_for_timeout(50)
    raise AssertionError(f"token {token} was not selected")


def test_look_shows_attention_both_ways(open_page: Open) -> None:
    page = open_page("look")
    looked(page)  # it starts by itself
    assert page.inner_text("#look-text").strip() == (SHORT * 3).strip()
    for name in ("layer", "head"):
        page.select_option(f"#look-{name}", "")
    point_at(page, 200)
    until(page, "document.querySelectorAll('#look-text .w-later').length")
    marks = page.evaluate(
        "['w-earlier', 'w-later'].map(c => [...document.querySelectorAll(`#look-text .${c}`)].map(e => +e.dataset.i))"
    )
    assert max(marks[0]) < 200 < min(marks[1])
    assert min(marks[0]) < 200 - 16  # beyond the segment
    chances = [float(t.rstrip("%")) for t in page.locator("#look-candidates .number").all_inner_texts()]
    assert len(chances) == 10
    assert chances == sorted(chances, reverse=True)
    # A head of its own, by its button and by the lists; the keyboard moves the token.
    combined = page.inner_text("#look-earlier")
    page.locator("#look-text .t").nth(200).click()
    page.locator("#look-heads button").nth(2).click()
    until(page, f"document.getElementById('look-earlier').innerText !== {combined!r}")
    assert (page.input_value("#look-layer"), page.input_value("#look-head")) == ("1", "0")
    page.focus("#look-text")
    page.keyboard.press("ArrowLeft")
    until(page, "document.getElementById('look-detail').textContent.includes('token 199.')")


def test_look_says_that_a_family_has_no_attention(open_page: Open) -> None:
    page = open_page("look")
    looked(page)
    page.select_option("#model", "lstm")
    page.click("#look-go")
    page.get_by_text("The family lstm has no attention").wait_for()
    page.locator("#look-candidates li").first.wait_for()
    assert page.is_disabled("#look-layer")


def test_compare_memories_and_models(open_page: Open, text: TextModel) -> None:
    page = open_page("compare")
    page.click("#compare-go")
    page.get_by_text("Done.").wait_for()
    cells = page.locator("#compare-table tbody td:nth-child(2)").all_inner_texts()
    content = SHORT * 3
    own = longspan.experiments.memory_gain.with_memory
    expected = [
        text.score(content, memory=memory, segment=own(text.model, memory).segment, clamp=own(text.model, memory).clamp,
                   method="stream").bits_per_byte
        for memory in (0, 64, 512, 2048)
    ]  # fmt: skip
    assert [float(cell) for cell in cells] == pytest.approx(expected, abs=1e-4)
    saved = [float(cell) for cell in page.locator("#compare-ranked tbody td:nth-child(4)").all_inner_texts()]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 0
    assert page.locator("#compare-text .w-saved").count() > 0
    page.select_option("#compare-unit", "tokens")
    page.select_option("#compare-pair", "0")
    assert page.locator("#compare-ranked tbody tr").count() == 25
    page.check("#compare-models")
    page.click("#compare-go")
    page.locator("#compare-table td", has_text="other").wait_for()
    page.get_by_text("Done.").wait_for()
    cells = page.locator("#compare-table tbody td:nth-child(2)").all_inner_texts()
    assert float(cells[1]) == pytest.approx(tiny(1).score(content).bits_per_byte, abs=1e-4)


def test_measure_a_dropped_text(
    open_page: Open, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MEMORIES", (0, 64))
    page = open_page("measure")
    content = SHORT * 3 + "Zq#xv kkw!! 0xFF9 zzzyx qqpwx vvkzz jjxqz\r\n" + SHORT * 3
    page.evaluate(
        """content => {
            const data = new DataTransfer();
            data.items.add(new File([content], "dropped.txt", { type: "text/plain" }));
            document.getElementById("measure-drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data }));
        }""",
        content,
    )
    page.get_by_text(f"dropped.txt: {len(content):,} bytes").wait_for()
    page.click("#measure-go")
    page.get_by_text("Done.").wait_for()
    shown = re.search(r"([\d.]+) bits per byte over ([\d,]+)", page.inner_text("#measure-numbers"))
    assert float(shown[1]) == pytest.approx(text.score(content).bits_per_byte, abs=1e-4)  # type: ignore[index]
    assert page.locator("#measure-passages li").count() > 3
    assert page.locator("#measure-chart canvas").count() == 1
    page.click("#measure-memory")
    page.get_by_text("of a longer text, its middle").wait_for()
    page.get_by_text("Done.").wait_for()
    assert page.locator("#measure-memory-table tbody tr").count() == 2
    # A long text: partial results and cancel.
    path = tmp_path / "long.txt"
    path.write_text(SHORT * 1500)
    page.set_input_files("#measure-file", path)
    page.get_by_text("long.txt: 120,000 bytes").wait_for()
    page.click("#measure-go")
    until(page, "/over [1-9][\\d,]* of 120,000/.test(document.getElementById('measure-numbers').textContent)")
    page.click("#measure-cancel")
    page.get_by_text("Cancelled; the results so far stay.").wait_for()
    read = re.search(r"over ([\d,]+) of", page.inner_text("#measure-numbers"))
    assert 0 < int(read[1].replace(",", "")) < 120_000  # type: ignore[index]


def test_status_shows_the_session(open_page: Open, text: TextModel) -> None:
    page = open_page("write")
    page.click("#write-stop")
    write(page, "some text ", 40)
    idle(page)
    page.click("#tab-status")
    page.locator("#status-sessions tbody td", has_text="50").first.wait_for()
    facts = dict(
        zip(
            page.locator("#status-numbers dt").all_inner_texts(),
            page.locator("#status-numbers dd").all_inner_texts(),
            strict=True,
        )
    )
    size = text.initial_state(1, filled=True, trainable=False).nbytes_per_row()
    assert facts["State of one full session"] == f"{size / 1000:.1f} kB"
    assert int(facts["Sessions"].split(",")[0]) >= 1
    page.locator("#status-chart canvas").wait_for()


def test_errors_are_shown_and_go_away(open_page: Open, problems: list[str]) -> None:
    page = open_page("compare")
    page.fill("#compare-input", "x" * 20_001)
    page.click("#compare-go")
    page.get_by_text("has 20001 bytes").wait_for()
    assert page.get_by_role("alert").count() == 1
    assert "400" in problems.pop()
    page.fill("#compare-input", "short text")
    page.click("#compare-go")
    page.get_by_text("Done.").wait_for()
    assert page.get_by_role("alert").count() == 0


def test_a_key_is_asked_for(open_page: Open, text: TextModel, problems: list[str], tmp_path: Path) -> None:
    """Again if it is wrong. It stays in this tab: the sessions of the page use it too."""
    for address in serve({"tiny": text}, tmp_path, "0123456789abcdef"):
        page = open_page("write", base=address, key="0123456789abcdef")
        page.locator("#write-text .t:not(.given)").nth(3).wait_for()
        page.click("#write-stop")
        idle(page)
        page.reload()
        page.locator("body[data-ready]").wait_for()
        assert not page.is_visible("#key-dialog")
        page.context.close()  # while the server can still forget its sessions
    assert [("401" in problem) for problem in problems] == [True, True]  # without a key, and with the wrong one
    problems.clear()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        pytest.param(1280, "light", marks=pytest.mark.torture),
        pytest.param(390, "light", marks=pytest.mark.torture),
        pytest.param(1280, "dark", marks=pytest.mark.torture),
    ],
)
def test_every_tab_fits_is_reached_by_keyboard_and_is_accessible(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("write", width=width, scheme=scheme)
    page.locator("#write-text .t:not(.given)").first.wait_for()
    page.click("#write-stop")
    idle(page)
    page.locator("#write-text .t:not(.given)").first.click()
    page.focus("#tab-write")
    for tab in TABS:
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.is_visible(f"#panel-{tab}")
        if tab == "look":
            looked(page)
        elif tab in ("compare", "measure"):
            page.click(f"#{tab}-go")
            page.locator(f"#panel-{tab}").get_by_text("Done.").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if AXE is not None:
            page.evaluate(AXE.read_text() + ";0")
            problems = page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
            assert problems == []
        page.focus(f"#tab-{tab}")
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-write"


def test_the_bundled_model_writes_within_seconds(open_page: Open, tmp_path: Path) -> None:
    for address in serve({"bundled": longspan.load(device="cpu")}, tmp_path / "sessions"):
        page = open_page("write", base=address)
        page.locator("#write-text .t:not(.given)").nth(8).wait_for()
        page.click("#write-stop")
        idle(page)
        assert "Captain Ellisworth" in written(page)
        assert "memory of 1,024 tokens" in page.inner_text("#about")
