"""Check `torch.save` items by what they have themselves: a checksum of each entry.

An item is a zip archive, so plain DCP's checkpoints, which have no digests, have a CRC-32 of every tensor's bytes and
of every pickle. Nothing is unpickled: pickles are parsed inertly. torch writes 0 for the data where it was configured
to compute no checksum, and so does this package; such an item is counted. The elements of a tensor are checked for NaN
on the way. Memory: `THREADS` x 1 MiB. Any thread.
"""

from __future__ import annotations

import io
import math
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Item, Shape
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.untrusted.inert_pickle import AnyName, InertPickleError, parse_pickle
from torchtitan_lite.checkpoint.untrusted.stock_item import locate
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.store.place import Place

THREADS = 3
SLICE_BYTES = 1 << 20
"""Read and summed at a time."""
_PICKLE_BYTES = 4 << 20
"""The largest pickle that is parsed, because that takes up to 72 times its size; larger ones have their checksum."""
_DIRECTORY_BYTES = 16 << 20
"""The largest directory; torch.save makes an entry of 60 bytes for each tensor in an object, or in a complete file."""
_LOCAL = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_FLAGS = 0x0808
"""Those that torch sets: sizes follow the content too, and names are UTF-8."""
_FOLDER = 0x10
"""The external attribute of a folder."""


class PlacedItem(NamedTuple):
    """An item, and what it should be: a tensor of this dtype and shape, or an object."""

    item: Item
    key: str
    dtype: Any = None
    shape: Shape | None = None
    is_file: bool = False
    """Whether it is a complete file of another library, of which only the checksums are compared."""


@dataclass
class CheckedItems:
    """What `check_items` found."""

    damaged: list[tuple[PlacedItem, str]] = field(default_factory=list)
    num_without_checksum: int = 0
    with_nan: set[str] = field(default_factory=set)
    """The keys of tensors in which `finder` found NaN."""


Finder = Callable[[str], Callable[[bytes], bool]]
"""Returns what finds NaN among elements of a dtype, which it receives by name."""


def find_nothing(dtype: str) -> Callable[[bytes], bool]:
    """Return what finds no NaN."""
    return lambda data: False


class _Wrong(ValueError):
    """The item is not what it should be."""


def check_items(
    folder: Place, items: Sequence[PlacedItem], on_bytes: Callable[[int], None], finder: Finder = find_nothing
) -> CheckedItems:
    """Read all of each of `items`; return which of them are damaged, in their order, and how many have no checksum.

    `on_bytes` receives the length of each item. Raises `CheckpointUnreadable` for an error of the machine.
    """
    checked, lock, files = CheckedItems(), threading.Lock(), files_of(folder)
    # One file at a time: a checkpoint may have more of them than a process may open.
    for file, of_file in groupby(sorted(items, key=lambda place: place.item), key=lambda place: place.item.file):
        places = list(of_file)
        try:
            with files.opened(file) as fd:

                def check(place: PlacedItem, fd: int = fd) -> None:
                    window = _Window(fd, place.item)
                    elements = _Elements.of(window, place, finder)
                    text, has_checksum = _item_finding(window, place, elements)
                    with lock:
                        checked.num_without_checksum += not has_checksum
                        if elements.is_found:
                            checked.with_nan.add(place.key)
                        if text:
                            checked.damaged.append((place, text))
                        on_bytes(place.item.length)

                in_threads(places, min(THREADS, len(places)), lambda check=check: check)  # type: ignore[misc]  # of a default
        except OSError as error:
            raise CheckpointUnreadable(str(folder), f"{type(error).__name__}: {error}") from error
    checked.damaged.sort(key=lambda found: found[0].item)
    return checked


class _Window(io.RawIOBase):
    """The bytes of one item of the open file `fd`, as a file."""

    def __init__(self, fd: int, item: Item) -> None:
        self._fd, self._item, self._at = fd, item, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # words: kept
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._item.length)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._item.length - self._at)
        data = self.part(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def part(self, at: int, count: int) -> bytes:
        """Return `count` bytes of the item from `at` on; fewer only at its end."""
        count = min(count, self._item.length - at)
        return os.pread(self._fd, count, self._item.offset + at) if at >= 0 and count > 0 else b""


@dataclass
class _Elements:
    """The bytes of an item where the elements of its tensor are, and whether NaN was found in them."""

    begin: int
    end: int
    has_nan: Callable[[bytes], bool]
    is_found: bool = False

    @classmethod
    def of(cls, window: _Window, place: PlacedItem, finder: Finder) -> _Elements:
        """Return those of `place`; none for an object, and where other bytes are between the elements."""
        layout = locate(window.part, place.item.length) if place.shape is not None else None
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


def _item_finding(window: _Window, place: PlacedItem, elements: _Elements) -> tuple[str, bool]:
    """Return what is wrong with the item, and whether it has a checksum of its data."""
    try:
        if place.is_file and window.part(0, len(_SIGNATURE)) != _SIGNATURE:
            return "", False  # Another form than torch's archives.
        _check_end(window, place.item.length)
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > place.item.length:
            raise _Wrong("its entries are larger than it is")
        has_checksum = True
        for entry in entries:
            found = _crc_of(window, place.item, entry, elements)
            if entry.CRC == 0 and found != 0:
                has_checksum = False
            elif found != entry.CRC:
                name = entry.filename.partition("/")[2] or entry.filename
                raise _Wrong(f"{name} in it has another checksum")
            if entry.filename.endswith(".pkl") and not place.is_file:
                _check_pickle(window, place.item, entry)
        if place.shape is not None:
            _check_tensor(window, place, place.shape)
        return "", has_checksum
    except _Wrong as error:
        finding = str(error)
    except InertPickleError as error:
        finding = f"its description is damaged: {error!s:.200}"
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        finding = f"it is not as torch.save writes it: {error!s:.200}"
    return f"bytes {place.item.offset} to {place.item.offset + place.item.length}: {finding}", True


def _check_end(window: _Window, length: int) -> None:
    """Raise `_Wrong` unless the archive ends as torch.save ends it: Python's zipfile accepts more than torch does."""
    at = length - _END.size
    end = _END.unpack(window.part(at, _END.size))
    signature, *disks, num_here, num_entries, num_bytes, offset, comment = end
    small = (num_entries, num_bytes, offset)
    if window.part(at - _LOCATOR64.size, 4) == b"PK\x06\x07":
        _, disk, at, num_disks = _LOCATOR64.unpack(window.part(at - _LOCATOR64.size, _LOCATOR64.size))
        signature64, size, *_, disk64, of_directory, num_here64, num_entries, num_bytes, offset = _END64.unpack(
            window.part(at, _END64.size)
        )
        disks += [disk, num_disks - 1, size - 44, disk64, of_directory, num_here64 - num_entries]
        wide = (num_entries, num_bytes, offset)
        if signature64 != b"PK\x06\x06" or any(
            a not in (b, 0xFFFF, 0xFFFFFFFF) for a, b in zip(small, wide, strict=True)
        ):
            raise _Wrong("the two ends of its directory differ")
    is_right = (signature, num_here, comment) == (b"PK\x05\x06", end[4], 0)
    if not is_right or any(disks) or offset + num_bytes != at or num_bytes > _DIRECTORY_BYTES:
        raise _Wrong("the end of its directory is damaged")
    directory, at, count = window.part(offset, num_bytes), 0, 0
    while at < num_bytes:
        at, count = at + _ENTRY.size + sum(_ENTRY.unpack_from(directory, at)[10:13]), count + 1
    if (at, count) != (num_bytes, num_entries):
        raise _Wrong("its directory is damaged")


def _check_tensor(window: _Window, place: PlacedItem, shape: Shape) -> None:
    layout = locate(window.part, place.item.length)
    # None is a form that only torch reads, such as a subclass; its bytes have their checksums.
    if layout is not None and (layout.dtype != place.dtype or tuple(layout.shape) != tuple(shape)):
        raise _Wrong(f"it holds {layout.dtype} {list(layout.shape)}, expected {place.dtype} {list(shape)}")


def _crc_of(window: _Window, item: Item, entry: zipfile.ZipInfo, elements: _Elements) -> int:
    at, end = _begin_of(window, entry), 0
    end = at + entry.compress_size
    if end > item.length:
        raise _Wrong(f"{entry.filename} in it ends behind it")
    crc = 0
    while at < end:
        data = window.part(at, min(SLICE_BYTES, end - at))
        if not data:
            raise _Wrong("the file ends within it")
        crc = zlib.crc32(data, crc)
        elements.look_at(at, data)
        at += len(data)
    return crc


def _begin_of(window: _Window, entry: zipfile.ZipInfo) -> int:
    """Return the byte of the item where the content of `entry` begins."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _Wrong(f"{entry.filename} in it is compressed")
    if entry.flag_bits & ~_FLAGS or entry.volume or entry.external_attr & _FOLDER:
        raise _Wrong(f"the entry of {entry.filename} in its directory is damaged")
    fields = _LOCAL.unpack(window.part(entry.header_offset, _LOCAL.size))
    begin = entry.header_offset + _LOCAL.size
    if fields[0] != _SIGNATURE or window.part(begin, fields[9]).decode(errors="replace") != entry.filename:
        raise _Wrong(f"the header of {entry.filename} in it is damaged")
    return int(begin + fields[9] + fields[10])


def _check_pickle(window: _Window, item: Item, entry: zipfile.ZipInfo) -> None:
    if entry.file_size <= _PICKLE_BYTES:
        parse_pickle(window.part(_begin_of(window, entry), entry.file_size), AnyName())
