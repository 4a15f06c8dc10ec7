"""Where a checkpoint is: a folder on disk, or a prefix in an object store.

What a store gives out to name one checkpoint. Its string is the address that people read and write, and it answers
what of a path makes sense anywhere: `name`, `absolute`, `is_dir`, `is_file`. A value: the coordinator sends it to the
other ranks, which open their own connections.
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

    def absolute(self) -> ObjectPlace:
        """Return itself: an address means the same everywhere."""
        return self

    def is_dir(self) -> bool:
        """Return False: it is no folder on a disk, where other programs write, too."""
        return False

    def is_file(self) -> bool:
        """Return False: a checkpoint has several objects."""
        return False


Place = Path | ObjectPlace


_COPY_IT = (
    ", and this needs a folder on disk. Copy the checkpoint there first: torchtitan-lite convert {place} OUT "
    "--layout ours"
)


def on_disk(place: Place, refusal: str = _COPY_IT) -> Path:
    """Return `place` as a path on disk. Raises ConfigError for a checkpoint that is elsewhere.

    `refusal` ends its sentence, and may name the `{place}`.
    """
    if isinstance(place, Path):
        return place
    raise ConfigError(f"{place} is in an object store{refusal.format(place=place)}")


def home_of(place: Place) -> Place:
    """Return the folder of the files of the checkpoint at `place`: where it is one file, the folder of that."""
    return on_disk(place).parent if place.is_file() else place
