"""Where a checkpoint is: a folder on disk, or a prefix in an object store.

What a store gives out to name one checkpoint. Its string is the address that people read and write. A value: the
coordinator sends it to the other ranks, which open their own connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True)
class ObjectPlace:
    """The prefix of one checkpoint's objects."""

    address: str
    """Of the folder of checkpoints: s3://bucket/run."""
    name: str
    """step-5.0123456789abcdef"""

    def __str__(self) -> str:
        return f"{self.address}/{self.name}"


Place = Path | ObjectPlace


def on_disk(place: Place) -> Path:
    """Return `place` as a folder on disk. Raises ConfigError for a checkpoint that is elsewhere."""
    if isinstance(place, Path):
        return place
    raise ConfigError(
        f"{place} is in an object store, and this needs a folder on disk. Copy the checkpoint there first: "
        f"torchtitan-lite convert {place} OUT --layout ours"
    )
