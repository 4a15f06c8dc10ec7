"""The files that lie at the place of a checkpoint, by name and size, listed in its manifest or not.

Of a folder on disk each file is looked at by itself; of an object store all of them at once, by a listing.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk import plain_file
from torchtitan_lite.store.place import Place


class FoundFiles(Protocol):
    """What is there."""

    @property
    def names(self) -> Collection[str]:
        """The names of all files, and of what else is there."""
        ...

    def size_finding(self, name: str, expected_bytes: int) -> str:
        """Return what is wrong with the size of the file `name`; an empty string if nothing is."""
        ...

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        """Return up to which byte the file `name`, which has another size, may be what was saved."""
        ...


class FoundOnDisk:
    """What is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()]

    def size_finding(self, name: str, expected_bytes: int) -> str:
        return plain_file.size_finding(self._folder / name, expected_bytes)

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        try:
            found = (self._folder / name).lstat()
        except OSError:
            return 0
        return min(found.st_size, expected_bytes) if stat.S_ISREG(found.st_mode) else 0


class FoundObjects:
    """What a listing showed: the `sizes` in bytes, by name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    @property
    def names(self) -> Collection[str]:
        return self._sizes.keys()

    def size_finding(self, name: str, expected_bytes: int) -> str:
        from torchtitan_lite.bucket.manifests import size_findings  # Needed for object stores only.

        return "".join(size_findings({name: expected_bytes}, self._sizes))

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        return min(self._sizes.get(name, 0), expected_bytes)


def found_at(place: Place) -> FoundFiles:
    """Return what is at `place`. Raises OSError, and `ExtraMissing` for an object store without its client."""
    if isinstance(place, Path):
        return FoundOnDisk(place)
    from torchtitan_lite.bucket.store import open_bucket  # Its client is an extra, and takes its time.

    objects = open_bucket(place.address).objects
    prefix = f"{place.name}/"
    return FoundObjects({each.key.removeprefix(prefix): each.size for each in objects.list(prefix)})
