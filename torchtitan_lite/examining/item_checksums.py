"""Check `torch.save` items by what they have themselves: a checksum of each entry.

An item is a zip archive, so plain DCP's checkpoints, which have no digests, have a CRC-32 of every tensor's bytes and
of every pickle. Nothing is unpickled: pickles are parsed inertly. torch writes 0 for the data where it was configured
to compute no checksum, and so does this package; such an item is counted. The elements of a tensor are checked for NaN
on the way. Memory: `THREADS` x 1 MiB. Any thread.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Item, Shape
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.untrusted.inert_pickle import AnyName, InertPickleError, parse_pickle
from torchtitan_lite.checkpoint.untrusted.stock_item import Read, content_start, directory, item_reader, locate
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.errors import reading
from torchtitan_lite.examining.file_digests import Finding
from torchtitan_lite.store.place import Place

THREADS = 3
SLICE_BYTES = 1 << 20
"""Read and summed at a time."""
_PICKLE_BYTES = 4 << 20
"""The largest pickle that is parsed, because that takes up to 72 times its size; larger ones have their checksum."""
_DIRECTORY_BYTES = 16 << 20
"""The largest directory; torch.save makes an entry of 60 bytes for each tensor in an object, or in a complete file."""
_SIGNATURE = b"PK\x03\x04"


class PlacedItem(NamedTuple):
    """An item, and what it should be: a tensor of this dtype and shape, or an object."""

    item: Item
    key: str
    dtype: Any = None
    shape: Shape | None = None
    is_file: bool = False
    """Whether it is a complete file of another library, of which only the checksums are compared."""


@dataclass
class Checked:
    """What reading every byte of a checkpoint found."""

    findings: tuple[Finding, ...] = ()
    num_items: int = 0
    """Items that were checked one by one, because their file has no digests."""
    num_without_checksum: int = 0
    """Those of them that have no checksum for their data."""
    nan_in: list[str] = field(default_factory=list)
    """The tensors with NaN, among those whose files have no digests: a manifest says it of the others."""


Finder = Callable[[str], Callable[[bytes], bool]]
"""Returns what finds NaN among elements of a dtype, which it receives by name."""


def find_nothing(dtype: str) -> Callable[[bytes], bool]:
    """Return what finds no NaN."""
    return lambda data: False


class _Wrong(ValueError):
    """The item is not what it should be."""


def check_items(
    folder: Place, items: Sequence[PlacedItem], on_bytes: Callable[[int], None], finder: Finder = find_nothing
) -> Checked:
    """Read all of each of `items`; return what is wrong with them, in their order, and how many have no checksum.

    `on_bytes` receives the length of each item. Raises `CheckpointUnreadable` for an error of the machine.
    """
    checked, lock, files = Checked(num_items=len(items)), threading.Lock(), files_of(folder)
    damaged: list[tuple[Item, Finding]] = []
    # One file at a time: a checkpoint may have more of them than a process may open.
    for file, of_file in groupby(sorted(items, key=lambda place: place.item), key=lambda place: place.item.file):
        places = list(of_file)
        with reading(folder), files.opened(file) as fd:

            def check(place: PlacedItem, fd: int = fd) -> None:
                read = item_reader(fd, place.item)
                elements = _Elements.of(read, place, finder)
                text, has_checksum = _item_finding(read, place, elements)
                with lock:
                    checked.num_without_checksum += not has_checksum
                    checked.nan_in += [place.key] * elements.is_found
                    if text:
                        damaged.append((place.item, Finding(place.item.file, text, (place.key,))))
                    on_bytes(place.item.length)

            in_threads(places, min(THREADS, len(places)), lambda check=check: check)  # type: ignore[misc]  # of a default
    checked.findings = tuple(finding for _, finding in sorted(damaged, key=lambda found: found[0]))
    return checked


@dataclass
class _Elements:
    """The bytes of an item where the elements of its tensor are, and whether NaN was found in them."""

    begin: int
    end: int
    has_nan: Callable[[bytes], bool]
    is_found: bool = False

    @classmethod
    def of(cls, read: Read, place: PlacedItem, finder: Finder) -> _Elements:
        """Return those of `place`; none for an object, and where other bytes are between the elements."""
        layout = locate(read, place.item.length) if place.shape is not None else None
        if layout is None:
            return cls(0, 0, lambda data: False)
        last = sum((n - 1) * stride for n, stride in zip(layout.shape, layout.strides, strict=True))
        count = math.prod(layout.shape)
        end = layout.at + (last + 1) * layout.dtype.itemsize if 0 < last + 1 <= count else layout.at
        return cls(layout.at, end, finder(str(layout.dtype)))

    def look_at(self, at: int, data: bytes) -> None:
        """Look at the elements in `data`, which begins at the byte `at` of the item with a complete element."""
        inside = data[max(0, self.begin - at) : max(0, self.end - at)]
        self.is_found = self.is_found or (bool(inside) and self.has_nan(inside))


def _item_finding(read: Read, place: PlacedItem, elements: _Elements) -> tuple[str, bool]:
    """Return what is wrong with the item, and whether it has a checksum of its data."""
    try:
        if place.is_file and read(0, len(_SIGNATURE)) != _SIGNATURE:
            return "", False  # Another form than torch's archives.
        entries = directory(read, place.item.length, _DIRECTORY_BYTES)
        if sum(entry.num_bytes for entry in entries.values()) > place.item.length:
            raise _Wrong("its entries are larger than it is")
        has_checksum = True
        for name, entry in entries.items():
            begin = content_start(read, entry)
            found = _crc_of(read, begin, begin + entry.num_bytes, elements)
            if entry.crc == 0 and found != 0:
                has_checksum = False
            elif found != entry.crc:
                raise _Wrong(f"{name.partition('/')[2] or name} in it has another checksum")
            if name.endswith(".pkl") and not place.is_file and entry.num_bytes <= _PICKLE_BYTES:
                parse_pickle(read(begin, entry.num_bytes), AnyName())
        if place.shape is not None:
            _check_tensor(read, place, place.shape)
        return "", has_checksum
    except _Wrong as error:
        finding = str(error)
    except InertPickleError as error:
        finding = f"its description is damaged: {error!s:.200}"
    except (ValueError, struct.error) as error:
        finding = f"it is not as torch.save writes it: {error!s:.200}"
    return f"bytes {place.item.offset} to {place.item.offset + place.item.length}: {finding}", True


def _check_tensor(read: Read, place: PlacedItem, shape: Shape) -> None:
    layout = locate(read, place.item.length)
    # None is a form that only torch reads, such as a subclass; its bytes have their checksums.
    if layout is not None and (layout.dtype != place.dtype or tuple(layout.shape) != tuple(shape)):
        raise _Wrong(f"it holds {layout.dtype} {list(layout.shape)}, expected {place.dtype} {list(shape)}")


def _crc_of(read: Read, at: int, end: int, elements: _Elements) -> int:
    crc = 0
    while at < end:
        data = read(at, min(SLICE_BYTES, end - at))
        if not data:
            raise _Wrong("the file ends within it")
        crc = zlib.crc32(data, crc)
        elements.look_at(at, data)
        at += len(data)
    return crc
