"""The description of a checkpoint: the manifest's tables and DCP's metadata, made once for a plan.

The layout of every rank's file follows from dtypes and shapes alone, so the coordinator knows the place of each chunk
as soon as the ranks have agreed who writes what, and a save sends nothing about tensors. Objects may grow from save to
save: every save reports their places, and the bytes of DCP's metadata before these are reused. Loads read the
manifest's tables: `.metadata` is a pickle, and does not say before memory is allocated whether the files can hold what
it describes. DCP's own tools read `.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchtitan_lite.checkpoint.format.metadata_file import MOST_ENTRIES, PlacedItem, metadata_head, metadata_tail
from torchtitan_lite.checkpoint.format.structure import (
    Branch,
    encode_structure,
    paths_of,
)
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.manifest import Table


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
    is_typed: bool = False
    """Whether its item holds the document of `plain_value` in place of the object."""


class Description:
    """The description of a plan: the entries of its `tensors`, the keys of its `objects`, and its `structure`.

    Raises ValueError unless the structure has these keys and no others.
    """

    def __init__(self, tensors: Mapping[str, dict[str, Any]], objects: Sequence[str], structure: Branch) -> None:
        # Also in the manifest, because DCP's `.metadata` is a pickle: so a load unpickles nothing, and knows before it
        # allocates memory whether the files can hold the tensors.
        self.tensors = Table(tensors)
        # DCP's flat names stay, because its tools read them, but they turn all keys into strings and lose empty
        # containers.
        self.structure = Table({"root": encode_structure(structure)})
        """The manifest's tables."""
        self._objects = objects
        self._where: tuple[PlacedItem, ...] | None = None
        self._metadata = b"", FileRecord.of(b"")
        self._paths = paths_of(structure, tensors=tensors)
        if lost := self._paths.keys() ^ {*tensors, *objects}:
            raise ValueError(f"no rank writes {min(lost)}, which a rank has in its state")

    def has_metadata(self, policy: str) -> bool:
        """Return whether a save under this `policy`, as `checkpoint.dcp_metadata` has it, writes DCP's metadata."""
        return policy == "always" or (policy == "auto" and self._num_entries <= MOST_ENTRIES)

    def metadata(self, placed: Sequence[PlacedObject]) -> tuple[bytes, FileRecord]:
        """Return DCP's metadata of a save whose objects are `placed`, and the record of its file.

        They are what they were, if these are where they were.
        """
        where = tuple((each.key, each.file, each.at, each.num_bytes) for each in placed)
        if where != self._where:
            whole = self._head + b"".join(metadata_tail(where))
            self._where, self._metadata = where, (whole, FileRecord.of(whole))
        return self._metadata

    @cached_property
    def _num_entries(self) -> int:
        counts: list[list[int]] = [
            [run[0] for run in entry["runs"]] if "runs" in entry else [len(entry["chunks"])]
            for entry in self.tensors.values()
        ]
        return len(counts) + sum(map(sum, counts))

    @cached_property
    def _head(self) -> bytes:
        tensors = TensorTable.parse(Table.of_text(self.tensors.text, ""), DTYPES)
        return b"".join(metadata_head(tensors, self._objects, self._paths))


def table_of_objects(placed: Sequence[PlacedObject], *, with_places: bool = False) -> Table:
    """Return the manifest's table of `placed`, maybe those of one rank; DCP's metadata follows `with_places`."""
    # The ranks' files have these objects, too, for DCP. From here an optimizer's thousands of settings are one read.
    return Table({each.key: _value_of(each, with_places) for each in placed})


def _value_of(placed: PlacedObject, with_places: bool) -> dict[str, Any]:
    value = {"value": placed.plain} if placed.is_plain else {}
    item = {"item": [placed.file, placed.at, placed.num_bytes]} | ({"typed": True} if placed.is_typed else {})
    return value | item if with_places else value or item
