"""The tensors of a safetensors file, by its header, which may lie.

The file is 8 bytes with the length of the header, the header as JSON, and the elements. What the format promises is
checked before anything is read: every tensor is inside the file and as long as dtype and shape say, and together they
cover the file once, without gaps. Without torch, and without the format's library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Shape
from torchtitan_lite.checkpoint.format.dtypes import DTYPES, Dtype
from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.errors import CheckpointDamaged

NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64"},
}
"""Our name of each dtype of the format whose elements are whole bytes."""
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_LENGTH_BYTES = 8
_MOST_DIMS = 64
_METADATA = "__metadata__"
_LFS_POINTER = b"version https://git-lfs"


class StoredWeight(NamedTuple):
    """A tensor in a file."""

    dtype: Dtype
    shape: Shape
    at: int
    """The byte of the file where its first element starts."""


def read_header(path: Path) -> dict[str, StoredWeight]:
    """Return the tensors of the file `path`, by name. Raises `CheckpointDamaged`, `CheckpointUnsafe` and OSError."""
    with opened_plain_file(path.resolve()) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, max(_LENGTH_BYTES, len(_LFS_POINTER)), 0)
        if head.startswith(_LFS_POINTER):
            raise CheckpointDamaged(str(path), "it is git's pointer to the weights, without them: run git lfs pull")
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        most = min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES)
        if size < _LENGTH_BYTES or length > most:
            raise CheckpointDamaged(
                str(path),
                f"its header would have {length} bytes, and the file has {size}. Download or copy it again",
            )
        text = os.pread(fd, length, _LENGTH_BYTES)
    try:
        return _header_tensors(_parsed_header(text), _LENGTH_BYTES + length, size)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(str(path), f"its header is not that of a safetensors file: {error!s:.300}") from None


def _parsed_header(text: bytes) -> Mapping[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("it does not begin with a brace")
    document = json.loads(text, object_pairs_hook=_without_repetition)
    if not isinstance(document, dict):
        raise ValueError("expected an object")
    return document


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # Python keeps the last of them, another reader may keep the first.
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _header_tensors(document: Mapping[str, Any], begin: int, size: int) -> dict[str, StoredWeight]:
    """Return the tensors whose elements make up bytes [begin, size) of the file. Raises ValueError if they do not."""
    ranges: list[tuple[int, int, str]] = []
    found: dict[str, StoredWeight] = {}
    for name, entry in document.items():
        if name == _METADATA:
            continue
        dtype, shape, (first, end) = _header_entry(name, entry)
        if end - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{name[:100]} is {dtype} {list(shape)[:8]}, of {math.prod(shape) * dtype.itemsize} bytes, and has "
                f"{end - first}"
            )
        ranges.append((first, end, name))
        found[name] = StoredWeight(dtype, shape, begin + first)
    at = 0
    for first, end, name in sorted(ranges):
        if first != at:
            what = "overlaps the tensor before it" if first < at else "follows a gap"
            raise ValueError(f"{name[:100]} {what}, at byte {first}")
        at = end
    if at != size - begin:
        raise ValueError(
            f"its tensors have {at} bytes, and {size - begin} follow the header. Download or copy the file again"
        )
    return found


def _header_entry(name: str, entry: Any) -> tuple[Dtype, Shape, tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:100]}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in NAMES:
        raise ValueError(f"{name[:100]}: the dtype {dtype!r:.50} is unknown")
    if type(shape) is not list or not _are_sizes(shape) or len(shape) > _MOST_DIMS:
        raise ValueError(f"{name[:100]}: {shape!r:.50} is no shape")
    if type(offsets) is not list or len(offsets) != 2 or not _are_sizes(offsets):
        raise ValueError(f"{name[:100]}: {offsets!r:.50} are no offsets")
    return DTYPES[NAMES[dtype]], tuple(shape), (offsets[0], offsets[1])


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)
