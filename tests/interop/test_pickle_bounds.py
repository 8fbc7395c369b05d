"""Small pickles that describe large values: memory and time are bounded by the size of the file."""

import json
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longspan.errors import CheckpointError
from longspan.interop.pickle_machine import Damaged, run
from longspan.interop.pickles import read_state_dict
from longspan.interop.transfo_xl import import_transfo_xl

CALL_OF_0 = b"ccollections\nOrderedDict\nj\x00\x00\x00\x00R"
MODULUS = 2**61 - 1  # numbers that differ by a multiple of this have the same hash in Python


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    width = value.bit_length() // 8 + 1
    return b"\x8b" + struct.pack("<i", width) + value.to_bytes(width, "little", signed=True)


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def pairs(count: int) -> bytes:
    """A list of [key, value] pairs as the only argument of a call, in memo slot 0."""
    return b"](" + b"".join(text(f"k{n}") + b"N\x86" for n in range(count)) + b"e\x85" + put(0)


def archive(path: Path, pickled: bytes, storage: bytes = bytes(16)) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + pickled)
        made.writestr("archive/data/0", storage)
    return path


def test_an_ordered_dict_of_python_2() -> None:
    """It is pickled as a list of pairs."""
    assert run(pairs(3) + CALL_OF_0 + b".") == {"k0": None, "k1": None, "k2": None}


@pytest.mark.parametrize(
    "bomb",
    [
        pairs(1000) + b"](" + CALL_OF_0 * 2000 + b"e.",
        pairs(10) + b"](" + CALL_OF_0 * 10_000 + b"e.",
        b"(" + b"]" * 10_000 + b"t" + put(0) + b"](" + CALL_OF_0 * 2000 + b"e.",
    ],
    ids=["a long list", "a short list", "arguments"],
)
def test_a_list_in_the_memo_cannot_be_copied_many_times(tmp_path: Path, bomb: bytes) -> None:
    path = archive(tmp_path / "x", bomb)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"copies|arguments"):
            read_state_dict(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * path.stat().st_size


def test_numbers_as_keys_are_not_hashed() -> None:
    """These all have the same hash, so a dict of n of them would need n * n comparisons."""
    keys = b"".join(number(n * MODULUS) + b"N" for n in range(100))
    assert run(b"}(" + keys + text("name") + b"Nu.") == {None: None, "name": None}


@pytest.mark.parametrize(
    "costly",
    [
        text("k" * 10_000) + put(0) + b"}(" + (get(0) + b"N") * 10 + b"u.",  # each lookup compares all of it
        number(1 << 8000) + put(0) + b"}(" + (get(0) + b"N") * 10 + b"u.",  # each lookup hashes it again
        b"".join(b"Np%d\n" % (n * MODULUS) for n in range(10)) + b".",  # memo slots with equal hashes
        b"Nr\xff\xff\xff\xff.",
    ],
    ids=["a long key", "a huge number", "memo slots with equal hashes", "a far memo slot"],
)
def test_costly_lookups_are_refused(costly: bytes) -> None:
    with pytest.raises(Damaged):
        run(costly)


def views(count: int, numel: int) -> bytes:
    """`count` tensors that all view one complete storage."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuJ" + struct.pack("<i", numel) + b"tQ"
    tensor = b"(" + storage + b"K\x00J" + struct.pack("<i", numel) + b"\x85K\x01\x85\x89Nt" + put(0)
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    named = b"".join(text(f"t{n}") + rebuild + get(0) + b"R" for n in range(count))
    return tensor + b"}(" + named + b"u."


def test_the_number_of_views_of_a_storage_is_limited(tmp_path: Path) -> None:
    """A tied tensor has two names. A caller that copies every tensor needs memory for each name."""
    numel = 1000
    assert len(read_state_dict(archive(tmp_path / "x", views(3, numel), bytes(4 * numel)))) == 3
    with pytest.raises(CheckpointError, match="400000 bytes"):
        read_state_dict(archive(tmp_path / "x", views(100, numel), bytes(4 * numel)))


def test_settings_cannot_ask_for_many_times_the_size_of_the_file(tmp_path: Path) -> None:
    """Each cluster without its own projection gets a copy of the embedding's, so their number multiplies its size."""
    clusters, width, narrow = 100, 64, 32
    settings = {"d_model": width, "d_embed": narrow, "n_head": 1, "d_head": 1, "d_inner": 1, "n_layer": 1}
    settings |= {"vocab_size": clusters + 1, "cutoffs": list(range(1, clusters + 1))}
    attention = {"qkv_net.weight": (3, width), "o_net.weight": (width, 1), "r_net.weight": (1, width)}
    feed_forward = {"0.weight": (1, width), "0.bias": (1,), "3.weight": (width, 1), "3.bias": (width,)}
    norm = {"layer_norm.weight": (width,), "layer_norm.bias": (width,)}
    shapes = {f"layers.0.dec_attn.{name}": shape for name, shape in (attention | norm).items()}
    shapes |= {f"layers.0.pos_ff.CoreNet.{name}": shape for name, shape in feed_forward.items()}
    shapes |= {f"layers.0.pos_ff.{name}": shape for name, shape in norm.items()}
    shapes |= {"r_w_bias": (1, 1), "r_r_bias": (1, 1), "word_emb.emb_projs.0": (width, narrow)}
    shapes |= {"crit.cluster_weight": (clusters, narrow), "crit.cluster_bias": (clusters,)}
    shapes |= {"word_emb.emb_layers.0.weight": (clusters + 1, narrow), "crit.out_layers.0.bias": (clusters + 1,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"\b216300\b"):
        import_transfo_xl(tmp_path)
