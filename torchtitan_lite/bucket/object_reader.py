"""The files of one checkpoint in an object store, each an object below its prefix.

A checkpoint's objects are written once, so what was read of one stays true. The manifest alone says that a checkpoint
is complete; whether it is listed is for the store of its folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torchtitan_lite import faults
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.bucket.manifests import size_findings
from torchtitan_lite.bucket.objects import ObjectPath, Objects, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_reader import CheckedFile, DamagedRange, run
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.plain_file import is_plain_name
from torchtitan_lite.disk.read_requests import Piece, PieceTable, ReadsBlocks, Segment, by_block, scatter
from torchtitan_lite.distributed.host_exchange import Exchanges, ReadsAlike
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import ObjectPlace


def files_at(place: ObjectPlace) -> ObjectFiles:
    """Return the files of the checkpoint at `place`; sends nothing yet. Any rank.

    Raises ExtraMissing without `obstore`, ConfigError for an address that is none.
    """
    return ObjectFiles(connect(parse_address(place.address)), place)


class ObjectFiles:
    """The files of the checkpoint at `place` in `objects`, as `StoredFiles` has them. Raises OSError."""

    def __init__(self, objects: Objects, place: ObjectPlace) -> None:
        self._objects = objects
        self._place = place
        self._sizes: dict[str, int] = {}
        """Of the objects that were listed or read; they do not change."""

    def manifest(self) -> Manifest | None:
        try:
            return Manifest.parse(self._get(layout.MANIFEST), str(self.path_of(layout.MANIFEST)))
        except FileNotFoundError:
            return None

    def identity(self) -> tuple[int | str, ...] | None:
        try:
            condition = self._objects.head(self._key(layout.MANIFEST)).condition
        except FileNotFoundError:
            return None
        except OSError as error:
            # The load meets it, too, and says what it is.
            return (error.errno or 0,)
        return tuple(f"{name}={value}" for name, value in sorted(condition.items()))

    def path_of(self, name: str) -> ObjectPath:
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
        return ObjectReader(self._objects, self._place.name, self._sizes)

    @contextmanager
    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> Iterator[ReadsBlocks]:
        """Yield what fetches each request on one rank, for all that make it."""
        with ranks.exchange() as exchange:
            alone = ObjectReader(self._objects, self._place.name, self._sizes, exchange=exchange)
            yield ranks.over_hosts(own, alone)

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
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


# Parts of objects, read once, checked, and put into their places.
#
# What `BlockReader` promises of a file on disk holds of an object: of each touched block all bytes are digested, from
# the memory that they arrived in, before the read returns. A block with a wrong digest is read once more, and only then
# reported as damage; what the store does not give is never reported as damage. What ranks of one host read alike each
# of them fetches a part of, and gives it to the others. Memory: `THREADS` x `REQUEST_BYTES`, and the ring of an
# exchange.


THREADS = 8
"""Requests under way at a time: one connection to a store gives only a part of what the network can."""
REQUEST_BYTES = 8 * BLOCK_BYTES
"""Of one request, about: a request takes as long as some megabytes until its first byte comes."""
GAP_BYTES = BLOCK_BYTES
"""A gap of up to this size between two segments is fetched, not skipped."""

T = TypeVar("T")


class ObjectReader(ReadsBlocks):
    """Reads objects below `prefix`, which were written once; `threads` requests at a time. Any thread.

    `sizes` has those of the objects that are known; the reader adds to them.
    """

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        sizes: dict[str, int] | None = None,
        *,
        threads: int = THREADS,
        exchange: Exchanges | None = None,
    ) -> None:
        self._objects = objects
        self._prefix = prefix
        self._threads = threads
        self._sizes = {} if sizes is None else sizes
        self._exchange = exchange or Exchanges()

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill `pieces` from the object with the name of `path`; see `ReadsBlocks`."""
        checked = CheckedFile(path, record, self._size(path))
        requests = list(_together(checked.requests(pieces, table)))
        # What has no digests is not taken from another rank: nothing would show that it is right.
        exchange = self._exchange if checked.blocks else Exchanges()
        first = exchange.reserve(len(requests))
        read = _Object(self._objects, f"{self._prefix}/{path.name}", checked, exchange).read
        run(list(enumerate(requests, first)), lambda: read, self._threads)

    def _size(self, path: Path) -> int:
        name = path.name
        if name not in self._sizes:
            self._sizes[name] = _readable(path, lambda: self._objects.head(f"{self._prefix}/{name}")).size
        return self._sizes[name]


class _Object:
    """One object, with its digests in `checked`."""

    def __init__(self, objects: Objects, key: str, checked: CheckedFile, exchange: Exchanges) -> None:
        self._objects, self._key, self._checked, self._exchange = objects, key, checked, exchange

    def read(self, numbered: tuple[int, Sequence[Segment]]) -> None:
        """Fill the pieces of the segments of a request with its number, which are fetched together. Any thread."""
        number, request = numbered
        begin, end = request[0].begin, max(segment.end for segment in request)
        path, size = self._checked.path, self._checked.size
        if end > size:
            raise DamagedRange(path, size, end, f"the object ends after {size} bytes")
        name = f"{self._key} {begin} {end}"
        try:
            data = self._exchange.take(number, name)
            if data is None:
                data = self._fetch(begin, end)
                self._exchange.offer(number, name, data)
            for segment in request:
                for part in by_block(segment):
                    self._fill(part, data[part.begin - begin : part.end - begin])
        except BaseException:
            # Nothing more is read, and no other rank is to wait for what this one would offer.
            self._exchange.leave()
            raise
        finally:
            self._exchange.release(number)

    def _fill(self, part: Segment, data: memoryview) -> None:
        """Fill the pieces of `part`, which are within one block, from `data`, its bytes; from others if wrong."""
        for begin, end in self._checked.wrong(part.begin, data):
            data = self._fetch(begin, end)
            self._checked.check_again(begin, data)
        scatter(part, part.begin, data)

    def _fetch(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of the object. Raises `DamagedRange` if it ends before."""
        path = self._checked.path
        faults.point("read", path=path)
        data = _readable(path, lambda: self._objects.get_range(self._key, begin, end))
        if len(data) < end - begin:
            raise DamagedRange(path, begin + len(data), end, "the object ends before them")
        return data


def _readable(path: Path, ask: Callable[[], T]) -> T:
    """Return what `ask` returns about the object at `path`. Raises CheckpointUnreadable."""
    try:
        return ask()
    except OSError as error:
        raise CheckpointUnreadable(str(path), f"{type(error).__name__}: {error.strerror}") from error


def _together(found: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments `found`, which ascend, in lists of those that one request fetches."""
    together: list[Segment] = []
    for segment in found:
        near = together and segment.begin <= together[-1].end + GAP_BYTES
        if together and not (near and segment.end - together[0].begin <= REQUEST_BYTES):
            yield together
            together = []
        together.append(segment)
    if together:
        yield together
