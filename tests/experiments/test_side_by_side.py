import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from longspan.errors import ConfigError
from longspan.experiments.side_by_side import run_command, run_side_by_side


def script(tmp_path: Path, name: str, body: str) -> list[str]:
    # Without site packages a process starts in milliseconds.
    return [sys.executable, "-S", "-c", f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n{body}"]


def test_two_at_once_and_never_more(tmp_path: Path) -> None:
    """Each waits until another one runs, which would never happen one after another; and each counts the others."""
    body = """
mine = here / "running-{0}"
mine.touch()
while len(list(here.glob("running-*"))) + len(list(here.glob("done-*"))) < 2: time.sleep(0.01)
(here / "most-{0}").write_text(str(len(list(here.glob("running-*")))))
time.sleep(0.1)
mine.unlink()
(here / "done-{0}").touch()
"""
    commands = {str(k): script(tmp_path, str(k), body.format(k)) for k in range(4)}
    assert run_side_by_side(commands, 2, tmp_path / "logs") == dict.fromkeys("0123", 0)
    assert max(int((tmp_path / f"most-{k}").read_text()) for k in range(4)) == 2


def test_exit_codes_and_output_are_kept(tmp_path: Path) -> None:
    said: list[str] = []
    commands = {
        "good": script(tmp_path, "good", "print('fine')"),
        "bad": script(tmp_path, "bad", "raise SystemExit('no text')"),
    }
    assert run_side_by_side(commands, 1, tmp_path / "logs", said.append) == {"good": 0, "bad": 1}
    assert (tmp_path / "logs" / "good.log").read_text() == "fine\n"
    assert any("bad" in line and "no text" in line for line in said)
    with pytest.raises(ConfigError):
        run_side_by_side(commands, 0, tmp_path)


def test_an_interrupt_stops_all_and_waits_for_them(tmp_path: Path) -> None:
    body = """
import signal, sys
def stop(*_):
    time.sleep(0.2)
    (here / "saved-{0}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(here / "ready-{0}").touch()
time.sleep(60)
"""

    def interrupt(line: str) -> None:
        if "third" in line:
            while len(list(tmp_path.glob("ready-*"))) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt

    commands = {name: script(tmp_path, name, body.format(name)) for name in ("first", "second", "third")}
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(commands, 3, tmp_path / "logs", interrupt)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-first", "saved-second"}


def test_a_command_that_is_stopped_may_save_its_work(tmp_path: Path) -> None:
    """`subprocess.run` would kill it a quarter of a second after Ctrl-C."""
    body = """
import signal, sys
def stop(*_):
    time.sleep(0.5)
    (here / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(here / "ready").touch()
time.sleep(60)
"""

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_command(script(tmp_path, "one", body), start_new_session=True)
    thread.join()
    assert (tmp_path / "saved").exists()
    assert run_command(script(tmp_path, "two", "raise SystemExit(3)")) == 3
