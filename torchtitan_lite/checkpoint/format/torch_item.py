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
from typing import Any, ClassVar, NamedTuple

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
_MOST_ENTRIES = 0xFFFF
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
    archive = Archive(pickled(tensor_call(dtype, shape, 0)))
    archive.announce("data/0", torch.Size(shape).numel() * dtype.itemsize)
    return Frame(bytes(archive.data), archive.directory())


def object_item(value: Any) -> bytes:
    """Return the item of `value`, which must hold no tensor and consist of Python's built-in types."""
    content = pickle.dumps(value, protocol=2)
    if CALL_OF_BYTES in content:
        buffer = io.BytesIO()
        SafePickle.Pickler(buffer, protocol=2).dump(value)
        content = buffer.getvalue()
    bare = _object_archive(content, padding=0)
    return _object_archive(content, padding=-len(bare) % OBJECT_GRAIN)


def _object_archive(content: bytes, padding: int) -> bytes:
    # The padding is in the last entry, because torch expects the pickle first; the field's own header has 4 bytes.
    archive = Archive(content, extra=_padding(padding + 4))
    return bytes(archive.data) + archive.directory()


@dataclass(frozen=True)
class _Entry:
    name: bytes
    crc: int
    num_bytes: int
    offset: int


class Archive:
    """A zip archive of torch.save with the pickle `content`, planned before it is written.

    `extra` is an extra field of the last entry before those of tensors.
    """

    def __init__(self, content: bytes, extra: bytes = b"") -> None:
        self.data = bytearray()
        """Its bytes up to the directory, without the contents that are announced."""
        self._announced_bytes = 0
        self._entries: list[_Entry] = []
        for name, data in {"data.pkl": content, "byteorder": b"little", "version": b"3\n"}.items():
            self._header(name, zlib.crc32(data), len(data), extra if name == "version" else b"")
            self.data += data

    @property
    def _at(self) -> int:
        return len(self.data) + self._announced_bytes

    def announce(self, name: str, num_bytes: int) -> None:
        """Add the header of an entry of `num_bytes`, padded so that its content starts at a multiple of `ALIGNMENT`.

        The content itself is not in `data`: the caller writes it directly behind.
        """
        size64 = struct.pack("<2sHQQ", b"\x01\x00", 16, num_bytes, num_bytes) if num_bytes >= _LIMIT else b""
        bare = self._at + 30 + len(_PREFIX + name) + len(size64) + 4
        self._header(name, 0, num_bytes, size64 + _padding(4 + -bare % ALIGNMENT))
        self._announced_bytes += num_bytes

    def directory(self) -> bytes:
        """Return the zip directory, which the caller writes behind all contents."""
        directory = b"".join(self._central(entry) for entry in self._entries)
        at, count, end64 = self._at, len(self._entries), b""
        if at >= _LIMIT or count >= _MOST_ENTRIES:
            end64 = struct.pack("<4sQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, len(directory), at)
            end64 += struct.pack("<4sIQI", _LOCATOR64, 0, at + len(directory), 1)
        count = min(count, _MOST_ENTRIES)
        end = struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, len(directory), min(at, _LIMIT), 0)
        return directory + end64 + end

    def _header(self, name: str, crc: int, num_bytes: int, extra: bytes) -> None:
        entry = _Entry((_PREFIX + name).encode(), crc, num_bytes, self._at)
        self._entries.append(entry)
        self.data += struct.pack("<4s", _LOCAL) + self._description(entry)
        self.data += struct.pack("<HH", len(entry.name), len(extra)) + entry.name + extra

    def _central(self, entry: _Entry) -> bytes:
        # The zip64 field has only those values that do not fit into 32 bits, in this order.
        wide = [value for value in (entry.num_bytes, entry.num_bytes, entry.offset) if value >= _LIMIT]
        extra = struct.pack(f"<2sH{len(wide)}Q", b"\x01\x00", 8 * len(wide), *wide) if wide else b""
        fixed = struct.pack("<4sH", _CENTRAL, 45) + self._description(entry)
        fixed += struct.pack("<HHHHHII", len(entry.name), len(extra), 0, 0, 0, 0, min(entry.offset, _LIMIT))
        return fixed + entry.name + extra

    def _description(self, entry: _Entry) -> bytes:
        """Return the fields that both headers have: version, flags, method, time and date, CRC, sizes."""
        size = min(entry.num_bytes, _LIMIT)
        return struct.pack("<HHHHHIII", 45, 0, 0, 0, 0, entry.crc, size, size)


def _padding(num_bytes: int) -> bytes:
    """Return an extra field of `num_bytes`, at least 4."""
    return _PADDING + struct.pack("<H", num_bytes - 4) + b"Z" * (num_bytes - 4)


def pickled(value: Any) -> bytes:
    """Return the pickle of `value`, in which a `tensor_call` stands for each tensor, as torch.save writes it."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def tensor_call(dtype: torch.dtype, shape: tuple[int, ...], number: int) -> _Reduced:
    """Return what pickles as a row-major tensor whose elements are the entry data/`number`."""
    # The pickled form depends on the dtype: reduce an empty tensor with torch, then insert storage, shape and strides.
    rebuild, (held, _, _, _, grad, hooks, *rest) = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    kind = storage_kind(held)
    numel = torch.Size(shape).numel() * (dtype.itemsize if kind is UntypedStorage else 1)
    storage = _Storage(kind, number, numel)
    return _Reduced(rebuild, (storage, 0, tuple(shape), row_major_strides(shape), grad, hooks, *rest))


class _Storage(NamedTuple):
    """Stands for the storage of a tensor in the pickle."""

    kind: Any
    number: int
    numel: int


class _Reduced:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _TensorPickler(pickle.Pickler):
    """Writes a storage as torch.serialization does: a reference to an entry instead of its bytes."""

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, str(obj.number), "cpu", obj.numel) if type(obj) is _Storage else None


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
