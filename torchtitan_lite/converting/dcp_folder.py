"""A new checkpoint folder: the files of tensors, DCP's metadata, and our manifest where one is wanted.

The bytes go into the files in the order of the tensors, cut into files of equal size; a tensor on a border is cut
between two rows. Elements are row-major, whatever they were in the checkpoint that they come from. Objects are all in
the first file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.found_runs import with_runs
from torchtitan_lite.checkpoint.format.metadata_file import PlacedItem, metadata_head, metadata_tail
from torchtitan_lite.checkpoint.format.structure import Path as KeyPath
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.format.torch_item import OBJECT_GRAIN, object_item
from torchtitan_lite.converting.streamed_file import Advance, NewTensor, Part, read_back, write_new
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError, TorchtitanLiteError
from torchtitan_lite.examining.tensor_stream import Cut, TensorStream, number_of
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Table


class NewObject(NamedTuple):
    """An object of the new checkpoint."""

    item: bytes
    """It as `torch.save` writes it."""
    entry: Mapping[str, Any]
    """What our manifest has of it: its value, or whether the item holds a document of `plain_value` in its place."""

    @classmethod
    def of(cls, value: Any) -> NewObject:
        """Return `value`, of the types that `plain_value` encodes, as an object."""
        document, is_typed = plain_value.encoded(value)
        return cls(object_item(document if is_typed else value), {"value": document})


class NewState(NamedTuple):
    """What a new checkpoint has in it."""

    tensors: Mapping[str, NewTensor]
    objects: Mapping[str, NewObject]
    paths: Mapping[str, KeyPath]
    """The place of each key in the nested state; DCP calls this the planner data."""


class Written(NamedTuple):
    """The files of a new checkpoint, and the tables of our manifest for them."""

    files: dict[str, FileRecord]
    tensors: dict[str, Any]
    objects: dict[str, Any]


def write_checkpoint(folder: Path, state: NewState, num_files: int, stream: TensorStream, advance: Advance) -> Written:
    """Write `state` into `num_files` files in `folder`, with DCP's metadata, and check them.

    Raises ConfigError if the tensors cannot be cut into that many.
    """
    files = cut_into_files(state.tensors, num_files)
    placed: list[PlacedItem] = []
    written = Written({}, {}, {})
    for key, tensor in state.tensors.items():
        written.tensors[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "chunks": []}
    for number, pieces in enumerate(files):
        objects = state.objects if number == 0 else {}
        name = layout.data_file(number, 0)
        parts = _file_parts(name, pieces, objects, written, placed)
        written.files[name] = write_new(folder / name, parts, stream, advance)
    tables = with_runs(written.tensors)
    metadata = _metadata(state, tables, placed)
    DISK.write_file(folder / layout.METADATA, metadata)
    for name, record in written.files.items():
        read_back(folder / name, record, stream.reader, advance)
    written.files[layout.METADATA] = FileRecord.of(metadata)
    _check_dcp_folder(folder, state)
    return written._replace(tensors=tables)


def cut_into_files(tensors: Mapping[str, NewTensor], num_files: int) -> list[dict[str, NewTensor]]:
    """Return the cuts in each of `num_files` files, in the order of `tensors` and of equal size up to a row.

    Each file gets at least one row that has elements. Raises ConfigError if there are fewer of these than files.
    """
    total = sum(tensor.num_bytes for tensor in tensors.values())
    left = most_files(tensors)
    if left < num_files:
        raise ConfigError(f"the tensors are too small for {num_files} files: ask for at most {left}")
    files: list[dict[str, NewTensor]] = [{} for _ in range(num_files)]
    at, number, is_filled = 0, 0, False
    for key, tensor in tensors.items():
        dim, rows = _cut_dim_and_rows(tensor)
        row_bytes = tensor.num_bytes // rows
        begin = 0
        while begin < rows:
            end = rows
            if row_bytes and (num_after := num_files - number - 1):
                up_to_border = round((total * (number + 1) // num_files - at) / row_bytes)
                end = begin + min(max(up_to_border, 0 if is_filled else 1), left - num_after, rows - begin)
            if end > begin:
                files[number][key] = tensor._replace(within=_cut(tensor.shape, dim, begin, end))
            if row_bytes and end > begin:
                at, left, is_filled = at + (end - begin) * row_bytes, left - (end - begin), True
            begin = end
            if begin < rows:
                number, is_filled = number + 1, False
    return files


def most_files(tensors: Mapping[str, NewTensor]) -> int:
    """Return the largest number of files that `tensors` can be cut into; at least 1."""
    return max(1, sum(_cut_dim_and_rows(tensor)[1] for tensor in tensors.values() if tensor.num_bytes))


def _cut_dim_and_rows(tensor: NewTensor) -> tuple[int | None, int]:
    """Return the dimension along which `tensor` is cut, None if it cannot be, and the number of its rows."""
    dim = next((d for d, size in enumerate(tensor.shape) if size > 1), None)
    return dim, 1 if dim is None else tensor.shape[dim]


def _cut(shape: tuple[int, ...], dim: int | None, begin: int, end: int) -> Cut:
    if dim is None:
        return Cut.whole(shape)
    offsets = (*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1))
    sizes = (*shape[:dim], end - begin, *shape[dim + 1 :])
    return Cut(number_of(offsets, shape) if begin < shape[dim] else 0, offsets, sizes)


def _file_parts(
    name: str,
    cuts: Mapping[str, NewTensor],
    objects: Mapping[str, NewObject],
    written: Written,
    placed: list[PlacedItem],
) -> list[Part]:
    """Return the parts of the file `name`, and add their places to `written` and `placed`."""
    layout_of_file = FileLayout([(DTYPES[tensor.dtype], tensor.cut.sizes) for tensor in cuts.values()])
    parts: list[Part] = []
    for number, ((key, tensor), place) in enumerate(zip(cuts.items(), layout_of_file.places, strict=True)):
        written.tensors[key]["chunks"].append([name, place.data_at, list(tensor.cut.offsets), list(tensor.cut.sizes)])
        parts.append(layout_of_file.frames[number].head)
        if tensor.num_bytes:
            parts.append(tensor)
        parts.append(layout_of_file.tails[number])
    at = layout_of_file.end
    for key, stored in objects.items():
        placed.append((key, name, at, len(stored.item)))
        of_item = {} if "value" in stored.entry else {"item": [name, at, len(stored.item)]}
        written.objects[key] = {**of_item, **stored.entry}
        item = stored.item + bytes(-len(stored.item) % OBJECT_GRAIN)
        parts.append(item)
        at += len(item)
    return parts


def _metadata(state: NewState, tensors: Mapping[str, Any], placed: Sequence[PlacedItem]) -> bytes:
    table = TensorTable.parse(Table(tensors), DTYPES)
    return b"".join([*metadata_head(table, state.objects, state.paths), *metadata_tail(placed)])


def _check_dcp_folder(folder: Path, state: NewState) -> None:
    """Raise unless DCP's own reader finds the keys, dtypes and shapes of `state` in the metadata."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: (dtype_name(each.properties.dtype), tuple(each.size))
        for key, each in found.items()
        if isinstance(each, TensorStorageMetadata)
    }
    expected = {key: (tensor.dtype, tensor.shape) for key, tensor in state.tensors.items()}
    if tensors != expected or found.keys() - tensors.keys() != state.objects.keys():
        raise TorchtitanLiteError(f"{folder.name} was written, but DCP finds other entries in it")
