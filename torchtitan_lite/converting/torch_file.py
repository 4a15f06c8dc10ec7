"""A dict of tensors as one file of `torch.save`, written without holding a tensor.

The file is a zip archive with stored entries: a pickle of the dict, in which each tensor refers to an entry, and one
entry for the elements of each tensor, from a multiple of 64 bytes on. As in the items of a checkpoint, the CRC of those
is 0, which torch does not check. `torch.load(weights_only=True)` reads it, also with `mmap=True`.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.storage import UntypedStorage

from torchtitan_lite.checkpoint.format.torch_item import ALIGNMENT
from torchtitan_lite.converting.streamed_file import Advance, Elements, Part, read_back, size_of, write_new
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.torch_private import storage_kind

_LIMIT = 0xFFFFFFFF
_ROOT = "archive/"


class Tensor(NamedTuple):
    """A tensor in the state to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: Elements


def write_state(path: Path, state: Mapping[str, Any], stream: TensorStream, advance: Advance) -> None:
    """Write `state`, nested containers of `Tensor` and plain objects, to the file `path`, and check it."""
    pickled, tensors = _pickled(state)
    archive = _PlannedArchive()
    archive.add("data.pkl", pickled)
    archive.add("byteorder", b"little")
    archive.add("version", b"3\n")
    for number, tensor in enumerate(tensors):
        archive.add_elements(f"data/{number}", tensor.elements)
    record = write_new(path, archive.finished(), stream, advance)
    _check_torch_file(path, state)
    read_back(path, record, stream.reader, advance)


def _check_torch_file(path: Path, state: Mapping[str, Any]) -> None:
    """Raise unless torch loads the same names, shapes and dtypes from the file. Reads no elements."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise TorchtitanLiteError(f"{path.name} was written, but torch does not load it: {error}") from None
    if not _is_same_tree(state, loaded):
        raise TorchtitanLiteError(f"{path.name} was written, but torch loads something else from it")


def _is_same_tree(state: Any, loaded: Any) -> bool:
    if isinstance(state, Tensor):
        is_tensor = isinstance(loaded, torch.Tensor)
        return is_tensor and (loaded.dtype, tuple(loaded.shape)) == (state.dtype, state.shape)
    if isinstance(state, Mapping):
        same = isinstance(loaded, Mapping) and list(state) == list(loaded)
        return same and all(_is_same_tree(value, loaded[key]) for key, value in state.items())
    if isinstance(state, list):
        same = isinstance(loaded, list) and len(state) == len(loaded)
        return same and all(map(_is_same_tree, state, loaded))
    return type(state) is type(loaded)


class _PlannedArchive:
    """A zip archive with stored entries, planned before it is written."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._at = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, content: bytes) -> None:
        self._entry(name, zlib.crc32(content), len(content), aligned=False)
        self._append(content)

    def add_elements(self, name: str, elements: Elements) -> None:
        self._entry(name, 0, elements.num_bytes, aligned=True)
        self._append(elements)

    def finished(self) -> Sequence[Part]:
        """Return the parts of the complete archive."""
        size, at = len(self._directory), self._at
        end = b""
        if at >= _LIMIT or self._count >= 0xFFFF:
            end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, self._count, self._count, size, at)
            end += struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        count = min(self._count, 0xFFFF)
        end += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, min(at, _LIMIT), 0)
        return [*self._parts, bytes(self._directory) + end]

    def _entry(self, name: str, crc: int, num_bytes: int, *, aligned: bool) -> None:
        """Append the header of an entry, and add it to the directory."""
        full = (_ROOT + name).encode()
        sizes = struct.pack("<QQ", num_bytes, num_bytes) if num_bytes >= _LIMIT else b""
        extra = struct.pack("<2sH", b"\1\0", len(sizes)) + sizes if sizes else b""
        if aligned:
            padding = -(self._at + 30 + len(full) + len(extra) + 4) % ALIGNMENT
            extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        size = min(num_bytes, _LIMIT)
        described = struct.pack("<HHHHHIII", 45, 0, 0, 0, 0, crc, size, size)
        at = self._at
        self._append(
            struct.pack("<4s", b"PK\3\4") + described + struct.pack("<HH", len(full), len(extra)) + full + extra
        )
        # The zip64 field has only those values that do not fit into 32 bits, in this order.
        wide = sizes + (struct.pack("<Q", at) if at >= _LIMIT else b"")
        field = struct.pack("<2sH", b"\1\0", len(wide)) + wide if wide else b""
        fixed = struct.pack("<HHHHHII", len(full), len(field), 0, 0, 0, 0, min(at, _LIMIT))
        self._directory += struct.pack("<4sH", b"PK\1\2", 45) + described + fixed + full + field
        self._count += 1

    def _append(self, part: Part) -> None:
        self._parts.append(part)
        self._at += size_of(part)


class _Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Storage(NamedTuple):
    """Stands for the storage of a tensor in the pickle."""

    kind: Any
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Writes a storage as torch.serialization does: a reference to an entry in place of its bytes."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        return None


def _pickled(state: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
    """Return the pickle of `state`, and its tensors in the order of their entries."""
    tensors: list[Tensor] = []
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_with_references(state, tensors))
    return buffer.getvalue(), tensors


def _with_references(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _reference(value, len(tensors) - 1)
    if type(value) is list:
        return [_with_references(item, tensors) for item in value]
    if type(value) is dict:
        return {key: _with_references(item, tensors) for key, item in value.items()}
    return value


def _reference(tensor: Tensor, number: int) -> _Call:
    # The pickled form depends on the dtype: reduce an empty tensor with torch, then insert storage, shape and strides.
    empty = torch.empty(0, dtype=tensor.dtype)
    rebuild, (held, _, _, _, grad, hooks, *rest) = empty.__reduce_ex__(2)  # type: ignore[no-untyped-call]  # untyped in torch
    kind = storage_kind(held)
    numel = torch.Size(tensor.shape).numel()
    storage = _Storage(kind, number, numel * tensor.dtype.itemsize if kind is UntypedStorage else numel)
    strides = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
    return _Call(rebuild, (storage, 0, tensor.shape, strides, grad, hooks, *rest))
