"""The description of a checkpoint: the manifest's tables and DCP's metadata, made once for a plan.

The layout of every rank's file follows from dtypes and shapes alone, so the coordinator knows the place
of each chunk as soon as the ranks have agreed who writes what, and a save sends nothing about tensors.
Objects may grow from save to save: every save reports their places, and while these stay the same,
the bytes of DCP's metadata are reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.chunk_runs import format_version, with_runs
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.metadata_file import metadata_bytes
from torchtitan_lite.checkpoint.format.structure import Branch, encode
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.manifest import Table
from torchtitan_lite.torch_private import storage_info

DCP_VERSION = "1.0.0"
"""The `Metadata.version` that DCP's own writer sets."""


@dataclass(frozen=True)
class PlacedObject:
    """An object of a checkpoint and the place of its item."""

    key: str
    file: str
    at: int
    num_bytes: int
    plain: Any = None
    """The object in the form that JSON can hold; None if JSON cannot hold it, or if the object is None."""
    is_plain: bool = True
    """Whether JSON can hold the object."""


@dataclass(frozen=True)
class PlannedFile:
    """A rank's file: its chunks and their places."""

    name: str
    items: Sequence[WriteItem]
    layout: FileLayout


class PickledMetadata(NamedTuple):
    """DCP's metadata as its file holds it."""

    data: bytes
    record: FileRecord


class Description:
    """The description of a plan, made from DCP's `metadata`, the ranks' `files` and the `structure` of the state."""

    def __init__(self, metadata: Metadata, files: Sequence[PlannedFile], structure: Branch) -> None:
        self.of_dcp = dataclasses.replace(metadata, storage_data={}, version=DCP_VERSION)
        """DCP's metadata with the places of tensors; `metadata` adds those of objects."""
        tensors: dict[str, dict[str, Any]] = {}
        of_item = storage_info()
        for file in files:
            for item, place in zip(file.items, file.layout.places, strict=True):
                self.of_dcp.storage_data[item.index] = of_item(file.name, place.item_at, place.item_bytes)
                self._add_chunk(tensors, item, [file.name, place.data_at])
        # Also in the manifest, because DCP's `.metadata` is a pickle: so a load unpickles nothing, and knows before it
        # allocates memory whether the files can hold the tensors.
        self.tensors = Table(with_runs(tensors))
        # DCP's flat names stay, because its tools read them, but they turn all keys into strings and lose empty
        # containers.
        self.structure = Table({"root": encode(structure)})
        """The manifest's tables."""
        self.format_version = format_version(self.tensors)
        """The version of the format that they need."""
        self._objects: tuple[tuple[str, str, int, int], ...] | None = None
        self._metadata = PickledMetadata(b"", FileRecord.of(b""))

    def objects(self, placed: Sequence[PlacedObject]) -> Table:
        """Return the manifest's table of the objects of a save."""
        return table_of_objects(placed)

    def metadata(self, placed: Sequence[PlacedObject]) -> PickledMetadata:
        """Return DCP's metadata of a save whose objects are `placed`: what it was, if these are where they were."""
        where = tuple((each.key, each.file, each.at, each.num_bytes) for each in placed)
        if where != self._objects:
            of_item = storage_info()
            places = {MetadataIndex(key): of_item(file, at, size) for key, file, at, size in where}
            whole = dataclasses.replace(self.of_dcp, storage_data=self.of_dcp.storage_data | places)
            pickled = metadata_bytes(whole)
            self._objects, self._metadata = where, PickledMetadata(pickled, FileRecord.of(pickled))
        return self._metadata

    def _add_chunk(self, tensors: dict[str, dict[str, Any]], item: WriteItem, where: list[Any]) -> None:
        assert item.tensor_data is not None
        data, key = item.tensor_data, item.index.fqn
        if key not in tensors:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "shape": list(data.size), "chunks": []}
        tensors[key]["chunks"].append([*where, list(data.chunk.offsets), list(data.chunk.sizes)])


def table_of_objects(placed: Sequence[PlacedObject]) -> Table:
    """Return the manifest's table of `placed`, which may be those of one rank."""
    # The ranks' files have these objects, too, for DCP. From here an optimizer's thousands of settings are one read.
    return Table({each.key: _value_of(each) for each in placed})


def _value_of(placed: PlacedObject) -> dict[str, Any]:
    return {"value": placed.plain} if placed.is_plain else {"item": [placed.file, placed.at, placed.num_bytes]}
