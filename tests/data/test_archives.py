"""Reliability test 10: hostile archives write nothing outside their folder and never exceed the size limit."""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.data import open_corpus, sources
from longspan.data.archives import archive_kind, unpack
from longspan.errors import DataError

CASES = 1_000 if os.environ.get("LONGSPAN_TORTURE") else 100
LIMIT = 1 << 16
TAR_MODES = {"a.tar": "w", "a.tar.gz": "w:gz", "a.tgz": "w:gz", "a.tar.bz2": "w:bz2", "a.tar.xz": "w:xz"}

GOOD_NAMES = ["a.txt", "b/c.txt", "./d", "e/./f", "g//h", "ü/ß", "..."]
BAD_NAMES = [
    "../out",
    "a/../../out",
    "/tmp/out",
    "//out",
    "a/..",
    "..",
    "..\\out",
    "C:\\out",
    "C:/out",
    "x" * 300,
    "/".join(["d" * 200] * 20),
    "/".join("d" * 40),
]


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"text", link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info


def write_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], generator: random.Random) -> None:
    form = generator.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(path, TAR_MODES[path.name], format=form) as archive:  # type: ignore[call-overload]
        for info, content in members:
            archive.addfile(info, io.BytesIO(content) if info.type == tarfile.REGTYPE else None)


def hostile_tar(path: Path, generator: random.Random) -> None:
    """Good members, then a bad one: a name, a link and a file behind it, a device, a bomb, a duplicate."""
    good = [(tar_member(name), b"text") for name in generator.sample(GOOD_NAMES, 2)]
    bad: list[list[tuple[tarfile.TarInfo, bytes]]] = [
        [(tar_member(generator.choice(BAD_NAMES)), b"text")],
        [(tar_member("l", tarfile.SYMTYPE, link="../.."), b""), (tar_member("l/out"), b"text")],
        [(tar_member("l", tarfile.SYMTYPE, link="/tmp"), b""), (tar_member("l/out"), b"text")],
        [(tar_member("l", tarfile.LNKTYPE, link="../../secret"), b"")],
        [(tar_member("l", tarfile.LNKTYPE, link="later"), b""), (tar_member("later"), b"text")],
        [(tar_member("big", content=b"0" * LIMIT), b"0" * LIMIT), (tar_member("l", tarfile.LNKTYPE, link="big"), b"")],
        [(tar_member("p", generator.choice([tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])), b"")],
        [(tar_member("bomb", content=b"0" * (LIMIT + 1)), b"0" * (LIMIT + 1))],
        [(tar_member(f"part{k}", content=b"0" * LIMIT), b"0" * LIMIT) for k in range(2)],
        [(tar_member("same"), b"text"), (tar_member("./same"), b"text")],
        [(tar_member("same"), b"text"), (tar_member("same/below"), b"text")],
        [(tar_member("same", tarfile.DIRTYPE), b""), (tar_member("same"), b"text")],
    ]
    members = [*good, *generator.choice(bad)]
    write_tar(path, members, generator)


def hostile_zip(path: Path, generator: random.Random) -> None:
    with zipfile.ZipFile(path, "w", generator.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name in generator.sample(GOOD_NAMES, 2):
            archive.writestr(name, b"text")
        kind = generator.randrange(4)
        info = zipfile.ZipInfo("bad")
        if kind == 0:
            info.filename = generator.choice(BAD_NAMES)
            archive.writestr(info, b"text")
        elif kind == 1:
            mode = generator.choice([stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
            info.external_attr = (mode | 0o777) << 16
            archive.writestr(info, b"../../out")
        elif kind == 2:
            archive.writestr(info, b"0" * (LIMIT + 1), zipfile.ZIP_DEFLATED)
        else:
            archive.writestr("bad", b"one")
            archive.writestr("./bad", b"two")


def zip_with_false_size(path: Path, generator: random.Random) -> None:
    """A zip whose central directory declares fewer bytes than the member has."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", b"0" * (8 * LIMIT))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = generator.randrange(LIMIT).to_bytes(4, "little")
    path.write_bytes(data)


def files_outside(root: Path, folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and folder not in path.parents}


def unpack_and_check(path: Path, tmp_path: Path) -> list[Path] | DataError:
    """Unpack into a new folder and check what must hold for every archive."""
    folder = tmp_path / "deep" / "in" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    before = files_outside(tmp_path, folder)
    result: list[Path] | DataError
    try:
        result = unpack(path, folder, LIMIT)
    except DataError as error:
        result = error
    assert "\n" not in str(result)
    assert files_outside(tmp_path, folder) == before
    inside = list(folder.rglob("*"))
    assert all(entry.is_dir() or (entry.is_file() and not entry.is_symlink()) for entry in inside)
    assert sum(entry.stat().st_size for entry in inside if entry.is_file()) <= LIMIT
    for entry in sorted(inside, reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    return result


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    generator = random.Random(0)
    made: list[tuple[str, Callable[[Path, random.Random], None]]] = [
        *((name, hostile_tar) for name in TAR_MODES),
        ("a.zip", hostile_zip),
        ("a.zip", hostile_zip),
        ("a.zip", zip_with_false_size),
    ]
    for _ in range(CASES):
        name, make = generator.choice(made)
        path = tmp_path / name
        make(path, generator)
        assert isinstance(unpack_and_check(path, tmp_path), DataError), name
        path.unlink()


def test_hard_links_inside_an_archive_become_copies(tmp_path: Path) -> None:
    """GNU tar writes a file that it is given twice as a link to itself."""
    members = [(tar_member("a/one"), b"text"), (tar_member("a/one", tarfile.LNKTYPE, link="a/one"), b"")]
    members.append((tar_member("two", tarfile.LNKTYPE, link="./a/one"), b""))
    write_tar(tmp_path / "a.tar", members, random.Random(0))
    files = unpack(tmp_path / "a.tar", tmp_path / "out", LIMIT)
    assert [(path.relative_to(tmp_path / "out").as_posix(), path.read_bytes()) for path in files] == [
        ("a/one", b"text"),
        ("two", b"text"),
    ]
    assert files[1].stat().st_nlink == 1


def test_damaged_archives_are_unpacked_safely_or_refused(tmp_path: Path) -> None:
    """Bytes are changed and removed at random, mostly in headers, and archives are truncated."""
    generator = random.Random(1)
    for _ in range(CASES):
        name = generator.choice([*TAR_MODES, "a.zip", "a.txt.gz", "a.txt.bz2", "a.txt.xz"])
        path = tmp_path / name
        write_good(path, generator)
        data = bytearray(path.read_bytes())
        for _ in range(generator.randrange(1, 4)):
            at = generator.randrange(min(len(data), generator.choice([600, len(data)])))
            change = generator.randrange(3)
            if change == 0:
                data[at] = generator.randrange(256)
            elif change == 1:
                data[at : at + generator.randrange(1, 12)] = b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
            else:
                del data[at:]
                break
            if not data:
                break
        path.write_bytes(data)
        unpack_and_check(path, tmp_path)
        path.unlink()


def write_good(path: Path, generator: random.Random) -> None:
    content = b"some text\n" * 50
    if path.name in TAR_MODES:
        write_tar(
            path, [(tar_member(name, content=content), content) for name in ("a.txt", "b/" + "c" * 150)], generator
        )
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", content)
            archive.writestr("b/", b"")
            archive.writestr("b/c.txt", content)
    else:
        opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[path.suffix]
        with opened(path, "wb") as out:
            out.write(content)


@pytest.mark.parametrize("name", [*TAR_MODES, "a.zip", "a.txt.gz", "a.txt.bz2", "a.txt.xz"])
def test_good_archives_unpack(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_good(path, random.Random(0))
    folder = tmp_path / "out"
    folder.mkdir()
    files = unpack(path, folder)
    assert {file.read_bytes() for file in files} == {b"some text\n" * 50}
    assert len(files) == (1 if name.startswith("a.txt") else 2)
    assert archive_kind(path) == ("stream" if name.startswith("a.txt") else "zip" if name == "a.zip" else "tar")


def test_only_selected_members_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(
        path, [(tar_member("x/a.txt"), b"text"), (tar_member("l", tarfile.SYMTYPE, link="/"), b"")], random.Random(0)
    )
    folder = tmp_path / "out"
    folder.mkdir()
    assert unpack(path, folder, only={"a.txt"}) == [folder / "x" / "a.txt"]


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_a_compressed_bomb_stops_at_the_limit(
    suffix: str, opened: Callable[..., io.BufferedIOBase], tmp_path: Path
) -> None:
    path = tmp_path / f"bomb{suffix}"
    with opened(path, "wb") as out:
        out.write(b"\0" * (64 * LIMIT))
    error = unpack_and_check(path, tmp_path)
    assert isinstance(error, DataError)
    assert "65,536 bytes" in str(error)


def test_a_header_with_a_huge_size_is_refused(tmp_path: Path) -> None:
    """tarfile would read an extended header of gigabytes into memory."""
    info = tarfile.TarInfo("name")
    info.type, info.size = tarfile.XHDTYPE, 1 << 32
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2048)
    error = unpack_and_check(path, tmp_path)
    assert isinstance(error, DataError)
    assert "4,294,967,296 bytes" in str(error)


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    """A sparse member of a few bytes can unpack to more zeros than fit on any disk."""
    info = tarfile.TarInfo("sparse")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(1 << 50), "GNU.sparse.map": "0,4"}
    info.size = 4
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"text"))
    assert isinstance(unpack_and_check(path, tmp_path), DataError)


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("text", b"secret")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[6] |= 1  # the flags of the local header; the next line sets those of the central directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip.*'text'.*encrypted; .*unpack it yourself"):
        unpack(tmp_path / "a.zip", tmp_path)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_read_like_a_folder(kind: str, tmp_path: Path) -> None:
    """Compressed files and archives in it are unpacked, and the splits are the same."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    (folder / "dev.txt.xz").write_bytes(lzma.compress(b"valid"))
    with zipfile.ZipFile(folder / "test.zip", "w") as inner:
        inner.writestr("one.txt.bz2", bz2.compress(b"one"))
        inner.writestr("two.txt", b"two")
    packed = shutil.make_archive(str(tmp_path / "packed"), kind, folder)
    for split, text, documents in (("train", b"ab", 2), ("valid", b"valid", 1), ("test", b"onetwo", 2)):
        for source in (folder, Path(packed)):
            found = open_corpus(source, split, cache=tmp_path / "cache")
            assert (found.ids.tobytes(), len(found.starts)) == (text, documents)


def test_archives_in_archives_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "default_limit", lambda path: LIMIT)
    with tarfile.open(tmp_path / "bombs.tar", "w") as archive:
        for k in range(4):
            content = gzip.compress(bytes(LIMIT // 3) + bytes([k]))
            archive.addfile(tar_member(f"{k}.gz", content=content), io.BytesIO(content))
    with pytest.raises(DataError, match="limit"):
        open_corpus(tmp_path / "bombs.tar", cache=tmp_path / "cache")
    inner = b"text"
    for k in range(9):
        path = tmp_path / f"{k}.zip"
        with zipfile.ZipFile(path, "w") as nested:
            nested.writestr(f"{k - 1}.zip" if k else "a.txt", inner)
        inner = path.read_bytes()
    assert len(open_corpus(tmp_path / "3.zip", cache=tmp_path / "cache")) == 4
    with pytest.raises(DataError, match=r"8\.zip/7\.zip/.* unpack"):
        open_corpus(tmp_path / "8.zip", cache=tmp_path / "cache")
