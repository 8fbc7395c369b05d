"""What a folder should hold, file by file, and the reading that holds it to that.

The manifest is JSON and is written after all it lists:

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
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
CARD = "README.md"
"""Written for people and theirs to edit: it is listed, and held to nothing but being there."""
# A file of one of these kinds that the manifest does not list could be taken for a part of the folder.
WEIGHTY = frozenset({".safetensors", ".json", ".bin", ".pt", ".pth", ".npy", ".npz"})


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Verified:
    """A folder whose every file but the card is as its manifest says; `contents` holds those asked for."""

    path: Path
    files: Mapping[str, Entry]
    contents: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def verify(found: Path, path: Path, keep: Collection[str]) -> Verified:
    """Read every file of a folder once; `found` is where the folder is, `path` what the user calls it."""
    try:
        if not stat.S_ISDIR(found.stat().st_mode):
            raise CheckpointError(f"{path} is a file; a model or checkpoint is a folder")
        entries = _read_manifest(found, path)
        for file in found.iterdir():
            if file.suffix in WEIGHTY and file.name not in entries and file.name != MANIFEST:
                raise CheckpointError(f"{path / file.name} is not in the manifest; move it out of the folder")
        if missing := sorted(set(keep) - set(entries)):
            raise CheckpointError(f"{path} holds no {missing[0]}; it is damaged or of another kind")
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
            f"{path} has no {MANIFEST}; it was not saved whole, or not by longspan (longspan import reads others)"
        ) from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MANIFEST_LIMIT:
        raise CheckpointError(f"{path / MANIFEST} is no manifest; the folder is damaged")
    values = read_json((found / MANIFEST).read_bytes(), str(path / MANIFEST))
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise CheckpointError(f"{path} has manifest format {values.get('format')!r:.40}; this longspan reads {FORMAT}")
    files = values.get("files")
    if not isinstance(files, dict) or set(values) != {"format", "files"}:
        raise CheckpointError(f"{path / MANIFEST} does not list files as it should; the folder is damaged")
    return {name: _read_entry(name, entry, path) for name, entry in files.items()}


def _read_entry(name: str, entry: Any, path: Path) -> Entry:
    plain = PLAIN_NAME.fullmatch(name) and name != MANIFEST and isinstance(entry, dict)
    if not plain or set(entry) != {"size", "sha256"}:
        raise CheckpointError(f"{path / MANIFEST} has a bad entry {name!r:.80}; the folder is damaged")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(f"{path / MANIFEST} has a bad size or hash for {name}; the folder is damaged")
    return Entry(size, digest)


def _check_file(found: Path, path: Path, entry: Entry, keep: bool) -> bytes | None:
    try:
        status = found.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the manifest lists it") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a plain file; the folder is damaged")
    if path.name == CARD and not keep:
        return None
    if status.st_size != entry.size:
        raise CheckpointError(f"{path} has {status.st_size} bytes where its manifest says {entry.size}; it was altered")
    digest = hashlib.sha256()
    content = bytearray()
    with found.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if keep:
                content += chunk
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{path} does not match the SHA-256 in its manifest; it was altered or damaged")
    return bytes(content) if keep else None


def encode(entries: Mapping[str, Entry]) -> bytes:
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(entries.items())}
    return (json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n").encode()


def read_json(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object, each key once; anything else is a CheckpointError that names `what`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(made := dict(pairs)) != len(pairs):
            raise ValueError("a key appears twice")
        return made

    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not readable JSON ({error}); the file is damaged") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} holds no JSON object; the file is damaged")
    return values


def reason(error: OSError) -> str:
    return error.strerror or str(error)
