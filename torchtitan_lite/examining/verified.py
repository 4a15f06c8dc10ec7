"""The record of what `verify` found, for `ls` and for people.

It is one file in the folder of checkpoints, outside every step, so a sealed step never changes. An entry counts only
while the checkpoint has the manifest that was verified: it names the manifest by its digest, so it stays with a copied
folder and ends when a step is saved again. Loads, retention and recovery never read it: bytes that were right
yesterday may be wrong today. Whatever the file holds, reading it yields entries of the right types, or none.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.disk.plain_file import opened_plain_file, read_plain
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import last_digest
from torchtitan_lite.store.manifest_fields import file_name, integer_field, json_object, seconds, value_of

SIZES = "sizes"
"""Depth of a verification: manifest, sizes, coverage of the tensors."""
FULL = "full"
"""Depth of a verification that read every byte, too."""

_DEPTHS = (SIZES, FULL)
_MOST_BYTES = 16 << 20
"""Of the file: a hundred thousand entries."""
_READ_BYTES = 1 << 20
_WAIT_SECONDS = 10.0
"""For others that change a file of the folder, which takes milliseconds."""


@dataclass(frozen=True)
class Verified:
    """The result of the last verification of one checkpoint."""

    identity: str
    """The `content_identity` of the checkpoint at that time."""
    verified_at: float
    """Unix seconds."""
    depth: str
    """`SIZES` or `FULL`."""
    num_findings: int
    """0 if it was undamaged."""


def content_identity(folder: Path) -> str | None:
    """Return the identity of the checkpoint in `folder`: the digest of its manifest, or of DCP's metadata without one.

    None if there is neither. Reads the last line of a manifest with a digest, and else the complete file. Raises
    OSError, and `CheckpointUnsafe` for what is no regular file.
    """
    for name in (layout.MANIFEST, layout.METADATA):
        try:
            with opened_plain_file(folder / name) as fd:
                return last_digest(fd) or text_digest(iter(partial(os.read, fd, _READ_BYTES), b""))
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


def verified_in(root: Path) -> dict[str, Verified]:
    """Return the entries in the folder of checkpoints `root`, by name of checkpoint; none if they cannot be read."""
    try:
        return _verified_entries(read_plain(root / layout.VERIFIED, _MOST_BYTES))
    except (OSError, CheckpointUnsafe, ValueError, RecursionError):
        return {}


def verified(folder: Path, entries: dict[str, Verified]) -> Verified | None:
    """Return the one of `entries` that is about the checkpoint in `folder` as it is now; None if there is none."""
    entry = entries.get(folder.name)
    try:
        return entry if entry is not None and entry.identity == content_identity(folder) else None
    except (OSError, CheckpointUnsafe):
        return None


def record(folder: Path, entry: Verified, durable: Durable = DISK) -> None:
    """Write `entry` about the checkpoint in `folder` next to that folder, and drop entries of what is gone.

    One that found nothing does not replace one of the same checkpoint that read every byte, unless it did so, too.
    Raises OSError where the folder of checkpoints cannot be written. Takes no lease: no job relies on the file. A
    crash leaves the old file or the new one, and possibly the next one's temporary file, which the next call replaces.
    """
    root = folder.parent
    with locked(root, _WAIT_SECONDS):
        entries = {name: kept for name, kept in verified_in(root).items() if os.path.lexists(root / name)}
        before = entries.get(folder.name)
        is_light = entry.depth != FULL and not entry.num_findings
        if before is not None and before.identity == entry.identity and before.depth == FULL and is_light:
            return
        entries[folder.name] = entry
        durable.write_atomically(root / layout.VERIFIED, _verified_text(entries))


def _verified_text(entries: dict[str, Verified]) -> bytes:
    documents = {name: asdict(entry) for name, entry in sorted(entries.items())}
    lines = (f"{json.dumps(name)}: {json.dumps(document)}" for name, document in documents.items())
    return ('{"verified": {\n' + ",\n".join(lines) + "\n}}\n").encode()


def _verified_entries(data: bytes) -> dict[str, Verified]:
    """Return the entries in `data`. Raise ValueError if it is not what `_verified_text` makes."""
    entries: dict[str, Any] = value_of(json_object(data), "verified", dict)
    return {file_name(name): _verified_entry(value_of(entries, name, dict)) for name in entries}


def _verified_entry(document: dict[str, Any]) -> Verified:
    entry = Verified(
        identity=value_of(document, "identity", str),
        verified_at=seconds(document, "verified_at"),
        depth=value_of(document, "depth", str),
        num_findings=integer_field(document, "num_findings", 0),
    )
    if entry.depth not in _DEPTHS or not math.isfinite(entry.verified_at):
        raise ValueError("expected a known depth")
    return entry
