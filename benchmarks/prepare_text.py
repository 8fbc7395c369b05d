"""Speed and memory of preparing a text with BPE, against the `tokenizers` library on the same cores, and after a kill.

    python benchmarks/prepare_text.py FOLDER --megabytes 5000 --part 1000 --out prepare.json

FOLDER has JSON lines with the field `text`, which may be compressed. So many megabytes of varied text are made of them:
copies with other digits, letters and cases, so that most words are new. Then, each in a new process:

- the library encodes a part, batches of 16 MB, and keeps nothing;
- longspan prepares that part, from files to ids on disk; again, killed in the middle, and continued;
- longspan prepares all of it with BPE, and the part as bytes.

Memory is the largest sum of the resident memory of all processes, sampled every 50 ms.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

from longspan.data.sample import sample_text
from longspan.tokenizers.train_subwords import train_subwords

PREPARE = """
import json, sys
from longspan.data import open_corpus
text = open_corpus(sys.argv[1], None, sys.argv[2])
print(json.dumps({"tokens": len(text), "fingerprint": text.fingerprint}))
"""
LIBRARY = """
import json, sys, tokenizers
from pathlib import Path
found, tokens = tokenizers.Tokenizer.from_file(sys.argv[2] + "/tokenizer.json"), 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    with path.open("rb") as file:
        while lines := file.readlines(1 << 24):
            texts = [json.loads(line)["text"] for line in lines]
            tokens += sum(map(len, found.encode_batch_fast(texts, add_special_tokens=False)))
print(json.dumps({"tokens": tokens}))
"""
SHARDS = 20


class Measured(NamedTuple):
    """What a process did: seconds, megabytes of memory of it and its children, and its output."""

    seconds: float
    memory: float
    output: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=5000)
    parser.add_argument("--part", type=int, default=1000)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--work", type=Path, help="where the text and the cache are written; default: a temporary one")
    parser.add_argument("--cores", type=int, help="use so many cores; default: all")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        found = measure(given, Path(folder))
    found |= {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "vocabulary": given.vocabulary}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:32} {value:,.2f}" if isinstance(value, float) else f"{name:32} {value}")


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ |= {"LONGSPAN_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "true"}
    text, part, bpe = folder / "text", folder / "part", str(folder / "bpe")
    say("making the text")
    make_text(given.folder, text, given.megabytes)
    part.mkdir()
    for path in sorted(text.iterdir()):
        if size(part) < given.part:
            os.link(path, part / path.name)
    say("training the tokenizer")
    train_subwords(sample_text(text, 50_000_000), given.vocabulary).save(Path(bpe))
    found: dict[str, Any] = {"part MB": size(part), "all MB": size(text)}

    def speed(name: str, program: str, data: Path, tokenizer: str) -> Measured:
        clear(folder)
        result = run(program, data, tokenizer)
        found[f"{name} MB/s"], found[f"{name} memory MB"] = size(data) / result.seconds, result.memory
        say(f"{name}: {found[f'{name} MB/s']:.1f} MB/s, {result.memory:.0f} MB resident")
        return result

    library = speed("library", LIBRARY, part, bpe)
    whole = speed("bpe, part", PREPARE, part, bpe)
    found["bpe against library"] = library.seconds / whole.seconds
    found["same number of tokens"] = library.output["tokens"] == whole.output["tokens"]
    found |= after_a_kill(folder, part, bpe, whole)
    speed("bpe, all", PREPARE, text, bpe)
    speed("bytes, part", PREPARE, part, "bytes")
    speed("bytes, plain text", PREPARE, as_plain_text(part, folder / "plain.txt"), "bytes")
    return found


def after_a_kill(folder: Path, part: Path, bpe: str, whole: Measured) -> dict[str, Any]:
    """Prepare a text, kill the process after more than a third of it is noted as done, and continue."""
    clear(folder)

    def third_done() -> bool:
        return any(
            json.loads(path.read_text() or "{}").get("read", 0) > size(part) * 1e6 / 3
            for path in (folder / "cache/encoded").glob(".part-*/journal.json")
        )

    killed = run(PREPARE, part, bpe, kill_if=third_done)
    again = run(PREPARE, part, bpe)
    say(f"killed after {killed.seconds:.1f} s, continued in {again.seconds:.1f} s, undisturbed {whole.seconds:.1f} s")
    return {
        "undisturbed s": whole.seconds,
        "killed after s": killed.seconds,
        "was killed": not killed.output,
        "continued s": again.seconds,
        "same ids after the kill": again.output == whole.output,
    }


def make_text(source: Path, target: Path, megabytes: int) -> None:
    target.mkdir()
    lines = [line for path in sorted(source.rglob("*.jsonl*")) for line in open_lines(path)]
    jobs = [(lines, target / f"{k:02}.jsonl", megabytes * 1_000_000 // SHARDS, k) for k in range(SHARDS)]
    with Pool(len(os.sched_getaffinity(0))) as pool:
        pool.starmap(make_shard, jobs, chunksize=1)


def open_lines(path: Path) -> Iterator[bytes]:
    import bz2
    import gzip
    import lzma

    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        yield from file


def make_shard(lines: list[bytes], path: Path, least: int, seed: int) -> None:
    draw, written = random.Random(seed), 0
    with path.open("w", encoding="utf-8") as file:
        while written < least:
            text = json.loads(lines[draw.randrange(len(lines))])["text"]
            changed = "\n".join(vary(paragraph, draw) for paragraph in text.split("\n"))
            written += file.write(json.dumps({"text": changed}, ensure_ascii=False) + "\n")


def vary(paragraph: str, draw: random.Random) -> str:
    """The paragraph as it is, with other digits, with other consonants, or in capitals."""
    kind = draw.random()
    if kind < 0.4:
        return paragraph
    if kind < 0.6:
        return paragraph.translate(permutation("0123456789", draw))
    if kind < 0.9:
        return paragraph.translate(permutation(draw.choice(["bdgkpt", "lmnr", "aeiou", "sfvz"]), draw))
    return paragraph.upper()


def permutation(letters: str, draw: random.Random) -> dict[int, str]:
    return str.maketrans(letters, "".join(draw.sample(letters, len(letters))))


def as_plain_text(part: Path, target: Path) -> Path:
    with target.open("w", encoding="utf-8") as out:
        for path in sorted(part.iterdir()):
            with path.open(encoding="utf-8") as file:
                out.writelines(json.loads(line)["text"] + "\n" for line in file)
    return target


def run(program: str, data: Path, tokenizer: str, kill_if: Callable[[], bool] | None = None) -> Measured:
    """Run a program in a new process and watch its memory. It is killed when `kill_if` says so."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", program, str(data), tokenizer]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    largest = 0.0

    def watch() -> None:
        nonlocal largest
        while process.poll() is None:
            largest = max(largest, resident(process.pid))
            if kill_if is not None and kill_if():
                process.send_signal(signal.SIGKILL)
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    output = process.communicate()[0]
    seconds = time.perf_counter() - begin
    thread.join()
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a process that prepares {data} failed")
    return Measured(seconds, largest / 1e6, json.loads(output or "{}"))


def resident(pid: int) -> float:
    """The resident memory of a process and its children."""
    total = 0.0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except OSError:  # the process has ended
        pass
    return total


def size(path: Path) -> float:
    """Megabytes of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files) / 1e6


def clear(folder: Path) -> None:
    shutil.rmtree(folder / "cache/encoded", ignore_errors=True)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
