"""Write what tests and docs show of the bundled model: pinned losses and generated text, and three samples.

    python benchmarks/pin_bundled_model.py [--model FOLDER] [--pinned FILE] [--samples FOLDER]

Run it on a CPU after the bundled model has changed. Settings and prompts in the file of pinned figures are kept. The
commands of the samples are read from docs/bundled_model.md.
"""

import argparse
import contextlib
import json
import re
import shlex
import sys
from pathlib import Path

import torch
from cards import usage_errors

from longspan.bundled import FOLDER
from longspan.cli.main import run
from longspan.text_model import load

ROOT = Path(__file__).resolve().parents[1]
TESTS, PAGE = ROOT / "tests" / "bundled", ROOT / "docs" / "bundled_model.md"
SAMPLE = re.compile(r"^    longspan (generate .*) > docs/samples/(\w+\.txt)$", re.MULTILINE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=FOLDER, help="a model folder; default: the bundled model")
    parser.add_argument("--pinned", type=Path, default=TESTS / "pinned.json", help="the file of pinned figures")
    parser.add_argument("--samples", type=Path, default=ROOT / "docs" / "samples", help="the folder of the samples")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with usage_errors(parser):
        pin(asked.model, asked.pinned)
        write_samples(asked.model, asked.samples)


def pin(folder: Path, path: Path) -> None:
    """Score and generate again what the file contains. Text is generated in float32, which most machines agree on."""
    pinned, model = json.loads(path.read_text(encoding="utf-8")), load(folder, device="cpu", int8=False)
    passage = (TESTS / "passage.txt").read_bytes()
    for case in pinned["losses"]:
        found = model.score(passage, method="stream", **case["settings"])
        assert found.losses is not None
        case["bits"] = round(found.bits, 7)
        case["losses"] = [round(loss, 7) for loss in found.losses[pinned["places"]].tolist()]
    for case in pinned["generated"]:
        case["text"] = model.generate(pinned["prompt"], 64, temperature=case["temperature"], seed=3)
    path.write_text(json.dumps(pinned, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {pinned['losses'][0]['bits']} bits per byte of the passage")


def write_samples(model: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for command, name in SAMPLE.findall(PAGE.read_text(encoding="utf-8")):
        verb, *rest = shlex.split(command)
        with (folder / name).open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            code = run([verb, str(model), *rest, "--device", "cpu"])
        if code:
            sys.exit(code)
        print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
