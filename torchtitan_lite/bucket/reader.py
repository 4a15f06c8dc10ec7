"""The files of one checkpoint in an object store, each an object below its prefix.

A checkpoint's objects are written once, so what was read of one stays true. The manifest alone says that a checkpoint
is complete; whether it is listed is for the store of its folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

from torchtitan_lite.bucket.manifests import size_findings
from torchtitan_lite.bucket.object_reader import ObjectReader
from torchtitan_lite.bucket.objects import ObjectPath, Objects
from torchtitan_lite.bucket.obstore_objects import connect
from torchtitan_lite.bucket.store import open_bucket
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.plain_file import is_plain_name
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.distributed.host_exchange import ReadsAlike
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import ObjectPlace


def files_at(place: ObjectPlace) -> ObjectFiles:
    """Return the files of the checkpoint at `place`; sends nothing yet. Any rank.

    Raises ExtraMissing without `obstore`, ConfigError for an address that is none.
    """
    return ObjectFiles(connect(parse_address(place.address)), place)


class ObjectFiles:
    """The files of the checkpoint at `place` in `objects`. Errors of the store are raised as OSError."""

    def __init__(self, objects: Objects, place: ObjectPlace) -> None:
        self._objects = objects
        self._place = place
        self._sizes: dict[str, int] = {}
        """Of the objects that were listed or read; they do not change."""

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is none. Raises as `Manifest.parse`."""
        try:
            return Manifest.parse(self._get(layout.MANIFEST), str(self.path_of(layout.MANIFEST)))
        except FileNotFoundError:
            return None

    def identity(self) -> tuple[int | str, ...] | None:
        """Return what differs once another checkpoint has this place; None if there is none any more."""
        try:
            condition = self._objects.head(self._key(layout.MANIFEST)).condition
        except FileNotFoundError:
            return None
        except OSError as error:
            # The load meets it, too, and says what it is.
            return (error.errno or 0,)
        return tuple(f"{name}={value}" for name, value in sorted(condition.items()))

    def path_of(self, name: str) -> ObjectPath:
        """Return what the reader takes for the file `name`, and messages show."""
        return ObjectPath(f"{self._place}/{name}")

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the size in bytes of each file of `names` that exists, from one listing.

        Raises `CheckpointUnsafe` for a name that cannot be a file's.
        """
        wanted = {*names}
        for name in wanted:
            if not is_plain_name(name):
                raise CheckpointUnsafe(str(self._place), f"{name[:100]!r} is not the name of a file in it")
        sizes = self._list() if wanted else {}
        self._sizes.update(sizes)
        return {name: size for name, size in sizes.items() if name in wanted}

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Yield a descriptor of a copy of the small file `name`; all of it is fetched."""
        with tempfile.TemporaryFile() as file:
            file.write(self._get(name))
            file.seek(0)
            yield file.fileno()

    def reader(self, *, cached: bool = False) -> ObjectReader:
        """Return what reads the files."""
        return ObjectReader(self._objects, self._place.name, self._sizes)

    @contextmanager
    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> Iterator[ReadsBlocks]:
        """Yield what fetches each request on one rank, for all that make it."""
        with ranks.exchange() as exchange:
            alone = ObjectReader(self._objects, self._place.name, self._sizes, exchange=exchange)
            yield ranks.over_hosts(own, alone)

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        """Return the part of `names` that rank `number` of `count` looks at."""
        return names[number::count]

    def absence(self) -> str:
        """Return why there can be no checkpoint: nothing but the manifest makes its objects one."""
        return f"there is no {layout.MANIFEST} in it" if self.identity() is None else ""

    def damage(self) -> CheckpointDamaged | None:
        """Return what is wrong with the manifest, if the head lists it, and it is missing or not as committed."""
        store = open_bucket(self._place.address)
        kept = next((entry for entry in store.head().kept if entry.name == self._place.name), None)
        try:
            if kept is not None:
                store.get(kept.step)
        except CheckpointDamaged as error:
            return error
        return None

    @property
    def names(self) -> Collection[str]:
        """The names of all files, from one listing."""
        return self._found.keys()

    def size_finding(self, name: str, expected_bytes: int) -> str:
        """Return what is wrong with the size of the file `name`, by that listing."""
        return "".join(size_findings({name: expected_bytes}, self._found))

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        """Return up to which byte the file `name`, which has another size, may be what was saved."""
        return min(self._found.get(name, 0), expected_bytes)

    def drop_from_cache(self, names: Iterable[str]) -> None:
        """Do nothing: an object is fetched at each read."""

    def thread_reader(self) -> ObjectReader:
        """Return a reader: requests of several threads never wait for each other."""
        return self.reader()

    @cached_property
    def _found(self) -> Mapping[str, int]:
        return self._list()

    def _list(self) -> dict[str, int]:
        prefix = self._key("")
        return {each.key.removeprefix(prefix): each.size for each in self._objects.list(prefix)}

    def _get(self, name: str) -> bytes:
        return self._objects.get(self._key(name))[0]

    def _key(self, name: str) -> str:
        return f"{self._place.name}/{name}"
