"""The bytes of DCP's `.metadata`, in the oldest form that every supported version of torch writes.

torch 2.15 added strides to the properties of a tensor. It reads properties without them, and the tools of torch 2.11 to
2.14 read no others. Strides say nothing about a checkpoint, so they are left out under every version.

The file follows from the tables of a manifest and the places of the objects. It is made in parts, so that no more of
DCP's objects are in memory than those of one part: its three mappings have an entry for each chunk of each rank.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_lite.checkpoint.format.contents import StoredTensor
from torchtitan_lite.checkpoint.format.structure import Path
from torchtitan_lite.checkpoint.format.torch_item import tensor_frame
from torchtitan_lite.torch_private import storage_info

DCP_VERSION = "1.0.0"
"""The `Metadata.version` that DCP's own writer sets."""

MOST_ENTRIES = 50_000
"""Tensors and chunks of which the file is made with a save: they take about 20 us and 200 bytes each, that is a second
and 10 MB."""

PlacedItem = tuple[str, str, int, int]
"""The key of an object, and its item: file, first byte, number of bytes."""

_OLDEST = 5
"""The fields of `TensorProperties` in torch 2.11: dtype, layout, requires_grad, memory format, pin_memory."""
_PART_CHUNKS = 1000
_STREAMED = ("state_dict_metadata", "planner_data", "storage_data")
_BEGIN = pickle.PROTO + b"\x02"
_DICT = pickle.EMPTY_DICT + pickle.BINPUT + b"\x00"


def metadata_head(
    tensors: Mapping[str, StoredTensor], objects: Iterable[str], paths: Mapping[str, Path]
) -> Iterator[bytes]:
    """Yield the file up to the places of `objects`: it is the same as long as nothing but these places changes.

    `tensors` are those of `torch_contents`; `paths` has the path of each key in the nested state. The order of the
    `objects` makes no difference.
    """
    yield _BEGIN + _bare(Metadata) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
    described: Iterator[tuple[str, Any]] = ((key, _described(tensor)) for key, tensor in tensors.items())
    yield from _opened("state_dict_metadata")
    yield from _entries(described)
    yield from _entries((key, BytesStorageMetadata()) for key in sorted(objects))
    yield from _opened("planner_data")
    yield from _entries((_one(key), tuple(map(_one, path))) for key, path in paths.items())
    yield from _opened("storage_data")
    yield from _entries(place for key, tensor in tensors.items() for place in _places(key, tensor))


def metadata_tail(objects: Iterable[PlacedItem]) -> Iterator[bytes]:
    """Yield the rest of the file, with the places of `objects`."""
    of_item = storage_info()
    yield from _entries(
        (MetadataIndex(_one(key)), of_item(_one(file), at, size)) for key, file, at, size in sorted(objects)
    )
    others = Metadata({}, version=DCP_VERSION)
    for field in dataclasses.fields(Metadata):
        if field.name not in _STREAMED:
            yield _bare(field.name) + _bare(getattr(others, field.name))
    yield pickle.SETITEMS + pickle.BUILD + pickle.STOP


def _one(value: Any) -> Any:
    """Return the one string that equals `value`: what a pickle remembers, it knows by identity."""
    return sys.intern(value) if type(value) is str else value


def _opened(name: str) -> Iterator[bytes]:
    yield _bare(name) + pickle.EMPTY_DICT


def _entries(pairs: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """Yield what adds `pairs` to the mapping that was opened last."""
    part: dict[Any, Any] = {}
    left = _PART_CHUNKS
    for key, value in pairs:
        part[key] = value
        # A tensor may have a chunk on each of thousands of ranks.
        left -= max(1, len(value.chunks)) if isinstance(value, TensorStorageMetadata) else 1
        if left <= 0:
            yield _part(part)
            part, left = {}, _PART_CHUNKS
    if part:
        yield _part(part)


def _part(part: dict[Any, Any]) -> bytes:
    # A pickle of its own, without its begin, its dict and its end. Up to protocol 2, what a pickle remembers has
    # numbers, so that the next one takes the same numbers again, and neither refers to the other.
    return _bare(part).removeprefix(_DICT)


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _places(key: str, tensor: StoredTensor) -> Iterator[tuple[MetadataIndex, Any]]:
    of_item = storage_info()
    for number, chunk in enumerate(tensor.chunks):
        frame = tensor_frame(tensor.dtype, chunk.sizes)
        assert chunk.at is not None, "the table of a manifest says where elements begin"
        num_bytes = len(frame.head) + chunk.numel * tensor.dtype.itemsize + len(frame.tail)
        index = MetadataIndex(_one(key), torch.Size(chunk.offsets), number)
        yield index, of_item(_one(chunk.file), chunk.at - len(frame.head), num_bytes)


def metadata_bytes(metadata: Metadata) -> bytes:
    """Return `metadata`, as another program made it, in that form."""
    return _pickled(metadata, pickle.DEFAULT_PROTOCOL)


def _bare(value: Any) -> bytes:
    """Return the pickle of `value` without its begin and its end."""
    return _pickled(value, 2)[len(_BEGIN) : -len(pickle.STOP)]


def _pickled(value: Any, protocol: int) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduced}
    pickler.dump(value)
    return buffer.getvalue()


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what Python's own pickling of `properties` is made of, with the first fields of the state only."""
    state = properties.__getstate__()  # type: ignore[no-untyped-call]  # untyped in torch
    return copyreg.__newobj__, (TensorProperties,), state[:_OLDEST]  # type: ignore[attr-defined]  # not in the stubs
