"""A file that is written in one pass, from start to end, with memory for a few slices.

Its contents are parts in order: bytes, and elements of stored tensors. The length of each is known before, so every
format that states its offsets first can be written while the tensors are read. Reading, casting and hashing continue
while earlier bytes are on their way to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.dtypes import DTYPES, dtype_name
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.block_writer import Bounced, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.examining.file_digests import verify_file
from torchtitan_lite.examining.tensor_stream import SLICE_BYTES, Cut, TensorStream

Advance = Callable[[int], None]
"""Called with the number of bytes done since the last call. Any thread."""

_THREADS = 3
"""One fills its request while the others write. What is cast in a thread is freed to that thread's own memory pool, so
each further one would keep about 10 MiB."""


class NewTensor(NamedTuple):
    """A tensor to write, of the elements of a stored one in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    source: str
    """The key of the stored one."""
    cast: Cast | None = None
    within: Cut | None = None
    """The cut of it that is written; None for the whole tensor."""

    @classmethod
    def of(cls, contents: Contents, key: str, dtype: str = "") -> NewTensor:
        """Return the tensor `key` of `contents`, cast to `dtype`, which leaves some tensors as they are; so does "".

        So it does the parts of one that is made of others: a cast scale would be of another tensor.
        """
        stored = contents.tensors[key]
        before = dtype_name(stored.dtype)
        cast = None if key.startswith(contents.made_of_others) else cast_between(before, dtype)
        return cls(before if cast is None else dtype, stored.shape, key, cast)

    @property
    def cut(self) -> Cut:
        """What is written of it."""
        return self.within or Cut.whole(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of its elements, after the cast."""
        return self.cut.numel * DTYPES[self.dtype].itemsize


Part = bytes | NewTensor


def write_new(path: Path, parts: Sequence[Part], stream: TensorStream, advance: Advance) -> FileRecord:
    """Write `parts` to the new file `path`, synced; return its record.

    Raises the OSError of the disk, with a path in it, and what `stream` raises.
    """
    contents = _InOrder(_cast_pieces(parts, stream, advance))
    num_bytes = sum(len(part) if isinstance(part, bytes) else part.num_bytes for part in parts)
    source = Bounced(num_bytes, contents.fill)
    # In a thread of its own: an interrupt of the main thread could hit a worker before its turn, and the others would
    # wait for it.
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_blocks, path, source, threads=_THREADS)
        try:
            failure = written.exception()
        except BaseException:
            contents.stop()
            raise
    if failure is not None:
        raise contents.failure or failure
    return written.result()


def read_back(path: Path, record: FileRecord, reader: BlockReader, advance: Advance) -> None:
    """Raise unless the disk has the bytes of `path` that were written: those in `record`."""
    try:
        verify_file(reader, path, record, advance)
    except DamagedRange as damage:
        raise TorchtitanLiteError(f"{path.name} was written, but the disk has other bytes: {damage.finding}") from None


class _InOrder:
    """Fills buffers of several threads from `pieces`, one after another in the order of the file."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._next = 0
        self._turn = threading.Condition()
        self.failure: BaseException | None = None
        """What the first thread that failed here raised."""

    def fill(self, buffer: memoryview, begin: int, end: int) -> None:
        """Write bytes [begin, end) of the file to the start of `buffer`, once all before them are taken."""
        with self._turn:
            self._turn.wait_for(lambda: self._next == begin or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            try:
                self._take(buffer[: end - begin])
            except BaseException as error:
                self.failure = error
                raise
            finally:
                self._next = end
                self._turn.notify_all()

    def stop(self) -> None:
        """Let every fill from now on fail."""
        with self._turn:
            self.failure = self.failure or InterruptedError("the write was stopped")
            self._turn.notify_all()

    def _take(self, room: memoryview) -> None:
        while room:
            if not self._rest:
                self._rest = next(self._pieces)
            count = min(len(room), len(self._rest))
            room[:count] = self._rest[:count]
            room, self._rest = room[count:], self._rest[count:]


def _cast_pieces(parts: Iterable[Part], stream: TensorStream, advance: Advance) -> Iterator[memoryview]:
    """Yield the bytes of `parts`; each piece is valid until the next."""
    for part in parts:
        if isinstance(part, bytes):
            yield memoryview(part)
            continue
        most = None if part.cast is None else part.cast.most_elements
        for data in stream.slices(part.source, most, part.within):
            cast = data if part.cast is None else part.cast(data)
            yield cast
            advance(len(cast))


# Elements of one dtype as another one, slice by slice. Torch is imported where they are cast.


FLOATING = ("float32", "float16", "bfloat16", "float64")
"""The dtypes that are cast from and to. Float8 needs scales that are not stored next to the elements."""


class Cast:
    """Casts elements from the dtype `before` to the dtype `after`, as `tensor.to` does. One thread at a time."""

    def __init__(self, before: str, after: str) -> None:
        import torch

        self._before: torch.dtype = getattr(torch, before)
        self._after: torch.dtype = getattr(torch, after)
        self._room: torch.Tensor = torch.empty(0, dtype=self._after)
        self.most_elements = SLICE_BYTES // max(self._before.itemsize, self._after.itemsize)
        """In one call, so that neither the elements nor the cast ones are larger than a slice."""

    def __call__(self, data: memoryview) -> memoryview:
        """Return the elements of `data`, cast; valid until the next call."""
        import torch

        elements = torch.frombuffer(data, dtype=self._before)
        if len(self._room) < len(elements):
            self._room = torch.empty(len(elements), dtype=self._after)
        room = self._room[: len(elements)]
        room.copy_(elements)
        cast: Any = room.view(torch.uint8).numpy()
        view: memoryview = cast.data
        return view


@cache
def cast_between(before: str, after: str) -> Cast | None:
    """Return the cast of a tensor of the dtype `before` if `after` is wanted; None for a tensor that stays as it is.

    There is one of these dtypes: each keeps memory for a slice.
    """
    return None if not after or before == after or before not in FLOATING else Cast(before, after)
