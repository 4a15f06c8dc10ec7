"""This rank's reads, planned by itself.

Each rank knows what it needs, and plans before any rank reads data, so that a mismatch on one ends the load on all.

A model may have tens of thousands of tensors of a few KiB, and then a load takes longer in Python than on the disk. So
those that one rank reads completely and as they are stored are not planned one by one, but in columns: for each the
load notes where it is in the file and in memory, and the disk's side copies it there. What is not small, not complete
or not in plain memory goes through regions, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.contents import Shape, StoredTensor
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_shards
from torchtitan_lite.checkpoint.format.tensor_table import TensorKind, TensorTable
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.reader import RankReads, Region
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.read_requests import PieceTable
from torchtitan_lite.errors import CheckpointMismatch

SMALL_BYTES = 32 << 10
"""Up to this size, planning and reading a tensor by itself takes longer than one more copy of it."""


@no_collection()
def planned(state: dict[str, Any], folder: CheckpointFolder) -> RankReads:
    """Return the reads of the checkpoint in `folder` into the flat `state`. Any rank.

    Raises `CheckpointMismatch` for a tensor of another shape.
    """
    contents = folder.contents
    small, others = small_tensors(state, contents.table)
    wanted = RankReads(small=small)
    for key, target in others.items():
        if key in contents.objects:
            wanted.objects.append((key, partial(state.__setitem__, key)))
            continue
        stored = contents.tensors[key]
        if tuple(target.shape) != stored.shape:
            found = f"shape {list(stored.shape)} in the checkpoint, {list(target.shape)} expected"
            raise CheckpointMismatch(str(folder.path), f"  {key}: {found}")
        if len(stored.chunks) == 1 and not isinstance(target, DTensor):
            wanted.regions.append(Region(key, stored.chunks[0], stored.chunks[0].offsets, target.detach()))
            continue
        try:
            parts = list(local_shards(key, target))
        except ValueError as error:
            raise CheckpointMismatch(str(folder.path), f"  {error}") from None
        for offsets, memory in parts:
            wanted.regions += overlaps(key, stored, offsets, memory)
    return wanted


def overlaps(key: str, stored: StoredTensor, offsets: Shape, local: torch.Tensor) -> Iterator[Region]:
    """Yield the overlap of each chunk of `stored` with `local`, which is at `offsets` in the whole tensor."""
    sizes = tuple(local.shape)
    for chunk in stored.near(offsets, sizes):
        if chunk.offsets == offsets and chunk.sizes == sizes:
            yield Region(key, chunk, (0,) * len(sizes), local)
            continue
        begins = tuple(map(max, chunk.offsets, offsets))
        lengths = tuple(
            min(stored + n, own + m) - begin
            for stored, n, own, m, begin in zip(chunk.offsets, chunk.sizes, offsets, sizes, begins, strict=True)
        )
        if min(lengths, default=1) <= 0:
            continue
        target = local
        for dim, (begin, own, length) in enumerate(zip(begins, offsets, lengths, strict=True)):
            target = target.narrow(dim, begin - own, length)
        yield Region(
            key, chunk, tuple(begin - stored for begin, stored in zip(begins, chunk.offsets, strict=True)), target
        )


def small_tensors(state: Mapping[str, Any], table: TensorTable) -> tuple[dict[str, PieceTable], dict[str, Any]]:
    """Return where the small tensors of `state` are, by file, and all other entries of `state`.

    The tensors must outlive the pieces: they hold addresses in their memory.
    """
    kinds, places = table.kinds, table.places
    # Complex tensors may be lazy conjugates: the bytes in their memory are not their elements.
    columns: dict[TensorKind, tuple[list[int], list[int]]] = {
        kind: ([], []) for kind in table.places_by_kind if 0 < kind.nbytes <= SMALL_BYTES and not kind.dtype.is_complex
    }
    others: dict[str, Any] = {}
    strided = torch.strided
    for key, target in state.items():
        kind = kinds.get(key)
        if (
            kind in columns
            and type(target) in PLAIN_TENSORS
            and target.dtype is kind.dtype
            and target.is_cpu
            and target.layout is strided
            and target.is_contiguous()
            and target.shape == kind.shape
            and not target.is_neg()
        ):
            begins, addresses = columns[kind]
            begins.append(places[key])
            addresses.append(target.data_ptr())
        else:
            others[key] = target
    tables: dict[str, PieceTable] = {}
    for kind, (begins, addresses) in columns.items():
        if begins:
            tables.setdefault(kind.file, PieceTable()).add(begins, addresses, kind.nbytes)
    return tables, others
