"""State dicts in the old and the new format of torch.save, and mutated ones: one error class, bounded memory."""

import io
import random
import resource
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from longspan.errors import CheckpointError
from longspan.interop import pickle_machine
from longspan.interop.pickles import read_state_dict
from longspan.interop.transfo_xl import import_transfo_xl

FIXTURES = Path(__file__).parent.parent / "parity" / "fixtures"
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(path: Path, value: object, zipped: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def rebuilt(path: Path, pickled: bytes, **options: int) -> None:
    """The archive with another data.pkl and valid checksums, so that a mutation reaches the interpreter."""
    path.write_bytes(archive(members(path), pickled, **options))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def archive(members: dict[str, bytes], pickled: bytes, **options: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as made:  # type: ignore[call-overload]
        for name, content in members.items():
            made.writestr(name, pickled if name.endswith("/data.pkl") else content)
    return buffer.getvalue()


def pickled(path: Path) -> bytes:
    return next(content for name, content in members(path).items() if name.endswith("/data.pkl"))


@FORMATS
def test_every_dtype_and_layout(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(24.0)
    kinds = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
    tensors = {str(kind): torch.arange(5).to(kind) for kind in kinds}
    tensors |= {
        "bool": torch.tensor([True, False]),
        "view": base[4:16].view(3, 4).t(),
        "base": base,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "parameter": nn.Parameter(torch.randn(3)),
    }
    found = read_state_dict(saved(tmp_path / "x.bin", tensors, zipped))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_state_dict_of_a_module_and_one_inside_a_checkpoint(tmp_path: Path, zipped: bool, protocol: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    assert hasattr(state, "_metadata"), "pickled as an attribute, which must be ignored"
    for value in (state, {"epoch": 3, "state_dict": state, "best": 1.5}):
        path = tmp_path / "x.bin"
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
        found = read_state_dict(path)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["pickled/pytorch_model.bin", "pickled_legacy/pytorch_model.bin", "authors/model.pt"])
def test_the_fixtures_give_the_tensors_that_torch_gives(name: str) -> None:
    expected = torch.load(FIXTURES / name, weights_only=True)
    found = read_state_dict(FIXTURES / name)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@FORMATS
def test_modules_and_other_objects_are_refused(tmp_path: Path, zipped: bool) -> None:
    for value in (
        nn.Linear(2, 2),
        {"a": object()},
        {"a": 1},
        [torch.ones(2)],
        torch.ones(2),
        {},
        5,
        {1: torch.ones(1)},
    ):
        with pytest.raises(CheckpointError, match=r"x\.bin .*torch\.save"):
            read_state_dict(saved(tmp_path / "x.bin", value, zipped))


def test_files_that_are_not_pickles(tmp_path: Path) -> None:
    for content in (b"", b"\x80", b"hello", b"PK\x03\x04", b"PK\x03\x04" + bytes(100), bytes(1000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CheckpointError):
            read_state_dict(tmp_path / "x")
    with pytest.raises(CheckpointError):
        read_state_dict(tmp_path)
    with pytest.raises(CheckpointError):
        read_state_dict(tmp_path / "nowhere")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """A compressed member could expand to any size; torch.save never compresses."""
    path = saved(tmp_path / "x", {"a": torch.zeros(1_000_000)}, True)
    rebuilt(path, pickled(path), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="compressed"):
        read_state_dict(path)


def described(numel: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of {"a": tensor} with arbitrary sizes."""

    def number(value: int) -> bytes:
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    axes = b"".join(b"(" + b"".join(map(number, counts)) + b"t" for counts in (size, stride))
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + number(numel) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + axes + b"\x89NtR"
    return b"\x80\x02}U\x01a" + tensor + b"s."


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"a": torch.zeros(8)}, True)
    rebuilt(path, described(8, (2, 4), (4, 1)))
    assert torch.equal(read_state_dict(path)["a"], torch.zeros(2, 4))
    many, most = 10**9, 2**63
    for shape in (
        ((9,), (1,)),
        ((2, 5), (4, 1)),
        ((many,), (0,)),
        ((many, many), (0, 1)),
        ((many, 0, most), (1, 1, 1)),
    ):
        rebuilt(path, described(8, *shape))
        with pytest.raises(CheckpointError, match=r"storage of 8\b|impossible size"):
            read_state_dict(path)
    for numel in (7, 9, 2**40, 2**63, -8):
        rebuilt(path, described(numel, (2,), (1,)))
        with pytest.raises(CheckpointError, match=r"declare"):
            read_state_dict(path)


def test_false_sizes_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"a": torch.zeros(8)}, False)
    content = path.read_bytes()
    for old, new in ((b"K\x08N", b"J\xff\xff\xff\x7fN"), (struct.pack("<q", 8), struct.pack("<q", 2**60))):
        assert content.count(old) >= 1
        path.write_bytes(content.replace(old, new))
        with pytest.raises(CheckpointError):
            read_state_dict(path)


def mutated(content: bytes, choose: random.Random) -> bytes:
    cut, length = choose.randrange(len(content)), choose.choice([1, 1, 2, 4, 8, 40])
    other = choose.randrange(len(content))
    return choose.choice(
        [
            lambda: content[:cut],
            lambda: content[:cut] + bytes([content[cut] ^ 1 << choose.randrange(8)]) + content[cut + 1 :],
            lambda: content[:cut] + choose.randbytes(length) + content[cut + length :],
            lambda: content[:cut] + choose.randbytes(length) + content[cut:],
            lambda: content[:cut] + content[cut + length :],
            lambda: content[:cut] + content[other : other + length] + content[cut:],
            lambda: content[:cut] + b"\xff" * min(length, 8) + content[cut + min(length, 8) :],
        ]
    )()


def test_mutated_files(tmp_path: Path, trials: Callable[[int, int], int]) -> None:
    """Through all of the importer: file, pickle, settings, model."""
    choose = random.Random(0)
    name, forms = "pytorch_model.bin", ("pickled", "pickled_legacy")
    for form in forms:
        shutil.copytree(FIXTURES / form, tmp_path / form)
    zipped, program = members(tmp_path / "pickled" / name), pickled(tmp_path / "pickled" / name)
    complete = {form: (FIXTURES / form / name).read_bytes() for form in forms}
    program_end = 5000  # the legacy file has pickles up to here, then storages
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: list[str] = []
    count = trials(150, 5000)
    for trial in range(count):
        form = forms[trial % 2]
        if choose.random() < 0.3:
            changed = mutated(complete[form], choose)
        elif form == "pickled":
            changed = archive(zipped, mutated(program, choose))
        else:
            changed = mutated(complete[form][:program_end], choose) + complete[form][program_end:]
        (tmp_path / form / name).write_bytes(changed)
        try:
            import_transfo_xl(tmp_path / form)
        except CheckpointError as error:
            refused.append(str(error))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} KiB more"
    assert len(refused) > count // 2
    assert not [message for message in refused if "\n" in message]


def test_deeply_nested_pickles_do_not_recurse(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"a": torch.zeros(1)}, True)
    for nest in (b"(" * 20_000, b"]]]aaa.", b")" + b"\x85" * 20_000 + b".", b"}K\x00K\x00K\x00s."):
        rebuilt(path, b"\x80\x02" + nest)
        with pytest.raises(CheckpointError):
            read_state_dict(path)
    deep_key = b"\x80\x02})" + b"\x85" * 20_000 + b"K\x01s."
    rebuilt(path, deep_key)
    with pytest.raises(CheckpointError, match="key of type tuple"):
        read_state_dict(path)


def test_the_number_of_opcodes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_machine, "OPCODE_LIMIT", 1000)
    path = saved(tmp_path / "x", {"a": torch.zeros(1)}, True)
    rebuilt(path, b"\x80\x02" + b"N" * 1100 + b".")
    with pytest.raises(CheckpointError, match="1000 opcodes"):
        read_state_dict(path)
