"""Install a known task in the cache: check the packed files, unpack them, and write train, dev and test as .jsonl."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from longspan.data.archives import unpack
from longspan.data.cache import atomic_folder, cache_folder, sha256
from longspan.errors import DataError
from longspan.transfer.tasks.known import KnownTask, find_known
from longspan.transfer.tasks.wikitext import articles

Row = dict[str, Any]
OVERLAP = Path(__file__).with_name("imdb_overlap.txt")
"""Digests of the test reviews that also occur in the unlabelled reviews of `imdb_unsup`, which models are tuned on."""


def install(name: str, source: str | Path | None = None, cache: Path | None = None) -> Path:
    """The folder of a known task, which is installed from `source` first if it is not in the cache.

    `source` is the folder of the packed files, or a packed file if the task has only one.
    """
    task = find_known(name)
    target = task.folder(cache_folder(cache))
    if target.is_dir():
        return target
    if source is None:
        packed = " and ".join(Path(path).name for path in task.sources)
        raise DataError(f"{name} is not installed; download {packed}, then run: longspan data get {name} --from FOLDER")
    with tempfile.TemporaryDirectory() as scratch, atomic_folder(target) as folder:
        for k, (path, digest) in enumerate(task.sources.items()):
            inner = Path(scratch) / str(k)
            inner.mkdir()
            unpack(_find(task, path, digest, Path(source)), inner)
        for file, rows in CONVERT[task.form](Path(scratch)):
            with (folder / file).open("w", encoding="utf-8") as out:
                out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return target


def _find(task: KnownTask, path: str, digest: str, source: Path) -> Path:
    """The packed file, by its path or its name below the source, with the known checksum."""
    alone = source.is_file() and len(task.sources) == 1
    places = [source] if alone else [source / path, source / Path(path).name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"{source} does not contain {path}, which {task.name} needs; use the folder that does")
    if (actual := sha256(found)) != digest:
        raise DataError(f"{found} has SHA-256 {actual}, not {digest}; use another source for {task.name}")
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """The objects of a file of JSON lines."""
    with path.open(encoding="utf-8-sig") as file:
        yield from parse_rows(file, path.name)


def parse_rows(file: Iterable[str], name: str) -> Iterator[Row]:
    """The objects of JSON lines; `name` is that of the file in errors."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{name}, line {number}, is not JSON: {error!s:.80}; write one JSON object per line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"{name}, line {number}, is not a JSON object; write one per line")
            yield row


def _json(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    for path in sorted(scratch.rglob("*.jsonl")):
        yield path.name, read_rows(path)


def _imdb(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """Line breaks in HTML become newlines. Test reviews of the unlabelled set are left out."""
    known = set(OVERLAP.read_text().split())

    def rows(split: str) -> Iterator[Row]:
        for path in sorted(scratch.rglob(f"{split}/*/*.txt")):
            text = path.read_text("utf-8").strip()
            if split == "test" and hashlib.sha256(text.encode()).hexdigest()[:12] in known:
                continue
            yield {"text": text.replace("<br />", "\n"), "label": path.parent.name}

    for split in ("train", "test"):
        yield f"{split}.jsonl", rows(split)


def _conll(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    for name, split in (("eng.train", "train"), ("eng.testa", "dev"), ("eng.testb", "test")):
        (path,) = scratch.rglob(name)
        yield f"{split}.jsonl", _sentences(path)


def _sentences(path: Path) -> Iterator[Row]:
    """Words and tags. In the files B- only divides neighbours of one type; here every entity begins with B-."""
    words: list[str] = []
    tags: list[str] = []
    for line in [*path.read_text("utf-8").splitlines(), ""]:
        fields = line.split()
        if fields and fields[0] != "-DOCSTART-":
            before, tag = tags[-1] if tags else "O", fields[-1]
            begins = tag.startswith("I-") and before[2:] != tag[2:]
            words.append(fields[0])
            tags.append(f"B-{tag[2:]}" if begins else tag)
        elif not fields and words:
            yield {"words": words, "tags": tags}
            words, tags = [], []


def _copa(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """The premise and a connective, then each choice in lower case, as lm-eval writes them."""

    def row(given: Row) -> Row:
        connective = {"cause": "because", "effect": "therefore"}[given["question"]]
        choices = {key: f"{given[key][0].lower()}{given[key][1:]}" for key in ("choice1", "choice2")}
        premise = given["premise"].strip().removesuffix(".")
        return {"premise": f"{premise} {connective}", **choices, "label": given["label"]}

    for name, rows in _json(scratch):
        yield name, map(row, rows)


def _lambada(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """`target` is the last word, and `text` ends before the space in front of it."""

    def row(given: Row) -> Row:
        if "target" in given:
            return {"text": given["text"], "target": given["target"]}
        text, _, target = given["text"].rpartition(" ")
        return {"text": text, "target": target}

    for path in sorted(scratch.rglob("*.jsonl")):
        yield f"{path.stem.removeprefix('lambada_')}.jsonl", map(row, read_rows(path))


def _blimp(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    keys = {"good": "sentence_good", "bad": "sentence_bad", "paradigm": "UID", "phenomenon": "linguistics_term"}
    paths = sorted(scratch.rglob("*.jsonl"))
    yield "test.jsonl", ({ours: row[key] for ours, key in keys.items()} for path in paths for row in read_rows(path))


def _wikitext(scratch: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    for name, split in (("valid", "dev"), ("test", "test")):
        (path,) = scratch.rglob(f"wiki.{name}.tokens")
        yield f"{split}.jsonl", articles(path.read_text("utf-8"))


CONVERT: dict[str, Callable[[Path], Iterator[tuple[str, Iterable[Row]]]]] = {
    "json": _json,
    "imdb": _imdb,
    "conll": _conll,
    "copa": _copa,
    "lambada": _lambada,
    "blimp": _blimp,
    "wikitext": _wikitext,
}
