"""The bytes around a tensor's elements that make them a `torch.save` item, written without torch.save.

An item is a zip archive with stored (not compressed) entries, as `torch.save` makes it: a pickle with
dtype and shape, a few small entries, and the elements, row-major, little-endian, starting at a multiple
of 64 bytes. The head is everything before the elements, the tail is the zip directory after them;
both depend on dtype and shape alone. The elements' CRC is left 0, as torch does with
`compute_crc32=False`: computing it takes longer than writing, and no reader of torch checks it.
"""

from __future__ import annotations

import codecs
import io
import pickle
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.storage import UntypedStorage

from torchtitan_lite.checkpoint.format.chunk_runs import row_major_strides
from torchtitan_lite.torch_private import storage_kind

ALIGNMENT = 64
"""Bytes. Items start at multiples of it in a file, and a tensor's elements at multiples of it in an item."""
OBJECT_GRAIN = 256
"""Bytes. The size of an object's item is a multiple of it, so that a number with one more digit moves nothing."""
CALL_OF_BYTES = b"c__builtin__\nbytes\n"
"""Bytes in the pickle of every value that contains b"", and seldom in another pickle."""

_PREFIX = "archive/"
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
_LIMIT = 0xFFFFFFFF
_PADDING = b"FB"
"""The extra field that torch pads with."""


@dataclass(frozen=True)
class Frame:
    """The bytes before and after a tensor's elements."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=4096)
def tensor_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a dense, row-major tensor. Any thread."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    archive = _Archive()
    archive.add("data.pkl", _tensor_pickle(dtype, shape))
    archive.add("byteorder", b"little")
    archive.add("version", b"3\n")
    archive.announce("data/0", num_bytes)
    return Frame(bytes(archive.data), archive.directory(at=len(archive.data) + num_bytes))


def object_item(value: Any) -> bytes:
    """Return the item of `value`, which must hold no tensor and consist of Python's built-in types."""
    pickled = pickle.dumps(value, protocol=2)
    if CALL_OF_BYTES in pickled:
        buffer = io.BytesIO()
        SafePickle.Pickler(buffer, protocol=2).dump(value)
        pickled = buffer.getvalue()
    bare = _object_archive(pickled, padding=0)
    return _object_archive(pickled, padding=-len(bare) % OBJECT_GRAIN)


def _object_archive(pickled: bytes, padding: int) -> bytes:
    archive = _Archive()
    # The padding is in the last entry, because torch expects the pickle first; the field's own header has 4 bytes.
    archive.add("data.pkl", pickled)
    archive.add("byteorder", b"little")
    archive.add("version", b"3\n", extra=_padding(padding + 4))
    return bytes(archive.data) + archive.directory(at=len(archive.data))


@dataclass(frozen=True)
class _Entry:
    name: bytes
    crc: int
    num_bytes: int
    offset: int


class _Archive:
    """A zip archive that is being written."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._entries: list[_Entry] = []

    def add(self, name: str, content: bytes, extra: bytes = b"") -> None:
        self._header(name, zlib.crc32(content), len(content), extra)
        self.data += content

    def announce(self, name: str, num_bytes: int) -> None:
        """Add the header of an entry of `num_bytes`, padded so that its content starts at a multiple of `ALIGNMENT`.

        The content itself is not in `data`: the caller writes it directly behind.
        """
        size64 = struct.pack("<2sHQQ", b"\x01\x00", 16, num_bytes, num_bytes) if num_bytes >= _LIMIT else b""
        bare = len(self.data) + 30 + len(_PREFIX + name) + len(size64) + 4
        self._header(name, 0, num_bytes, size64 + _padding(4 + -bare % ALIGNMENT))

    def directory(self, at: int) -> bytes:
        """Return the zip directory, which the caller writes at byte `at` of the archive."""
        directory = b"".join(self._central(entry) for entry in self._entries)
        count = len(self._entries)
        end64 = b""
        if at >= _LIMIT:
            end64 = struct.pack("<4sQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, len(directory), at)
            end64 += struct.pack("<4sIQI", _LOCATOR64, 0, at + len(directory), 1)
        end = struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, len(directory), min(at, _LIMIT), 0)
        return directory + end64 + end

    def _header(self, name: str, crc: int, num_bytes: int, extra: bytes) -> None:
        entry = _Entry((_PREFIX + name).encode(), crc, num_bytes, len(self.data))
        self._entries.append(entry)
        self.data += struct.pack("<4s", _LOCAL) + self._description(entry)
        self.data += struct.pack("<HH", len(entry.name), len(extra)) + entry.name + extra

    def _central(self, entry: _Entry) -> bytes:
        is_long = entry.num_bytes >= _LIMIT
        extra = struct.pack("<2sHQQ", b"\x01\x00", 16, entry.num_bytes, entry.num_bytes) if is_long else b""
        fixed = struct.pack("<4sH", _CENTRAL, 45) + self._description(entry)
        fixed += struct.pack("<HHHHHII", len(entry.name), len(extra), 0, 0, 0, 0, entry.offset)
        return fixed + entry.name + extra

    def _description(self, entry: _Entry) -> bytes:
        """Return the fields that both headers have: version, flags, method, time and date, CRC, sizes."""
        size = min(entry.num_bytes, _LIMIT)
        return struct.pack("<HHHHHIII", 45, 0, 0, 0, 0, entry.crc, size, size)


def _padding(num_bytes: int) -> bytes:
    """Return an extra field of `num_bytes`, at least 4."""
    return _PADDING + struct.pack("<H", num_bytes - 4) + b"Z" * (num_bytes - 4)


def _tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor whose elements are the entry data/0, as torch.save writes it."""
    # The pickled form depends on the dtype: reduce an empty tensor with torch, then insert shape and strides.
    rebuild, (storage, _, _, _, grad, hooks, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    size = torch.Size(shape)
    buffer = io.BytesIO()
    strides = row_major_strides(shape)
    pickler = _TensorPickler(buffer, size.numel(), dtype.itemsize)
    pickler.dump(_Reduced(rebuild, (storage, 0, tuple(shape), strides, grad, hooks, *rest)))
    return buffer.getvalue()


class _Reduced:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _TensorPickler(pickle.Pickler):
    """Writes the one storage as torch.serialization does: a reference to an entry instead of its bytes."""

    def __init__(self, buffer: io.BytesIO, numel: int, itemsize: int) -> None:
        super().__init__(buffer, protocol=2)
        self._numel, self._itemsize = numel, itemsize

    def persistent_id(self, obj: Any) -> Any:
        kind = storage_kind(obj)
        if kind is None:
            return None
        return ("storage", kind, "0", "cpu", self._numel * (self._itemsize if kind is UntypedStorage else 1))


class _EmptyBytesPickler(pickle._Pickler):
    """Writes b"" in the same way as other bytes.

    pickle writes b"" as a call of `bytes`, which `torch.load(weights_only=True)` refuses. This is the slow pickler
    written in Python: the one in C does not let a subclass change how it writes a built-in type.
    """

    def save_bytes(self, value: bytes) -> None:
        if value:
            pickle._Pickler.save_bytes(self, value)  # type: ignore[attr-defined]  # not in the stubs
        else:
            self.save_reduce(codecs.encode, ("", "latin1"), obj=value)  # type: ignore[attr-defined]  # as above

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, bytes: save_bytes}


class SafePickle:
    """A stand-in for the module `pickle`, for `torch.save(pickle_module=...)`, whose output weights_only loads read."""

    Pickler = _EmptyBytesPickler
