"""The entries that only this rank has, by their names: the state of its random generators, and what `PerRank` holds.

From `rank_records.FROM_RANKS` ranks on they are in the record of the rank, at the end of its file, and no other rank
plans, describes or reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.description import PlacedObject, table_of_objects
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.structure import Branch, branch_of, encode_structure, without
from torchtitan_lite.checkpoint.planning.rank_summary import HeldPart
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Table
from torchtitan_lite.store.rank_records import RankRecord


@dataclass(frozen=True)
class OwnEntries:
    """What is in the record of a rank, for every save of a plan."""

    rank: int
    tensors: Table
    structure: Table
    objects: Collection[str]
    """The keys of the objects."""

    @property
    def file_name(self) -> str:
        """The name of the record."""
        return layout.record_file(self.rank)

    def record(self, file: FileRecord, objects: Sequence[PlacedObject]) -> RankRecord:
        """Return the record of a rank that wrote `file` and, in it, `objects`."""
        own = [placed for placed in objects if placed.key in self.objects]
        return RankRecord(file.blocks, table_of_objects(own), self.tensors, self.structure)

    def without(self, objects: Sequence[PlacedObject]) -> list[PlacedObject]:
        """Return those of `objects` that are not in the record."""
        return [placed for placed in objects if placed.key not in self.objects]


@dataclass(frozen=True)
class Divided:
    """The parts and containers of a rank: those that the ranks plan together, and its own."""

    joint: list[HeldPart]
    structure: Branch
    own: list[HeldPart]
    own_structure: Branch

    def entries(self, rank: int, parts: Sequence[HeldPart], placed: FileLayout) -> OwnEntries:
        """Return the entries of the rank that writes `parts`, of which its own tensors are the last, as `placed`."""
        own = [part for part in self.own if part.dtype is not None]
        places = placed.places[len(parts) - len(own) :]
        tensors = {
            part.key: _table_entry(part, layout.data_file(rank, 0), place.data_at)
            for part, place in zip(own, places, strict=True)
        }
        objects = {part.key for part in self.own if part.dtype is None}
        return OwnEntries(rank, Table(tensors), Table({"root": encode_structure(self.own_structure)}), objects)


def divided(parts: Sequence[HeldPart], flat: State, structure: Branch, states: Collection[str], rank: int) -> Divided:
    """Divide the `parts` of this `rank`: its own are below its number in one of the `states`, and whole."""
    name = f"rank{rank}"
    # Another state may have a name that begins like the entry of a rank.
    names = [*map(str, structure.keys)]
    roots = {
        key: child
        for key, child in zip(structure.keys, structure.children, strict=True)
        if key in states and child is not None and name in child.keys
        if not any(each.startswith(f"{key}.rank") for each in names)
    }
    below = tuple(f"{key}.{name}." for key in roots)
    is_own = [f"{part.key}.".startswith(below) for part in parts]
    own = [part for part, its in zip(parts, is_own, strict=True) if its]
    if any(isinstance(flat[part.key], DTensor) for part in own):
        return Divided([*parts], structure, [], branch_of(structure.kind, [], []))
    rest = {key: without(child, lambda each: each == name) for key, child in roots.items()}
    children = [rest.get(key, child) for key, child in zip(structure.keys, structure.children, strict=True)]
    return Divided(
        [part for part, its in zip(parts, is_own, strict=True) if not its],
        structure._replace(children=tuple(children)),
        own,
        branch_of(structure.kind, [*roots], [without(child, lambda each: each != name) for child in roots.values()]),
    )


def _table_entry(part: HeldPart, file: str, at: int) -> dict[str, Any]:
    sizes = list(part.sizes)
    return {"dtype": dtype_name(part.dtype), "shape": list(part.shape), "chunks": [[file, at, [0] * len(sizes), sizes]]}
