"""The commands and the Python code of docs/data.md run as they are on the page."""

import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from longspan.data.corpora import CORPORA
from longspan.data.splits import named_split
from longspan.data.tokenizer_specs import TOKENIZER_SPECS
from tests.programs import install

SMALLER = "--set model.layers=1 --set model.width=32 --set model.inner=32 --set training.validate_tokens=1024"
SMALL_CORPUS = """
import dataclasses
from longspan.data.corpora import CORPORA, CorpusFile
known = CORPORA["tinyshakespeare"]
CORPORA[known.name] = dataclasses.replace(known, url={url!r}, files=(CorpusFile("input.txt"),))
"""
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "input.txt").write_text("First Citizen:\n")
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/input.txt"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_the_code_blocks_run_in_order(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user runs them, except that models are small, and a small text replaces the corpus of the page."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```") // 2 > 5
    output = []
    install(tmp_path / "bin", first=SMALL_CORPUS.format(url=url))
    for language, code in blocks:
        code = code.replace("longspan train ", f"longspan train {SMALLER} ")
        command = ["bash", "-euc", code] if language == "bash" else ["python", "-c", code]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (code, done.stderr)
        output.append(done.stdout + done.stderr)
    assert "train: 26,240 tokens in train/rivers.txt, train/towns.txt" in output[1]
    assert (work / "runs" / "tuned" / "best").is_dir()
    assert any("--encoding cp1252" in text for text in output)
    assert (tmp_path / "cache" / "corpora" / "tinyshakespeare" / "input.txt").read_text() == "First Citizen:\n"


def test_the_page_names_every_tokenizer_and_split_name() -> None:
    assert all(f"`{name}`" in PAGE for name in TOKENIZER_SPECS)
    rows = re.findall(r"^\| (`.*`) \| (train|valid|test) \|$", PAGE, re.MULTILINE)
    named = {name: split for names, split in rows for name in re.findall(r"`(\w+)`", names)}
    assert len(named) == 6
    assert all(named_split(name) == split for name, split in named.items())
    assert "tinyshakespeare" in CORPORA
