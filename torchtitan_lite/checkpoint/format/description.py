"""What a checkpoint says of its tensors: made once for a plan, written with every save.

Every rank's file is laid out by dtypes and shapes alone, so the coordinator knows where each chunk
will lie as soon as the ranks agreed who writes what, and nothing about tensors has to travel with a
save. Objects may be longer than the last time: where they lie is told with each save, and if it is
where it was, DCP's metadata is the bytes that it was.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.file_image import FileLayout
from torchtitan_lite.checkpoint.format.structure import Branch, encode
from torchtitan_lite.store.manifest import Table

DCP_VERSION = "1.0.0"
"""What DCP's own writer puts into `Metadata.version`."""


@dataclass(frozen=True)
class PlacedObject:
    """An object of a checkpoint, and where its item lies."""

    key: str
    file: str
    at: int
    num_bytes: int
    plain: Any = None
    """It as JSON can hold it; None where it cannot, or is None."""
    is_plain: bool = True


@dataclass(frozen=True)
class PlannedFile:
    """A rank's file: which chunks lie in it, and where."""

    name: str
    items: Sequence[WriteItem]
    layout: FileLayout


class Description:
    """What `metadata`, which names every tensor and object, becomes with `files` and the state's `structure`."""

    def __init__(self, metadata: Metadata, files: Sequence[PlannedFile], structure: Branch) -> None:
        self.of_dcp = dataclasses.replace(metadata, storage_data={}, version=DCP_VERSION)
        """DCP's, with the places of tensors and not those of objects."""
        tensors: dict[str, dict[str, Any]] = {}
        for file in files:
            for item, place in zip(file.items, file.layout.places, strict=True):
                self.of_dcp.storage_data[item.index] = _StorageInfo(file.name, place.item_at, place.item_bytes)
                self._add_chunk(tensors, item, [file.name, place.data_at])
        self.tensors = Table(tensors)
        self.structure = Table({"root": encode(structure)})
        """The manifest's tables."""
        self._objects: tuple[tuple[str, str, int, int], ...] | None = None
        self._pickled = b""

    def objects(self, placed: Sequence[PlacedObject]) -> Table:
        """The manifest's table of the objects of a save."""
        return Table({each.key: _value_of(each) for each in placed})

    def metadata(self, placed: Sequence[PlacedObject]) -> bytes:
        """DCP's metadata, pickled, of a save whose objects are `placed`."""
        where = tuple((each.key, each.file, each.at, each.num_bytes) for each in placed)
        if where != self._objects:
            places = {MetadataIndex(key): _StorageInfo(file, at, size) for key, file, at, size in where}
            whole = dataclasses.replace(self.of_dcp, storage_data=self.of_dcp.storage_data | places)
            self._objects, self._pickled = where, pickle.dumps(whole)
        return self._pickled

    def _add_chunk(self, tensors: dict[str, dict[str, Any]], item: WriteItem, where: list[Any]) -> None:
        assert item.tensor_data is not None
        data, key = item.tensor_data, item.index.fqn
        if key not in tensors:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "shape": list(data.size), "chunks": []}
        tensors[key]["chunks"].append([*where, list(data.chunk.offsets), list(data.chunk.sizes)])


def _value_of(placed: PlacedObject) -> dict[str, Any]:
    return {"value": placed.plain} if placed.is_plain else {"item": [placed.file, placed.at, placed.num_bytes]}
