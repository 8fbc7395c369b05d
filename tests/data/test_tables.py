"""Tables: Parquet, Arrow files, and data sets saved by `datasets`."""

from pathlib import Path
from typing import Any

import pytest

from longspan.data import open_corpus
from longspan.data.splits import SPLITS
from longspan.errors import DataError
from tests.data.test_formats import TEXTS, documents


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_column(path: Path, values: Any) -> Path:
    """Write a table with the column `text` as Parquet, as an Arrow stream or, named .file.arrow, as an Arrow file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": values})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    make = pyarrow.ipc.new_file if ".file" in path.suffixes else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as out:
        out.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.file.arrow"])
@pytest.mark.parametrize("kind", ["large_string", "string_view", "binary", "dictionary", "struct"])
def test_every_type_of_text_in_a_table(kind: str, name: str, tmp_path: Path, cache: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    if kind == "dictionary":  # the categories of pandas
        values = pyarrow.array(TEXTS).dictionary_encode()
    elif kind == "struct":
        values = pyarrow.array([*({"body": {"en": text}} for text in TEXTS), None])
    else:
        values = pyarrow.array(
            [text.encode() for text in TEXTS] if kind == "binary" else TEXTS, getattr(pyarrow, kind)()
        )
    path = write_column(tmp_path / name, values)
    assert documents(path, None, cache, field="text.body.en" if kind == "struct" else None) == TEXTS
    if kind == "struct":
        for field, words in (("text", r"text\.body"), ("text.x", r"text\.body"), ("text.body.en.x", "text.body.en.x")):
            with pytest.raises(DataError, match=words):
                open_corpus(path, cache=cache, field=field)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_row_of_a_table_that_is_not_utf8_is_named(name: str, tmp_path: Path, cache: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    text = "Die Straße überquert die Brücke für zwölf Euro"
    binary = pyarrow.array([b"one", None, text.encode("cp1252")], pyarrow.binary())
    path = write_column(tmp_path / name, binary)
    with pytest.raises(DataError, match=f"row 3 .*'text' of .*{name}.*--encoding cp1252"):
        open_corpus(path, cache=cache)
    assert documents(path, None, cache, encoding="cp1252") == ["one", text]
    write_column(path, pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers()))
    with pytest.raises(DataError, match=f"row 3 .*'text' of .*{name}"):
        open_corpus(path, cache=cache)
    write_column(path, pyarrow.array([["one"], ["two"]]))
    with pytest.raises(DataError, match=f"'text' of .*{name}.*list"):
        open_corpus(path, cache=cache)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables(kind: str, tmp_path: Path, cache: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [*TEXTS, None], "n": range(len(TEXTS) + 1)})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    assert documents(path, None, cache) == TEXTS
    assert [len(documents(path, split, cache)) for split in SPLITS] == [36, 2, 2]
    for field, words in (("n", "int64"), ("body", "text, n")):
        with pytest.raises(DataError, match=words):
            open_corpus(path, cache=cache, field=field)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match=f"a.{kind}"):
        open_corpus(path, cache=cache)


def test_the_files_of_a_saved_data_set(tmp_path: Path, cache: Path) -> None:
    """The folder as `datasets` writes it: only the tables that state.json lists are text."""
    pyarrow = pytest.importorskip("pyarrow")
    parts = {"train": TEXTS[:30], "validation": TEXTS[30:36], "test": TEXTS[36:]}
    for name, texts in parts.items():
        folder = tmp_path / "saved" / name
        folder.mkdir(parents=True)
        table = pyarrow.table({"text": texts})
        for file in ("data-00000-of-00001.arrow", "cache-0123.arrow"):
            with pyarrow.ipc.new_stream(str(folder / file), table.schema) as out:
                out.write_table(table)
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    assert [documents(tmp_path / "saved", split, cache) for split in SPLITS] == list(parts.values())
    state = tmp_path / "saved" / "test" / "state.json"
    for damaged in (
        "",
        "{",
        "[1]",
        '{"_data_files": 3}',
        '{"_data_files": [3]}',
        '{"_data_files": [{"filename": "x"}]}',
    ):
        state.write_text(damaged)
        with pytest.raises(DataError, match=r"saved/test .*state\.json|state\.json in .*saved/test"):
            open_corpus(tmp_path / "saved", "train", cache=cache)


def test_data_sets_saved_to_disk(tmp_path: Path, cache: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": TEXTS[:30], "validation": TEXTS[30:36], "test": TEXTS[36:]}
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(made).save_to_disk(
        str(tmp_path / "saved"), num_shards={"train": 2, "validation": 1, "test": 1}
    )
    assert [documents(tmp_path / "saved", split, cache) for split in SPLITS] == list(parts.values())
    made["train"].save_to_disk(str(tmp_path / "one"))
    assert documents(tmp_path / "one", None, cache) == parts["train"]
