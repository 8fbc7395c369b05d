"""Files and folders named train, valid and test: no test text is ever in the train split."""

import gzip
import shutil
import tarfile
from pathlib import Path

import pytest

from longspan.data import describe_all, open_corpus
from longspan.data.splits import ByDocument, named_split
from longspan.errors import DataError, UnknownNameError
from longspan.tokenizers import WordTokenizer

SPLITS = ("train", "valid", "test")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "corpus"


def write_files(root: Path, *names: str, times: int = 10) -> Path:
    """Write files whose lines are their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = f"{name}\n".encode() * times
        (root / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return root


def files_of(root: Path, cache: Path, split: str | None, **held_out: Path) -> list[str]:
    """The names of the files in a split, taken from the text."""
    text = open_corpus(root, split, cache=cache, held_out=held_out)
    return list(dict.fromkeys(text.ids.tobytes().decode().split()))


def test_names_of_splits() -> None:
    named = {
        name: named_split(name) for name in ("train", "Train.TXT", "train.txt.gz", "train.v2.txt", "TEST", "test.py")
    }
    assert list(named.values()) == ["train"] * 4 + ["test"] * 2
    assert {named_split(name) for name in ("valid.txt", "val.txt", "dev", "validation.tokens")} == {"valid"}
    others = ("trains.txt", "my-train.txt", "wiki.test.tokens", "testing", "valid_1.txt", "", ".test", "eval.txt")
    assert {named_split(name) for name in others} == {None}


def test_shards_are_in_the_split_of_their_name(root: Path, cache: Path) -> None:
    """The files of a repository of Hugging Face."""
    train = [f"data/train-0000{k}-of-00002.txt.gz" for k in (0, 1)]
    held_out = ["data/validation-00000-of-00001-4a3b2c1d.txt", "test-00000-of-00001.txt"]
    write_files(root, "README.md", *train, *held_out, "data/other-00000-of-00001.txt")
    assert [files_of(root, cache, split) for split in SPLITS] == [train, [held_out[0]], [held_out[1]]]
    assert {named_split(name) for name in ("train-0-of-x.txt", "trains-0-of-1", "train-00000", "news-0-of-1")} == {None}


@pytest.mark.parametrize("valid", ["valid", "val", "dev", "validation"])
@pytest.mark.parametrize("layout", ["{}.txt", "{}/part.txt", "{}/deep/er/part.txt", "{}.txt.gz", "{}"])
def test_files_are_in_the_split_they_are_named_after(valid: str, layout: str, root: Path, cache: Path) -> None:
    names = [layout.format(name) for name in ("train", valid, "test")]
    write_files(root, *names, ".hidden")
    assert [files_of(root, cache, split) for split in SPLITS] == [[name] for name in names]
    assert sorted(files_of(root, cache, None)) == sorted(names)


def test_capital_letters_and_mixed_layouts(root: Path, cache: Path) -> None:
    write_files(root, "Train.txt", "train/b.txt", "train/a/c.txt", "VAL.txt", "dev/d.txt", "TEST.TXT", "test/e.txt")
    assert files_of(root, cache, "train") == ["Train.txt", "train/a/c.txt", "train/b.txt"]
    assert files_of(root, cache, "valid") == ["VAL.txt", "dev/d.txt"]
    assert files_of(root, cache, "test") == ["TEST.TXT", "test/e.txt"]


def test_other_files_are_train_if_none_is_named_train(root: Path, cache: Path) -> None:
    write_files(root, "a.txt", "b/test.txt", "test.txt", "valid.txt")
    assert files_of(root, cache, "train") == ["a.txt", "b/test.txt"]  # only the top level names a split
    write_files(root, "train.txt")
    text = open_corpus(root, "train", cache=cache)
    assert text.splits == {
        "train": ("train.txt",),
        "valid": ("valid.txt",),
        "test": ("test.txt",),
        "unused": ("a.txt", "b/test.txt"),
    }
    assert text.describe() == "train: 100 tokens in train.txt"
    assert describe_all(text, lambda split: open_corpus(root, split, cache=cache)) == [
        "train: 100 tokens in train.txt",
        "valid: 100 tokens in valid.txt",
        "test: 90 tokens in test.txt",
        "unused: a.txt, b/test.txt",
    ]


@pytest.mark.parametrize(
    "names", [("train.txt", "test.txt"), ("a.txt", "b.txt", "c/c.txt", "test.txt"), ("train/a", "test/b")]
)
def test_a_missing_valid_split_is_the_end_of_train(names: tuple[str, ...], root: Path, cache: Path) -> None:
    write_files(root, *names, times=100)
    text = b"".join((root / name).read_bytes() for name in names[:-1])
    parts = {split: open_corpus(root, split, cache=cache) for split in SPLITS}
    assert parts["train"].ids.tobytes() + parts["valid"].ids.tobytes() == text
    assert len(parts["valid"]) == len(text) * 5 // 100
    assert parts["test"].ids.tobytes() == (root / names[-1]).read_bytes()
    last, size = names[-2], (root / names[-2]).stat().st_size
    begin = size - len(parts["valid"])
    assert parts["train"].splits["valid"] == (f"{last} (bytes {begin:,} to {size:,})",)


def test_a_missing_valid_split_may_span_documents_and_divides_no_word(root: Path, cache: Path) -> None:
    write_files(root, "abc.txt", times=1000)
    write_files(root, "b.txt", "test.txt", times=2)  # 8,012 bytes: the last 400 begin in the middle of a line
    train, valid = (open_corpus(root, split, "words", cache=cache) for split in ("train", "valid"))
    assert train.tokenizer.decode(valid.ids).split() == ["abc.txt"] * 48 + ["<unk>"] * 2
    assert train.tokenizer == WordTokenizer(("<eos>", "<unk>", "abc.txt"))


def test_without_names_documents_are_divided(root: Path, cache: Path) -> None:
    write_files(root, "a", "b", "c")
    assert [files_of(root, cache, split) for split in SPLITS] == [["a"], ["b"], ["c"]]
    (root / "train").mkdir()
    for name in "abc":
        (root / name).rename(root / "train" / name)
    write_files(root, "README")
    text = open_corpus(root, "valid", cache=cache)
    assert (text.ids[:2].tobytes(), text.splits["valid"], text.splits["unused"]) == (b"b\n", ("train/b",), ("README",))
    single = open_corpus(write_files(root.parent / "one", "test.txt") / "test.txt", "train", cache=cache)
    assert (len(single), single.splits["train"]) == (81, ("test.txt (bytes 0 to 81)",))  # 90% of 90 bytes


def test_a_missing_test_or_train_split_is_an_error(root: Path, cache: Path) -> None:
    write_files(root, "train.txt", "valid.txt")
    assert files_of(root, cache, "train") == ["train.txt"]
    with pytest.raises(DataError, match=r"test\.txt.*data\.test"):
        open_corpus(root, "test", cache=cache)
    write_files(root, "test.txt")
    (root / "train.txt").unlink()
    with pytest.raises(DataError, match="train split"):
        open_corpus(root, "train", cache=cache)
    (root / "train.txt").touch()
    write_files(root, "README")
    with pytest.raises(DataError, match="train split"):  # an empty train.txt does not make the README train text
        open_corpus(root, "train", cache=cache)


@pytest.mark.parametrize("kind", ["zip", "gztar"])
@pytest.mark.parametrize("around", [".", "corpus"])
def test_archives_have_named_splits(kind: str, around: str, root: Path, cache: Path) -> None:
    write_files(root, "train.txt", "valid.txt", "test.txt")
    packed = Path(
        shutil.make_archive(str(root.parent / "test"), kind, root.parent if around == "corpus" else root, around)
    )
    assert [files_of(packed, cache, split) for split in SPLITS] == [["train.txt"], ["valid.txt"], ["test.txt"]]
    inner = root.parent / "in"
    inner.mkdir()
    packed.rename(inner / f"data{''.join(packed.suffixes)}")
    assert files_of(inner, cache, "train") == ["train.txt"]


def test_an_archive_can_be_a_split(root: Path, cache: Path) -> None:
    write_files(root, "a.txt", "b.txt", "x/c.txt")
    with tarfile.open(root / "test.tar", "w") as archive:
        archive.add(root / "x", "x")
    shutil.rmtree(root / "x")
    write_files(root, "valid.txt")
    assert (files_of(root, cache, "train"), files_of(root, cache, "test")) == (["a.txt", "b.txt"], ["x/c.txt"])


def test_held_out_files_are_not_in_train(root: Path, cache: Path) -> None:
    write_files(root, "a.txt", "b.txt", "c/c.txt", "valid.txt")
    elsewhere = write_files(root.parent / "else", "d.txt", "e.txt")
    held_out = {"valid": root / "b.txt", "test": root / "c"}
    assert files_of(root, cache, "train", **held_out) == ["a.txt"]  # without the corpus's own valid.txt
    assert [files_of(root, cache, split, **held_out) for split in SPLITS[1:]] == [["b.txt"], ["c/c.txt"]]
    assert files_of(root, cache, "train", test=elsewhere) == ["a.txt", "b.txt", "c/c.txt"]
    assert files_of(root, cache, "test", test=elsewhere) == ["d.txt", "e.txt"]
    assert files_of(root, cache, "valid", test=elsewhere) == ["valid.txt"]
    one = root / "a.txt"
    assert len(open_corpus(one, "train", cache=cache, held_out={"test": elsewhere})) == 57  # 95% of 60 bytes
    both = {"valid": elsewhere / "d.txt", "test": elsewhere / "e.txt"}
    assert len(open_corpus(one, "train", cache=cache, held_out=both)) == 60


def test_invalid_held_out_files_are_refused(root: Path, cache: Path) -> None:
    write_files(root, "a.txt", "test.txt")
    for corpus, held_out, pattern in (
        (root, {"valid": root / "missing"}, "missing"),
        (root, {"valid": root / "test.txt"}, r"test\.txt .*data\.valid"),
        (root, {"valid": root / "a.txt", "test": root / "a.txt"}, r"a\.txt .*valid.*data\.test"),
        (root / "a.txt", {"valid": root}, "train split"),
        ("stdlib", {"valid": root}, "stdlib"),
    ):
        with pytest.raises(DataError, match=pattern):
            open_corpus(corpus, "train", cache=cache, held_out=held_out)
    with pytest.raises(UnknownNameError, match="train"):
        open_corpus(root, "train", cache=cache, held_out={"train": root})
    swapped = {"valid": root / "test.txt", "test": root / "a.txt"}
    write_files(root, "b.txt")
    assert [files_of(root, cache, split, **swapped) for split in SPLITS] == [["b.txt"], ["test.txt"], ["a.txt"]]


def test_the_cache_of_another_split_is_not_used(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and tokenizers cached by a version that ignored the names."""
    write_files(root, "train.txt", "valid.txt", "test.txt")
    with monkeypatch.context() as patch:
        patch.setattr("longspan.data.splits.ByName.pieces", lambda _, *args: ByDocument().pieces(*args))
        assert files_of(root, cache, "train") == ["test.txt"]
        old = open_corpus(root, "train", "words", cache=cache)
    assert files_of(root, cache, "train") == ["train.txt"]
    new = open_corpus(root, "train", "words", cache=cache)
    assert new.tokenizer == WordTokenizer(("<eos>", "<unk>", "train.txt")) != old.tokenizer


def test_corpora_with_other_held_out_files_are_cached_separately(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(root, "a.txt", "b.txt", "c.txt")
    choices = [{}, {"valid": root / "b.txt"}, {"test": root / "b.txt"}]
    first = [open_corpus(root, "train", cache=cache, held_out=choice).fingerprint for choice in choices]
    monkeypatch.setattr("longspan.data.encoded.run_tasks", None)
    assert [open_corpus(root, "train", cache=cache, held_out=choice).fingerprint for choice in choices] == first


def test_long_file_lists_are_shortened(root: Path, cache: Path) -> None:
    write_files(root, *(f"{k}.txt" for k in range(8)), "e\x1b[31m", "test.txt")
    line = open_corpus(root, "train", cache=cache).describe()
    assert line == "train: 523 tokens in 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 4 more"
    shutil.copy(root / "e\x1b[31m", root / "valid\x1b")
    (root / "valid\x1b").rename(root / "valid.\x1b")
    line = open_corpus(root, "valid", cache=cache).describe()
    assert line == r"valid: 70 tokens in 'valid.\x1b'"
