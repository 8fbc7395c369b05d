"""The manifest of a folder: size and SHA-256 of every file, checked whenever the folder is read.

It is JSON and is written after the files it lists:

    {"format": 1, "files": {"model.safetensors": {"size": 123, "sha256": "..."}, ...}}
"""

import hashlib
import json
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 22
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
SHARD = re.compile(r"shard-[0-9]{5,}-[A-Za-z0-9-]+\.safetensors")
"""The part of one process in a checkpoint that several wrote. Shards take the place of all other safetensors files."""
CARD = "README.md"
"""The model card. Users may edit it, so only its presence is checked, not its contents."""
# An unlisted file with one of these suffixes could be mistaken for part of the model, so it is an error.
DATA_SUFFIXES = frozenset({".safetensors", ".json", ".bin", ".pt", ".pth", ".npy", ".npz"})


@dataclass(frozen=True)
class Entry:
    """The manifest's entry for one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Verified:
    """A folder whose files, except the card, match its manifest. `contents` holds the bytes of the requested files."""

    path: Path
    files: Mapping[str, Entry]
    contents: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def verify(found: Path, path: Path, keep: Collection[str]) -> Verified:
    """Read and check every file of a folder once. `found` is where the folder is now, `path` the name for errors."""
    try:
        if not stat.S_ISDIR(found.stat().st_mode):
            raise CheckpointError(f"{path} is a file; use the folder of a model or checkpoint")
        entries = _read_manifest(found, path)
        for file in found.iterdir():
            if file.suffix in DATA_SUFFIXES and file.name not in entries and file.name != MANIFEST:
                raise CheckpointError(f"{path / file.name} is not listed in the manifest; move it out of the folder")
        if shards := {name for name in entries if SHARD.fullmatch(name)}:
            keep = shards | {name for name in keep if not name.endswith(".safetensors")}
        if missing := sorted(set(keep) - set(entries)):
            raise CheckpointError(f"{path} has no {missing[0]}; the folder is damaged or of another kind")
        contents = {
            name: _check_file(found / name, path / name, entry, name in keep) for name, entry in entries.items()
        }
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
    return Verified(found, entries, {name: content for name, content in contents.items() if content is not None})


def _read_manifest(found: Path, path: Path) -> dict[str, Entry]:
    try:
        status = (found / MANIFEST).lstat()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {MANIFEST}; the save was interrupted, or it is not a longspan model (see `longspan import`)"
        ) from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MANIFEST_LIMIT:
        raise CheckpointError(f"{path / MANIFEST} is not a manifest; the folder is damaged")
    values = read_json((found / MANIFEST).read_bytes(), str(path / MANIFEST))
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise CheckpointError(
            f"{path} has manifest format {values.get('format')!r:.40}; this version of longspan reads format {FORMAT}"
        )
    files = values.get("files")
    if not isinstance(files, dict) or set(values) != {"format", "files"}:
        raise CheckpointError(f"{path / MANIFEST} must contain only 'format' and 'files'; the folder is damaged")
    return {name: _read_entry(name, entry, path) for name, entry in files.items()}


def _read_entry(name: str, entry: Any, path: Path) -> Entry:
    well_formed = FILE_NAME.fullmatch(name) and name != MANIFEST and isinstance(entry, dict)
    if not well_formed or set(entry) != {"size", "sha256"}:
        raise CheckpointError(f"{path / MANIFEST} has a bad entry {name!r:.80}; the folder is damaged")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(f"{path / MANIFEST} has a bad size or hash for {name}; the folder is damaged")
    return Entry(size, digest)


def _check_file(found: Path, path: Path, entry: Entry, keep: bool) -> bytes | None:
    try:
        status = found.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, but the manifest lists it; restore the file") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; the folder is damaged")
    if path.name == CARD and not keep:
        return None
    if status.st_size != entry.size:
        raise CheckpointError(
            f"{path} has {status.st_size} bytes, but its manifest says {entry.size}; it was modified or "
            "truncated, so restore the original file"
        )
    digest = hashlib.sha256()
    content = bytearray()
    with found.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if keep:
                content += chunk
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{path} does not match the SHA-256 in its manifest; it was modified or damaged, so restore the "
            "original file"
        )
    return bytes(content) if keep else None


def encode(entries: Mapping[str, Entry]) -> bytes:
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(entries.items())}
    return (json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n").encode()


def read_json(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys. Anything else is a CheckpointError that names `what`."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(table := dict(pairs)) != len(pairs):
            raise ValueError("a key appears twice")
        return table

    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({error}); the file is damaged") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} is not a JSON object; the file is damaged")
    return values


def reason(error: OSError) -> str:
    """The operating system's message, without the number and the path."""
    return error.strerror or str(error)
