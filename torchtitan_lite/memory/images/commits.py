"""The checkpoints on disk as images know them: which one was committed last, and whether a damaged one is that one.

An image belongs to the run on disk only if nothing was committed since that it does not know. A damaged checkpoint has
lost a part of itself, so it is known by what is left: the last line of its manifest, or the time of rank 0's file,
which no process writes after the commit.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import Listing
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, last_digest
from torchtitan_lite.store.place import on_disk
from torchtitan_lite.store.protocol import StoresCheckpoints

MOST_COMMITS = 4
"""How many an image knows: the latest one, and the ones that are the latest where those after them are damaged."""


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint, as an image knows it; two are the same if their manifests are."""

    step: int
    digest: str
    """The digest in the last line of its manifest; empty where that is damaged."""
    written_ns: int = field(default=0, compare=False)
    """When the file of rank 0 was written, in nanoseconds; 0 if that is unknown."""
    run_id: str = field(default="", compare=False)
    """That of its run or branch; empty if that is unknown."""

    def is_rest_of(self, commit: Commit) -> bool:
        """Return whether this, which was found in a damaged checkpoint, is left of `commit`."""
        has_digest = bool(self.digest) and self.digest == commit.digest
        has_time = self.written_ns > 0 and self.written_ns == commit.written_ns
        return self.step == commit.step and (has_digest or has_time)


def commit_of(info: CheckpointInfo) -> Commit | None:
    """Return the step and the digest of a committed checkpoint; None if its manifest cannot be read."""
    folder = on_disk(info.path)
    try:
        return Commit(info.step, _digest_in(folder), _written_ns(folder), info.run_id)
    except (OSError, CheckpointUnsafe):
        return None


def commits_in(store: StoresCheckpoints) -> tuple[Commit, ...]:
    """Return the latest full checkpoints of `store`, by ascending step, at most `MOST_COMMITS`."""
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL]
    return tuple(commit for info in full[-MOST_COMMITS:] if (commit := commit_of(info)) is not None)


def rests_in(store: StoresCheckpoints) -> frozenset[Commit]:
    """Return what is left of the damaged checkpoints in `store`, those that were set aside included."""
    root = Path(store.address)
    folders = [(step, Path(error.path)) for step, error in store.damaged().items()]
    for name in Listing(root).names:
        if (aside := layout.parse_set_aside(name)) is not None and aside[1] == "corrupt":
            folders.append((aside[0], root / name))
    return frozenset(_leftover_commit(step, folder) for step, folder in folders)


def _leftover_commit(step: int, folder: Path) -> Commit:
    digest = ""
    with suppress(OSError, CheckpointUnsafe):
        digest = _digest_in(folder)
    return Commit(step, digest, _written_ns(folder))


def _digest_in(folder: Path) -> str:
    with opened_plain_file(folder / layout.MANIFEST) as fd:
        return last_digest(fd)


def _written_ns(folder: Path) -> int:
    try:
        return os.lstat(folder / layout.data_file(0, 0)).st_mtime_ns
    except OSError:
        return 0
