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
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.format.torch_item import tensor_frame
from torchtitan_lite.torch_private import storage_info

DCP_VERSION = "1.0.0"
"""The `Metadata.version` that DCP's own writer sets."""

MOST_ENTRIES = 50_000
"""Tensors and chunks of which the file is made with a save: those in runs take about 20 us and 150 bytes each, that is
a second and 7 MB; whole tensors half of the time."""

PlacedItem = tuple[str, str, int, int]
"""The key of an object, and its item: file, first byte, number of bytes."""

_OLDEST = 5
"""The fields of `TensorProperties` in torch 2.11: dtype, layout, requires_grad, memory format, pin_memory."""
_PART_BYTES = 1 << 17
_STREAMED = ("state_dict_metadata", "planner_data", "storage_data")
_BEGIN = pickle.PROTO + b"\x02"


def metadata_head(
    tensors: Mapping[str, StoredTensor], objects: Iterable[str], paths: Mapping[str, Path]
) -> Iterator[bytes]:
    """Yield the file up to the places of `objects`: it is the same as long as nothing but these places changes.

    `tensors` are those of `torch_contents`; `paths` has the path of each key in the nested state. The order of the
    `objects` makes no difference.
    """
    table = TensorTable.of(tensors)
    pickles = _Pickles(table.dtypes)
    of, an_object = pickles.of, pickles.of(BytesStorageMetadata())
    yield _BEGIN + of(Metadata) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
    # Only to be there: the last of the fields is the version again, and counts.
    yield of("version") + pickles.common
    yield of("state_dict_metadata") + pickle.EMPTY_DICT
    yield from _mapping_entries(_tensor_descriptions(table, pickles))
    yield from _mapping_entries(of(key) + an_object for key in sorted(objects))
    yield of("planner_data") + pickle.EMPTY_DICT
    yield from _mapping_entries(of(key) + of(path) for key, path in paths.items())
    yield of("storage_data") + pickle.EMPTY_DICT
    yield from _mapping_entries(place for key in table for place in pickles.places(key, table[key]))


def metadata_tail(objects: Iterable[PlacedItem]) -> Iterator[bytes]:
    """Yield the rest of the file, with the places of `objects`."""
    of, of_item = _Pickles().of, storage_info()
    yield from _mapping_entries(of(MetadataIndex(key)) + of(of_item(*item)) for key, *item in sorted(objects))
    others = Metadata({}, version=DCP_VERSION)
    for field in dataclasses.fields(Metadata):
        if field.name not in _STREAMED:
            yield of(field.name) + of(getattr(others, field.name))
    yield pickle.SETITEMS + pickle.BUILD + pickle.STOP


class _Pickles:
    """Pickles of parts of the file: what many of them name is at its beginning, in `common`, and has a number there.

    They remember nothing else, so that each can be put anywhere.
    """

    def __init__(self, dtypes: Iterable[torch.dtype] = ()) -> None:
        self._properties = {dtype: TensorProperties(dtype=dtype) for dtype in dtypes}
        nothing = torch.Size(())
        tensor = TensorStorageMetadata(TensorProperties(), nothing, [ChunkStorageMetadata(nothing, nothing)])
        place = MetadataIndex("", nothing, 0), storage_info()("", 0, 0)
        self._buffer = io.BytesIO()
        self._pickler = _pickler(self._buffer, 2)
        self.common = self._dumped([tensor, BytesStorageMetadata(), place, *self._properties.values()])
        self._pickler.fast = True

    def of(self, value: Any) -> bytes:
        """Return the pickle of `value`, without its begin and its end."""
        if type(value) is str:
            text = value.encode("utf-8", "surrogatepass")
            return pickle.BINUNICODE + len(text).to_bytes(4, "little") + text
        return self._dumped(value)

    def description(self, tensor: StoredTensor) -> bytes:
        """Return DCP's description of `tensor`."""
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks]
        return self.of(TensorStorageMetadata(self._properties[tensor.dtype], torch.Size(tensor.shape), chunks))

    def places(self, key: str, tensor: StoredTensor) -> Iterator[bytes]:
        """Yield the index and the place of each chunk of `tensor`."""
        for number, chunk in enumerate(tensor.chunks):
            frame = tensor_frame(tensor.dtype, chunk.sizes)
            assert chunk.at is not None, "the table of a manifest says where elements begin"
            num_bytes = len(frame.head) + chunk.numel * tensor.dtype.itemsize + len(frame.tail)
            item = storage_info()(chunk.file, chunk.at - len(frame.head), num_bytes)
            yield self.of(MetadataIndex(key, torch.Size(chunk.offsets), number)) + self.of(item)

    def _dumped(self, value: Any) -> bytes:
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[len(_BEGIN) : -len(pickle.STOP)]


def _mapping_entries(pairs: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what adds `pairs`, each a key and its value, to the mapping that was opened last."""
    part, num_bytes = [pickle.MARK], 0
    for pair in pairs:
        part.append(pair)
        num_bytes += len(pair)
        # A tensor may have a chunk on each of thousands of ranks.
        if num_bytes > _PART_BYTES:
            yield b"".join(part) + pickle.SETITEMS
            part, num_bytes = [pickle.MARK], 0
    if num_bytes:
        yield b"".join(part) + pickle.SETITEMS


def _tensor_descriptions(table: TensorTable, pickles: _Pickles) -> Iterator[bytes]:
    of_kind = {kind: pickles.description(kind.tensor(0)) for kind in table.places_by_kind}
    for key in table:
        found = table.kinds.get(key)
        yield pickles.of(key) + (pickles.description(table[key]) if found is None else of_kind[found])


def _pickler(buffer: io.BytesIO, protocol: int) -> pickle.Pickler:
    pickler = pickle.Pickler(buffer, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduced}
    return pickler


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what Python's own pickling of `properties` is made of, with the first fields of the state only."""
    state = properties.__getstate__()  # type: ignore[no-untyped-call]  # untyped in torch
    return copyreg.__newobj__, (TensorProperties,), state[:_OLDEST]  # type: ignore[attr-defined]  # not in the stubs
