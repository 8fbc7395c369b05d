"""Speed and memory of preparing a text: bytes, and BPE against the `tokenizers` library on the same cores.

    python benchmarks/prepare_text.py TEXT [--repeat N] [--rounds R] [--vocabulary 32000]

TEXT is written N times to a temporary folder. Memory is the largest sum of the resident memory of all processes,
sampled. The ratio to the library is that of the best of R rounds, once of wall time and once of CPU time, which other
work on the machine distorts less.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from longspan.data.sample import sample_text
from longspan.tokenizers.train_subwords import train_subwords

PREPARE = "import sys; from longspan.data import open_corpus; print(len(open_corpus(sys.argv[1], None, sys.argv[2])))"
LIBRARY = """
import sys, tokenizers
found = tokenizers.Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
with open(sys.argv[1], encoding="utf-8", newline="\\n") as file:
    while lines := file.readlines(1 << 22):
        parts = ["".join(lines[k : k + 200]) for k in range(0, len(lines), 200)]
        found.encode_batch_fast(parts, add_special_tokens=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LONGSPAN_CACHE"] = f"{folder}/cache"
        text = Path(folder) / options.text.name
        with text.open("wb") as out:
            for _ in range(options.repeat):
                out.write(options.text.read_bytes())
        size = text.stat().st_size / 1e6
        train_subwords(sample_text(text, 50_000_000), options.vocabulary).save(Path(folder) / "bpe")
        best: dict[str, tuple[float, float]] = {}
        for name, program, tokenizer in (
            ("bytes", PREPARE, "bytes"),
            *(("bpe", PREPARE, f"{folder}/bpe"), ("tokenizers", LIBRARY, f"{folder}/bpe")) * options.rounds,
        ):
            shutil.rmtree(f"{folder}/cache/encoded", ignore_errors=True)
            wall, cpu, memory = measure(program, text, tokenizer)
            times = f"{wall:7.1f} s {cpu:7.1f} CPU s {size / wall:6.1f} MB/s"
            print(f"{name:10} {size:6.0f} MB {times} {memory:6.0f} MB resident", flush=True)
            before = best.get(name, (wall, cpu))
            best[name] = min(wall, before[0]), min(cpu, before[1])
        ratios = [theirs / ours for theirs, ours in zip(best["tokenizers"], best["bpe"], strict=True)]
        print("bpe against tokenizers: wall {:.2f}, CPU {:.2f}".format(*ratios))


def measure(program: str, text: Path, tokenizer: str) -> tuple[float, float, float]:
    """Seconds, CPU seconds and megabytes of a process and its children."""
    begin, cpu = time.perf_counter(), children_seconds()
    process = subprocess.Popen([sys.executable, "-c", program, str(text), tokenizer], stdout=subprocess.DEVNULL)
    largest = 0.0

    def watch() -> None:
        nonlocal largest
        while process.poll() is None:
            largest = max(largest, resident(process.pid))
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    process.wait()
    seconds = time.perf_counter() - begin
    thread.join()
    return seconds, children_seconds() - cpu, largest / 1e6


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


if __name__ == "__main__":
    main()
