"""Find the elements of a tensor in its `torch.save` item.

An item of a `.distcp` file is a zip archive with uncompressed entries: a small pickle that describes one
tensor, and its storage. `locate` finds the bytes of the storage, so that a reader can read any part of them
without the rest and without a copy. It does not guess: for anything that it does not know in every detail
(a compressed entry, a subclass, a conjugated view) it returns None, and the complete item must be read with
`torch.load(weights_only=True)`. Neither way unpickles anything.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Item, Shape
from torchtitan_lite.checkpoint.format.dtypes import DTYPES, Dtype
from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    InertPickleError,
    Instance,
    Persistent,
    PickledName,
    parse_pickle,
)

Read = Callable[[int, int], bytes]
"""Returns bytes [offset, offset + count) of the item; fewer only at its end."""


def item_reader(fd: int, item: Item) -> Read:
    """Return what reads `item` in the open file `fd`, and nothing outside of it."""

    def read(offset: int, count: int) -> bytes:
        is_inside = 0 <= offset < item.length
        return os.pread(fd, min(count, item.length - offset), item.offset + offset) if is_inside else b""

    return read


class Layout(NamedTuple):
    """The place of a tensor's elements in its item."""

    at: int
    """The byte of the item where the first element starts."""
    dtype: Any
    """A value of the table that `locate` got: a `Dtype`, or torch's."""
    shape: Shape
    strides: Shape


_MAX_DIRECTORY_BYTES = 65536

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_TAIL_BYTES = _END64.size + _END64_LOCATOR.size + _END.size
_MAX_32 = 0xFFFFFFFF
_FLAGS = 0x0808
"""Those that torch sets: sizes follow the content too, and names are UTF-8."""
_TOO_NEW = 0xC0
"""In the version of the format that an entry needs: torch's have 4.5 at most, written as 45."""
_FOLDER = 0x10
"""The external attribute of a folder."""

_STORAGES = {
    **{"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
}
_UNTYPED = PickledName("UntypedStorage")
_TENSOR, _TENSOR_OF_DTYPE = PickledName("_rebuild_tensor_v2"), PickledName("_rebuild_tensor_v3")
TABLE: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _TENSOR,
    ("torch._utils", "_rebuild_tensor_v3"): _TENSOR_OF_DTYPE,
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("collections", "OrderedDict"): PickledName("OrderedDict"),
    **{("torch", name): PickledName(name) for name in _STORAGES},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class StockEntry(NamedTuple):
    name: bytes
    method: int
    crc: int
    num_bytes: int
    header: int
    """The byte of the item where its local header starts."""


def locate(read: Read, num_bytes: int, dtypes: Mapping[str, Any] = DTYPES) -> Layout | None:
    """Return the place of the elements in the item of `num_bytes` that `read` reads; None if it is not certain.

    Whatever the item says, all elements of a returned layout are inside it. Its dtype is a value of `dtypes`.
    """
    try:
        return _locate(read, num_bytes, dtypes)
    except (InertPickleError, IndexError, KeyError, TypeError, UnicodeDecodeError, ValueError, struct.error):
        return None


def _locate(read: Read, num_bytes: int, dtypes: Mapping[str, Any]) -> Layout | None:
    entries = directory(read, num_bytes)
    [pickled] = [name for name in entries if name.endswith("/data.pkl")]
    folder = pickled.removesuffix("data.pkl")
    order = entries.get(f"{folder}byteorder")
    if sys.byteorder != "little" or (order is not None and content(read, order) != b"little"):
        return None
    described = parse_pickle(content(read, entries[pickled]), TABLE)
    tensor = described_tensor(described)
    if tensor is None:
        return None
    dtype, key, first, shape, strides = tensor
    storage = entries[f"{folder}data/{key}"]
    begin, size = content_start(read, storage), dtype.itemsize
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else -1
    fits = first >= 0 and (last + 1) * size <= storage.num_bytes and begin + storage.num_bytes <= num_bytes
    return Layout(begin + first * size, dtypes[dtype.name], shape, strides) if fits else None


def directory(read: Read, num_bytes: int, most_bytes: int = _MAX_DIRECTORY_BYTES) -> dict[str, StockEntry]:
    """Return the archive's entries by name, as strictly as torch reads them.

    Raises ValueError or struct.error if it is no archive of `torch.save`.
    """
    begin = max(0, num_bytes - _TAIL_BYTES)
    offset, length, count = _place_of_directory(read(begin, num_bytes - begin), num_bytes)
    if length > most_bytes:
        raise ValueError("the archive has too many entries")
    directory = read(offset, length)
    entries: dict[str, StockEntry] = {}
    at = 0
    while at < length:
        fields = _ENTRY.unpack_from(directory, at)
        odd = (fields[2] & _TOO_NEW, fields[3] & ~_FLAGS, fields[13], fields[15] & _FOLDER)
        if fields[0] != b"PK\x01\x02" or any(odd):
            raise ValueError("an entry of its directory is not as torch.save writes it")
        begin = at + _ENTRY.size
        name_end = begin + fields[10]
        extra_end = name_end + fields[11]
        name = directory[begin:name_end].decode()
        # Two readers could take different ones of them.
        if name in entries:
            raise ValueError("two entries have the same name")
        entries[name] = _archive_entry(directory[begin:name_end], fields, directory[name_end:extra_end])
        at = extra_end + fields[12]
    if (at, len(entries)) != (length, count):
        raise ValueError("its directory has another length, or another number of entries")
    return entries


def _place_of_directory(tail: bytes, num_bytes: int) -> tuple[int, int, int]:
    """Return where the directory of the archive that ends with `tail` begins, its length, and its entries."""
    at = num_bytes - _END.size
    signature, *disks, num_here, count, length, offset, comment = end = _END.unpack_from(tail, len(tail) - _END.size)
    is_right = (signature, num_here, comment) == (b"PK\x05\x06", count, 0)
    if len(tail) == _TAIL_BYTES and tail[_END64.size :].startswith(b"PK\x06\x07"):
        _, disk, at, num_disks = _END64_LOCATOR.unpack_from(tail, _END64.size)
        signature64, size, *_, disk64, of_directory, num_here64, count, length, offset = _END64.unpack_from(tail)
        disks += [disk, num_disks - 1, size - 44, disk64, of_directory, num_here64 - count]
        is_same = all(a in (b, 0xFFFF, _MAX_32) for a, b in zip(end[4:7], (count, length, offset), strict=True))
        is_right = is_right and is_same and (signature64, at) == (b"PK\x06\x06", num_bytes - _TAIL_BYTES)
    if not is_right or any(disks) or offset + length != at:
        raise ValueError("the archive does not end as torch.save ends it")
    return offset, length, count


def _archive_entry(name: bytes, fields: tuple[Any, ...], extra: bytes) -> StockEntry:
    packed, unpacked, header = fields[8], fields[9], fields[16]
    wide = _zip64_field(extra)
    # The zip64 field has only those values that do not fit into 32 bits, in this order.
    if len(wide) < 8 * (unpacked, packed, header).count(_MAX_32):
        raise ValueError("an entry of its directory lacks a size of 64 bits")
    unpacked = int.from_bytes(wide[:8], "little") if unpacked == _MAX_32 else unpacked
    wide = wide[8:] if fields[9] == _MAX_32 else wide
    packed = int.from_bytes(wide[:8], "little") if packed == _MAX_32 else packed
    wide = wide[8:] if fields[8] == _MAX_32 else wide
    header = int.from_bytes(wide[:8], "little") if header == _MAX_32 else header
    if packed != unpacked:
        raise ValueError("an entry is compressed")
    return StockEntry(name, fields[4], fields[7], unpacked, header)


def _zip64_field(extra: bytes) -> bytes:
    """Return the zip64 field among the extra fields."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def content_start(read: Read, entry: StockEntry) -> int:
    """Return the byte of the item where the content of `entry` starts."""
    header = read(entry.header, _LOCAL.size + len(entry.name))
    fields = _LOCAL.unpack_from(header)
    is_its = (fields[0], fields[9]) == (b"PK\x03\x04", len(entry.name)) and header[_LOCAL.size :] == entry.name
    if entry.method != 0 or not is_its:
        raise ValueError(f"{entry.name.decode()} in it is compressed, or its header is damaged")
    return int(entry.header + len(header) + fields[10])


def content(read: Read, entry: StockEntry, most_bytes: int = _MAX_DIRECTORY_BYTES) -> bytes:
    """Return the content of `entry`. Raises ValueError if it has more than `most_bytes`."""
    if entry.num_bytes > most_bytes:
        raise ValueError("the description is too long")
    found = read(content_start(read, entry), entry.num_bytes)
    if len(found) != entry.num_bytes:
        raise ValueError("the description is cut off")
    return found


def described_tensor(value: Any) -> tuple[Dtype, str, int, Shape, Shape] | None:
    """Return (dtype, storage, first element, shape, strides) of a plain tensor; None for anything else."""
    if type(value) is not Instance or value.kind not in (_TENSOR, _TENSOR_OF_DTYPE):
        return None
    storage, first, shape, strides, _, hooks, *rest = value.args
    of_dtype = value.kind is _TENSOR_OF_DTYPE
    # Further arguments are the conjugate and negative bits of the tensor, which a plain tensor does not have.
    if type(hooks) is not Instance or hooks.members or len(rest) != of_dtype or type(storage) is not Persistent:
        return None
    word, kind, key, _, _ = storage.id
    if word != "storage" or type(key) is not str or type(kind) is not PickledName:
        return None
    dtype = rest[0] if of_dtype else DTYPES[_STORAGES[kind.name]]
    if type(dtype) is not Dtype or (kind is _UNTYPED) != of_dtype or not _are_ints(first, *shape, *strides):
        return None
    return dtype, key, first, tuple(shape), tuple(strides)


def _are_ints(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
