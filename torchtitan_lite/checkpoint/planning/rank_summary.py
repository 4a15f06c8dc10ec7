"""What one rank says of its state when the ranks plan: in pieces, of which each travels once, whichever ranks have it.

A piece is the entries under one name of the state, or one container in it, as JSON. Nothing in it depends on the rank's
place: a shard is the placements of its tensor on a mesh. So the replicas and the shards of a model have equal pieces,
and each stage of a pipeline has one of its own. A rank sends the digests of its pieces and its place in each mesh; of
each piece the coordinator then asks the lowest rank that has it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.shards import Split, local_shards, split_of
from torchtitan_lite.checkpoint.format.structure import Branch, encode_structure
from torchtitan_lite.checkpoint.planning.shared_items import Member

Shape = tuple[int, ...]
Digest = bytes

_OF_A_RANK = re.compile(r"\.rank\d+\.")
_MOST_NAMES = 256
"""Names of a state with a piece each; of one with more, such as bare weights, all entries are one piece."""


class HeldPart(NamedTuple):
    """What a rank has under one name: an object, or its part of a tensor."""

    key: str
    dtype: torch.dtype | None = None
    """None for an object."""
    shape: Shape = ()
    """Of the whole tensor."""
    offsets: Shape = ()
    sizes: Shape = ()

    @property
    def numel(self) -> int:
        """The number of elements in the part; 0 for an object."""
        return 0 if self.dtype is None else math.prod(self.sizes)

    @property
    def is_cut(self) -> bool:
        """Whether it has elements, but not all of the tensor's."""
        return 0 < self.numel < math.prod(self.shape)


def parts_of(flat: State) -> list[HeldPart]:
    """Return what this rank has of `flat`, as the memory has it. Raises ValueError if a placement contradicts that."""
    parts: list[HeldPart] = []
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            dtype, shape = value.dtype, tuple(value.shape)
            shards = local_shards(key, value)
            parts += [HeldPart(key, dtype, shape, offsets, tuple(memory.shape)) for offsets, memory in shards]
        else:
            parts.append(HeldPart(key))
    return parts


class PlanEntry(NamedTuple):
    """The same for the coordinator: a part by its place on a mesh, where it has one."""

    key: str
    dtype: str = ""
    """Empty for an object."""
    shape: Shape = ()
    """Of the whole tensor."""
    is_lowest_ranks: bool = False
    """Whether only the lowest rank that has it may write it."""
    mesh: int = -1
    """The number of its mesh in the rank's outline; -1 if it has none."""
    placements: tuple[Split, ...] = ()
    """Without a mesh the rank has all of the tensor."""


class MeshPlace(NamedTuple):
    """A mesh, and the rank's place in it."""

    shape: Shape
    coordinate: Shape


class Outline(NamedTuple):
    """What a rank sends first. Its size does not grow with the state."""

    sections: tuple[Digest, ...]
    """The pieces with its entries, in order."""
    root: Digest
    """The piece with the names of the state."""
    containers: tuple[Digest, ...]
    """The piece of each of these names: the containers under it."""
    places: tuple[Shape, ...]
    """The rank's coordinate in each of its meshes."""


@dataclass(frozen=True)
class Outlined:
    """The outline of a rank's state, and its pieces."""

    outline: Outline
    pieces: Mapping[Digest, bytes]
    sections: Sequence[range]
    """The numbers of the parts in each section."""

    def of(self, digests: Collection[Digest]) -> dict[Digest, bytes]:
        """Return the pieces with these digests."""
        return {digest: self.pieces[digest] for digest in digests}


def entries_of(
    parts: Sequence[HeldPart], is_same: Callable[[str], bool], flat: State
) -> tuple[list[PlanEntry], list[MeshPlace]]:
    """Return an entry for each of the `parts` of the state `flat`, and the meshes that these name.

    Only the lowest rank that has it may write a tensor of which `is_same` does not say that all ranks have the same.
    """
    meshes: dict[Any, int] = {}
    entries = [_plan_entry(part, is_same, flat, meshes) for part in parts]
    return entries, [MeshPlace(tuple(mesh.shape), tuple(mesh.get_coordinate() or ())) for mesh in meshes]


def outlined(entries: Sequence[PlanEntry], meshes: Sequence[MeshPlace], structure: Branch) -> Outlined:
    """Return the outline of a rank with these `entries`, whose state has the containers of `structure`."""
    pieces: dict[Digest, bytes] = {}

    def add(document: Any) -> Digest:
        text = json.dumps(document, separators=(",", ":")).encode()
        digest = xxhash.xxh3_128_digest(text)
        pieces[digest] = text
        return digest

    ranges = _by_name([entry.key for entry in entries])
    sections = []
    for numbers in ranges:
        of_section = entries[numbers.start : numbers.stop]
        used = {entry.mesh for entry in of_section}
        shapes = {number: mesh.shape for number, mesh in enumerate(meshes) if number in used}
        sections.append(add({"meshes": shapes, "entries": [_shortened_entry(entry) for entry in of_section]}))
    root = encode_structure(structure)
    containers: tuple[Digest, ...] = ()
    if len(structure.children) <= _MOST_NAMES:
        children = root.pop("children", None) or [None] * len(structure.children)
        containers = tuple(add(child) for child in children)
    places = tuple(mesh.coordinate for mesh in meshes)
    return Outlined(Outline(tuple(sections), add(root), containers, places), pieces, ranges)


def section_of(text: bytes) -> tuple[list[PlanEntry], dict[int, Shape]]:
    """Return the entries in the piece `text`, and the shapes of their meshes by number."""
    document = json.loads(text)
    entries = [_decoded(*map(_tuples, entry)) for entry in document["entries"]]
    return entries, {int(number): tuple(shape) for number, shape in document["meshes"].items()}


def _decoded(*fields: Any) -> PlanEntry:
    entry = PlanEntry(*fields)
    return entry._replace(placements=tuple(Split(*each) for each in entry.placements)) if entry.placements else entry


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _by_name(keys: Sequence[str]) -> list[range]:
    """Return the numbers of `keys` in ranges of which each begins with the same name.

    Names with the number of a rank in them are ranges of their own: other ranks have others there.
    """

    def name(key: str) -> tuple[str, bool]:
        return key.partition(".")[0], _OF_A_RANK.search(f".{key}.") is not None

    lengths = [len([*of_name]) for _, of_name in groupby(keys, name)]
    if len(lengths) > _MOST_NAMES:
        lengths = [len(keys)]
    ranges, begin = [], 0
    for length in lengths:
        ranges.append(range(begin, begin + length))
        begin += length
    return ranges


def _shortened_entry(entry: PlanEntry) -> tuple[Any, ...]:
    """Return the fields of `entry` without those at the end that say nothing."""
    if not entry.dtype:
        return entry[:1]
    return entry[:4] if entry.mesh < 0 else entry


def _plan_entry(part: HeldPart, is_same: Callable[[str], bool], flat: State, meshes: dict[Any, int]) -> PlanEntry:
    if part.dtype is None:
        return PlanEntry(part.key)
    value = flat.get(part.key)
    entry = PlanEntry(part.key, dtype_name(part.dtype), part.shape, not is_same(part.key))
    if isinstance(value, DTensor):
        mesh = meshes.setdefault(value.device_mesh, len(meshes))
        return entry._replace(mesh=mesh, placements=tuple(map(split_of, value.placements)))
    return entry


# What the coordinator says to each rank about its part of the joint plan.


class PlanAnswer(NamedTuple):
    """What the coordinator answers to a rank."""

    sections: tuple[bytes, ...]
    """A packed `SectionAnswer` for each of the rank's sections."""
    kept: bytes
    """The numbers of those of its decided entries that it writes, 4 bytes each."""
    members: list[Member] = []  # noqa: RUF012  # never changed
    num_groups: int = 0
    contradiction: str = ""


class SectionAnswer(NamedTuple):
    """What each rank that has a section needs to know of it."""

    first: int
    """The number of its first entry among those of all sections: what a rank writes lies in its file in this order."""
    is_decided: bytes
    """For each entry 1 if the coordinator decides who writes it; a rank writes what it has of the others."""
    patterns: list[int]
    """For each entry the number of the pattern of those that share it, or -1."""
