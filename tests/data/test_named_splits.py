"""Files and folders named train, valid and test: whatever else lies beside them, no test text is trained on."""

import gzip
import shutil
import tarfile
from pathlib import Path

import pytest

from longspan.data import open_corpus
from longspan.data.splits import ByDocument, named_split
from longspan.errors import DataError, UnknownNameError
from longspan.tokens import WordTokenizer

SPLITS = ("train", "valid", "test")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "corpus"


def lay(root: Path, *names: str, times: int = 10) -> Path:
    """Files that hold their own names, ten lines each."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = f"{name}\n".encode() * times
        (root / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return root


def read(root: Path, cache: Path, split: str | None, **held_out: Path) -> list[str]:
    """The names of the files a split was read from, as their text tells them."""
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


@pytest.mark.parametrize("valid", ["valid", "val", "dev", "validation"])
@pytest.mark.parametrize("layout", ["{}.txt", "{}/part.txt", "{}/deep/er/part.txt", "{}.txt.gz", "{}"])
def test_a_split_is_what_its_name_says(valid: str, layout: str, root: Path, cache: Path) -> None:
    names = [layout.format(name) for name in ("train", valid, "test")]
    lay(root, *names, ".hidden")
    assert [read(root, cache, split) for split in SPLITS] == [[name] for name in names]
    assert sorted(read(root, cache, None)) == sorted(names)


def test_capitals_and_both_layouts_at_once(root: Path, cache: Path) -> None:
    lay(root, "Train.txt", "train/b.txt", "train/a/c.txt", "VAL.txt", "dev/d.txt", "TEST.TXT", "test/e.txt")
    assert read(root, cache, "train") == ["Train.txt", "train/a/c.txt", "train/b.txt"]
    assert read(root, cache, "valid") == ["VAL.txt", "dev/d.txt"]
    assert read(root, cache, "test") == ["TEST.TXT", "test/e.txt"]


def test_other_files_are_train_unless_train_is_named(root: Path, cache: Path) -> None:
    lay(root, "a.txt", "b/test.txt", "test.txt", "valid.txt")
    assert read(root, cache, "train") == ["a.txt", "b/test.txt"]  # only the top level names a split
    lay(root, "train.txt")
    text = open_corpus(root, "train", cache=cache)
    assert text.splits == {
        "train": ("train.txt",),
        "valid": ("valid.txt",),
        "test": ("test.txt",),
        "unused": ("a.txt", "b/test.txt"),
    }
    assert text.tell_files("train", "unused") == ["train: train.txt", "unused: a.txt, b/test.txt"]


@pytest.mark.parametrize(
    "names", [("train.txt", "test.txt"), ("a.txt", "b.txt", "c/c.txt", "test.txt"), ("train/a", "test/b")]
)
def test_a_missing_valid_is_the_end_of_train(names: tuple[str, ...], root: Path, cache: Path) -> None:
    lay(root, *names, times=100)
    whole = b"".join((root / name).read_bytes() for name in names[:-1])
    parts = {split: open_corpus(root, split, cache=cache) for split in SPLITS}
    assert parts["train"].ids.tobytes() + parts["valid"].ids.tobytes() == whole
    assert len(parts["valid"]) == len(whole) * 5 // 100
    assert parts["test"].ids.tobytes() == (root / names[-1]).read_bytes()
    cut = names[-2], (root / names[-2]).stat().st_size
    begin = cut[1] - len(parts["valid"])
    assert parts["train"].splits["valid"] == (f"{cut[0]} (bytes {begin:,} to {cut[1]:,})",)


def test_a_missing_valid_may_span_documents_and_cuts_no_word(root: Path, cache: Path) -> None:
    lay(root, "abc.txt", times=1000)
    lay(root, "b.txt", "test.txt", times=2)  # 8,012 bytes: the last 400 begin in the middle of a line
    train, valid = (open_corpus(root, split, "words", cache=cache) for split in ("train", "valid"))
    assert train.tokenizer.decode(valid.ids).split() == ["abc.txt"] * 48 + ["<unk>"] * 2
    assert train.tokenizer == WordTokenizer(("<eos>", "<unk>", "abc.txt"))


def test_where_no_split_is_named_nothing_has_changed(root: Path, cache: Path) -> None:
    lay(root, "a", "b", "c")
    assert [read(root, cache, split) for split in SPLITS] == [["a"], ["b"], ["c"]]
    (root / "train").mkdir()
    for name in "abc":
        (root / name).rename(root / "train" / name)
    lay(root, "README")
    text = open_corpus(root, "valid", cache=cache)
    assert (text.ids[:2].tobytes(), text.splits["valid"], text.splits["unused"]) == (b"b\n", ("train/b",), ("README",))
    single = open_corpus(lay(root.parent / "one", "test.txt") / "test.txt", "train", cache=cache)
    assert (len(single), single.splits) == (81, {})  # 90% of 90 bytes


def test_a_missing_split_is_not_made_up(root: Path, cache: Path) -> None:
    lay(root, "train.txt", "valid.txt")
    assert read(root, cache, "train") == ["train.txt"]
    with pytest.raises(DataError, match=r"test\.txt.*data\.test"):
        open_corpus(root, "test", cache=cache)
    lay(root, "test.txt")
    (root / "train.txt").unlink()
    with pytest.raises(DataError, match="train split"):
        open_corpus(root, "train", cache=cache)
    (root / "train.txt").touch()
    lay(root, "README")
    with pytest.raises(DataError, match="train split"):  # an empty train.txt makes no train of the README
        open_corpus(root, "train", cache=cache)


@pytest.mark.parametrize("kind", ["zip", "gztar"])
@pytest.mark.parametrize("around", [".", "corpus"])
def test_archives_have_layouts_too(kind: str, around: str, root: Path, cache: Path) -> None:
    lay(root, "train.txt", "valid.txt", "test.txt")
    packed = Path(
        shutil.make_archive(str(root.parent / "test"), kind, root.parent if around == "corpus" else root, around)
    )
    assert [read(packed, cache, split) for split in SPLITS] == [["train.txt"], ["valid.txt"], ["test.txt"]]
    inner = root.parent / "in"
    inner.mkdir()
    packed.rename(inner / f"data{''.join(packed.suffixes)}")
    assert read(inner, cache, "train") == ["train.txt"]


def test_an_archive_can_be_a_split(root: Path, cache: Path) -> None:
    lay(root, "a.txt", "b.txt", "x/c.txt")
    with tarfile.open(root / "test.tar", "w") as archive:
        archive.add(root / "x", "x")
    shutil.rmtree(root / "x")
    lay(root, "valid.txt")
    assert (read(root, cache, "train"), read(root, cache, "test")) == (["a.txt", "b.txt"], ["x/c.txt"])


def test_files_given_for_a_split_are_not_trained_on(root: Path, cache: Path) -> None:
    lay(root, "a.txt", "b.txt", "c/c.txt", "valid.txt")
    elsewhere = lay(root.parent / "else", "d.txt", "e.txt")
    held_out = {"valid": root / "b.txt", "test": root / "c"}
    assert read(root, cache, "train", **held_out) == ["a.txt"]  # nor on the valid.txt it came with
    assert [read(root, cache, split, **held_out) for split in SPLITS[1:]] == [["b.txt"], ["c/c.txt"]]
    assert read(root, cache, "train", test=elsewhere) == ["a.txt", "b.txt", "c/c.txt"]
    assert read(root, cache, "test", test=elsewhere) == ["d.txt", "e.txt"]
    assert read(root, cache, "valid", test=elsewhere) == ["valid.txt"]
    one = root / "a.txt"
    assert len(open_corpus(one, "train", cache=cache, held_out={"test": elsewhere})) == 57  # 95% of 60 bytes
    both = {"valid": elsewhere / "d.txt", "test": elsewhere / "e.txt"}
    assert len(open_corpus(one, "train", cache=cache, held_out=both)) == 60


def test_files_given_for_a_split_that_cannot_be(root: Path, cache: Path) -> None:
    lay(root, "a.txt", "test.txt")
    for corpus, held_out, words in (
        (root, {"valid": root / "missing"}, "missing"),
        (root, {"valid": root / "test.txt"}, "test.txt is test text"),
        (root, {"valid": root / "a.txt", "test": root / "a.txt"}, "a.txt is valid text"),
        (root / "a.txt", {"valid": root}, "train split"),
        ("stdlib", {"valid": root}, "stdlib"),
    ):
        with pytest.raises(DataError, match=words):
            open_corpus(corpus, "train", cache=cache, held_out=held_out)
    with pytest.raises(UnknownNameError, match="train"):
        open_corpus(root, "train", cache=cache, held_out={"train": root})
    swapped = {"valid": root / "test.txt", "test": root / "a.txt"}
    lay(root, "b.txt")
    assert [read(root, cache, split, **swapped) for split in SPLITS] == [["b.txt"], ["test.txt"], ["a.txt"]]


def test_what_was_cached_for_another_split_is_not_used(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts and tokenizers of a version that did not know the names."""
    lay(root, "train.txt", "valid.txt", "test.txt")
    with monkeypatch.context() as patch:
        patch.setattr("longspan.data.splits.ByName.pieces", lambda _, *asked: ByDocument().pieces(*asked))
        assert read(root, cache, "train") == ["test.txt"]
        old = open_corpus(root, "train", "words", cache=cache)
    assert read(root, cache, "train") == ["train.txt"]
    new = open_corpus(root, "train", "words", cache=cache)
    assert new.tokenizer == WordTokenizer(("<eos>", "<unk>", "train.txt")) != old.tokenizer


def test_held_out_files_do_not_push_each_other_out_of_the_cache(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(root, "a.txt", "b.txt", "c.txt")
    ways = [{}, {"valid": root / "b.txt"}, {"test": root / "b.txt"}]
    first = [open_corpus(root, "train", cache=cache, held_out=way).fingerprint for way in ways]
    monkeypatch.setattr("longspan.data.encoded.encode_pieces", None)
    assert [open_corpus(root, "train", cache=cache, held_out=way).fingerprint for way in ways] == first


def test_many_files_are_told_in_a_line(root: Path, cache: Path) -> None:
    lay(root, *(f"{k}.txt" for k in range(8)), "e\x1b[31m", "test.txt")
    (line,) = open_corpus(root, "train", cache=cache).tell_files("train")
    assert line == "train: 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 4 more"
    shutil.copy(root / "e\x1b[31m", root / "valid\x1b")
    (root / "valid\x1b").rename(root / "valid.\x1b")
    (line,) = open_corpus(root, "train", cache=cache).tell_files("valid")
    assert line == r"valid: 'valid.\x1b'"
