"""Tasks from folders and from packed files."""

import csv
import hashlib
import io
import json
import lzma
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.errors import ConfigError, DataError
from longspan.transfer.tasks import KNOWN, install, open_task
from longspan.transfer.tasks import known as known_module
from longspan.transfer.tasks.opened import rows_of
from longspan.transfer.tasks.packed import OVERLAP

from .conftest import write

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.parametrize(
    ("row", "kind", "texts", "label"),
    [
        ({"text": "a", "label": 1}, "single", ("a",), "1"),
        ({"premise": "a", "hypothesis": "b", "label": "no"}, "pair", ("a", "b"), "no"),
        ({"text_a": "a", "text_b": "b", "score": 2.5}, "similarity", ("a", "b"), 2.5),
        ({"text": "a", "score": "2.5"}, "similarity", ("a",), 2.5),
        ({"premise": "a", "choice1": "b", "choice2": "c", "label": 1}, "choice", ("a", "b", "c"), 1),
        ({"words": ["a", "b"], "tags": ["O", "B-X"]}, "tags", ("a", "b"), ("O", "B-X")),
    ],
)
def test_the_keys_of_a_row_give_the_kind(tmp_path: Path, row: dict, kind: str, texts: tuple, label: object) -> None:
    write(tmp_path / "train.jsonl", [row] * 3)
    data = open_task(tmp_path)
    assert data.task.kind == kind
    assert (data.train[0].texts, data.train[0].label) == (texts, label)


def test_csv_equals_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text('text,label\n"one, two",x\nthree,y\n')
    write(tmp_path / "b" / "train.jsonl", [{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}])
    a, b = open_task(tmp_path / "a"), open_task(tmp_path / "b")
    assert (a.train, a.dev) == (b.train, b.dev)


def test_a_tenth_of_train_is_held_out_where_there_is_no_dev(folder: Path) -> None:
    data = open_task(folder)
    assert (len(data.train), len(data.dev), data.held_out) == (54, 6, True)
    assert open_task(folder).dev == data.dev
    everything = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert sorted(e.texts[0] for e in (*data.train, *data.dev)) == sorted(everything)


def test_a_task_file_overrides_what_the_keys_say(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"body": "a", "fine": "x"}] * 2)
    (tmp_path / "task.toml").write_text('kind = "single"\ntexts = ["body"]\nlabel = "fine"\nmetrics = ["macro-f1"]\n')
    data = open_task(tmp_path)
    assert (data.task.metric, data.dev[0].label) == ("macro-f1", "x")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a"}, ["train.jsonl, row 1", "label"]),
        ({"text": "", "label": 1}, ["text"]),
        ({"text": 5, "label": 1}, ["text=5", "quotes"]),
        ({"words": ["a", "b"], "tags": ["O"]}, ["2 words and 1 tag;"]),
        ({"words": ["a"], "tags": []}, ["1 word and 0 tags;"]),
        ({"premise": "a", "choice1": "b", "choice2": "c", "label": 2}, ["label=2"]),
        ({"premise": "a", "choice1": "b", "choice2": "c", "label": 0.7}, ["label=0.7"]),
        ({"text": "a\ud800", "label": 1}, ["train.jsonl, row 1 ", "U+D800", "'text'"]),
        ({"text": "a", "label": "\ud800"}, ["row 1 ", "U+D800", "'label'"]),
        ({"words": ["a", "\udfff"], "tags": ["O", "O"]}, ["row 1 ", "U+DFFF", "'words'"]),
        ({"text_a": "a", "text_b": "b", "score": "high"}, ["score='high'"]),
        ({"text_a": "a", "text_b": "b", "score": "nan"}, ["score='nan'"]),
        ({"text_a": "a", "text_b": "b", "score": 10**400}, ["score=1000"]),
        ({"words": 5, "tags": ["O"]}, ["row 1", "words=5"]),
        ({"words": {"a": 1}, "tags": ["O"]}, ["words={'a': 1}"]),
        ({"words": ["a", ["b"]], "tags": ["O", "O"]}, ["words=['a', ['b']]"]),
        ({"words": ["a"], "tags": 5}, ["tags=5"]),
        ({"words": ["a"], "tags": [None]}, ["tags=[None]"]),
        ({"text": "a", "label": [1]}, ["label=[1]"]),
        ({"text": "a", "label": float("nan")}, ["label=nan"]),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict, words: list[str]) -> None:
    write(tmp_path / "train.jsonl", [row, row])
    with pytest.raises(DataError) as caught:
        _ = open_task(tmp_path).train
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("label", [1, 2])
def test_all_rows_have_the_choices_of_the_first(tmp_path: Path, label: int) -> None:
    row = {"premise": "a", "choice1": "b", "choice2": "c", "label": 1.0}
    write(tmp_path / "train.jsonl", [row, row | {"choice3": None}])
    data = open_task(tmp_path)
    assert [example.label for example in (*data.train, *data.dev)] == [1, 1]
    write(tmp_path / "train.jsonl", [row, row | {"choice3": "d", "label": label}])
    with pytest.raises(DataError, match=r"row 2 has 'choice3', but the task has 2 choices"):
        _ = open_task(tmp_path).train


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("text,label\none,x\none,two,x\n", ["row 2", "3 fields", "2 columns"]),
        ("text,text,label\na,b,x\n", ["two columns", "'text'"]),
        ("1,2,label\na,b,x\n", ["text_a"]),
        ("Text,Label\na,x\n", ["train.csv", "'Text', 'Label'", "first line", "score", "task.toml"]),
        ("text;label\na, b;x\n", ["train.csv", "'text;label'", "commas"]),
        ("text,mood\na,x\nb,y\n", ["row 1", "'label'", "'text', 'mood'", "task.toml"]),
        ("text\na,x\n", ["2 fields and 1 column;"]),
        ("text,label\na,x\n", ["1 row", "at least 2"]),
        ('text,label\n"a,x\nb,y\nc,x\n', ["train.csv", "line 4", "double"]),  # an open quote
        ('text,label\n"a,x\nb,y\n"c,x\nd,y\n', ["train.csv", "line 4", "double"]),  # closed in another row
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, table: str, words: list[str]) -> None:
    (tmp_path / "train.csv").write_text(table)
    with pytest.raises((DataError, ConfigError)) as caught:
        _ = open_task(tmp_path).train
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"text,label\n{'word ' * 40_000},x\na,y\n")
    assert {len(example.texts[0]) for example in (*open_task(tmp_path).train, *open_task(tmp_path).dev)} == {1, 200_000}


def test_the_limit_of_fields_stays_that_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"text,label\n{'word ' * 40_000},x\na,y\n")
    before, rows, other = csv.field_size_limit(), *(rows_of(tmp_path / "train.csv") for _ in range(2))
    for reading in (rows, other, other, rows):
        assert next(reading)["label"]
        assert csv.field_size_limit() == before


def test_numbers_and_their_names_are_one_class(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": "a", "label": label} for label in (1, "1", 1.0, 1.5, "1.5")])
    data = open_task(tmp_path)
    assert {example.label for example in (*data.train, *data.dev)} == {"1", "1.5"}


@pytest.mark.parametrize(
    ("key", "given", "problem"),
    [
        ("body", 'metric = "f1"', "no key called 'metric'; did you mean 'metrics'?"),
        ("text", 'metrics = ["auc"]', "no metric called 'auc'; known: "),
        ("text", 'kind = "singel"', "no option for kind called 'singel'; did you mean 'single'?"),
    ],
)
def test_errors_in_a_task_file_name_it(tmp_path: Path, key: str, given: str, problem: str) -> None:
    write(tmp_path / "train.jsonl", [{key: "a", "label": "x"}])
    (tmp_path / "task.toml").write_text(given)
    with pytest.raises(ConfigError) as caught:
        open_task(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'task.toml'}: {problem}")


def test_unknown_shapes_and_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"body": "a"}])
    for bad in (tmp_path, "sst3", "blimp", tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            open_task(bad)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"train\.jsonl"):
        open_task(tmp_path / "empty")


def packed(path: Path, members: dict[str, str]) -> str:
    with tarfile.open(path, "w:xz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_imdb_is_installed_without_the_reviews_of_the_unlabelled_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = hashlib.sha256(b"in both sets").hexdigest()[:12]
    overlap = tmp_path / "overlap.txt"
    overlap.write_text(f"{known}\n")
    monkeypatch.setattr("longspan.transfer.tasks.packed.OVERLAP", overlap)
    files = {"train/pos/0_9.txt": "in both sets", "test/neg/0_1.txt": "in both sets ", "test/pos/1_9.txt": "a<br />b"}
    digest = packed(tmp_path / "imdb.tar.xz", {f"aclImdb/{name}": text for name, text in files.items()})
    monkeypatch.setitem(KNOWN, "imdb", replace(KNOWN["imdb"], sources={"imdb.tar.xz": digest}))
    data = open_task("imdb", tmp_path, tmp_path / "cache")
    assert [(e.texts, e.label) for e in data.test()] == [(("a\nb",), "pos")]
    assert data.dev[0].texts == ("in both sets",)
    assert len(OVERLAP.read_text().split()) == 266  # different texts, 269 reviews


def test_conll_tags_begin_with_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "-DOCSTART- -X- O O\n\nEU NN I-NP I-ORG\nsays V V O\nRome NN I-NP I-LOC\nOslo NN I-NP B-LOC\n\nx x x O\n"
    sources = {}
    for name in ("train", "testa", "testb"):
        content = lzma.compress(lines.encode())
        (tmp_path / f"eng.{name}.xz").write_bytes(content)
        sources[f"conll2003/eng.{name}.xz"] = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(KNOWN, "conll2003", replace(KNOWN["conll2003"], sources=sources))
    data = open_task("conll2003", tmp_path, tmp_path / "cache")
    assert [e.label for e in data.dev] == [("B-ORG", "O", "B-LOC", "B-LOC"), ("O",)]


def test_a_wrong_checksum_installs_nothing(tmp_path: Path) -> None:
    packed(tmp_path / "sst2.tar.xz", {"sst2/train.jsonl": "{}"})
    with pytest.raises(DataError, match="SHA-256"):
        install("sst2", tmp_path, tmp_path / "cache")
    with pytest.raises(DataError, match="--from"):
        install("sst2", None, tmp_path / "cache")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared data")
@pytest.mark.parametrize(("name", "sizes"), [("cb", (250, 56)), ("copa", (400, 100)), ("trec6", (4907, 545, 500))])
def test_real_tasks(tmp_path: Path, name: str, sizes: tuple[int, ...]) -> None:
    data = open_task(name, SHARED, tmp_path)
    assert (len(data.train), len(data.dev), *([len(data.test())] if data.has_test else [])) == sizes
    assert known_module.find_known(name).name == data.task.name
