"""The table of tensors in the manifest of many ranks, made by arithmetic, without an object for each chunk.

It holds for one FSDP group: each rank writes the chunks that it has. Ranks with chunks of the same sizes have files of
the same layout, and tensors of one shape have the same runs, up to the byte at which these begin. Which rank writes a
number that all have makes no difference to any cost, so here they take turns. A test compares the runs with those of
the plan that a save makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scale_simulation.plans import GENERATOR_SHAPE, GENERATORS, Mesh, Planned, Shape, box_of
from torchtitan_lite.checkpoint.format import chunk_runs
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.store import layout

Entries = dict[str, dict[str, Any]]


def is_known(mesh: Mesh) -> bool:
    """Return whether `table_of` holds for this mesh."""
    return mesh.replicate == mesh.tensor == 1


def table_of(tensors: Sequence[Planned], mesh: Mesh) -> Entries:
    """Return the entries of all `tensors`, one FSDP group's, by key."""
    cut = [tensor for tensor in tensors if tensor.kind in ("matrix", "vector")]
    boxes = {shape: [box_of(_of(shape), rank, mesh) for rank in range(mesh.size)] for shape in {t.shape for t in cut}}
    group_of: dict[tuple[Shape, ...], int] = {}
    """Ranks with chunks of the same sizes are a group."""
    groups = [
        group_of.setdefault(tuple(boxes[shape][rank][1] for shape in boxes), len(group_of)) for rank in range(mesh.size)
    ]
    places = [_places(cut, dict(zip(boxes, sizes, strict=True))) for sizes in group_of]
    end = max(max(of_group.values(), default=0) for of_group in places)
    known: dict[tuple[Shape, tuple[int, ...]], list[list[Any]]] = {}
    entries: Entries = {}
    for tensor in cut:
        at = [of_group.get(tensor.fqn, -1) for of_group in places]
        # Two groups whose chunks begin at the same byte can be in one run.
        like = tensor.shape, tuple(map(at.index, at))
        if like not in known:
            known[like] = _runs([(groups[rank], *box) for rank, box in enumerate(boxes[tensor.shape])], like[1])
        runs = [[*run[:2], at[run[2]], *run[3:]] for run in known[like]]
        entries[tensor.fqn] = {"dtype": "float32", "shape": [*tensor.shape], "runs": runs}
    for number, tensor in enumerate(tensor for tensor in tensors if tensor.kind == "number"):
        entries[tensor.fqn] = _whole(number % mesh.size, end, ())
    for rank in range(mesh.size):
        entries |= {f"rng.rank{rank}.{name}": _whole(rank, end, GENERATOR_SHAPE) for name in GENERATORS}
    return entries


def _of(shape: Shape) -> Planned:
    return Planned("", shape, "matrix" if len(shape) > 1 else "vector")


def _places(cut: Sequence[Planned], sizes: dict[Shape, Shape]) -> dict[str, int]:
    """Return where the chunks of `cut` begin in the file of a rank whose chunks have these `sizes`, by key."""
    held = [tensor for tensor in cut if 0 not in sizes[tensor.shape]]
    whole = [tensor for tensor in held if sizes[tensor.shape] == tensor.shape]
    assert not whole, "a rank has all of a tensor"
    places = FileLayout([(torch.float32, sizes[tensor.shape]) for tensor in held]).places
    return {tensor.fqn: place.data_at for tensor, place in zip(held, places, strict=True)}


def _runs(chunks: Sequence[tuple[int, Shape, Shape]], alike: Sequence[int]) -> list[list[Any]]:
    """Return the runs of `chunks`, (group, offsets, sizes) by rank, with the number of a group as place."""
    listed = [
        [layout.data_file(rank, 0), alike[group], [*offsets], [*sizes]]
        for rank, (group, offsets, sizes) in enumerate(chunks)
        if 0 not in sizes
    ]
    encoded = chunk_runs.encode(listed)
    assert encoded is not None, "a tensor of fewer chunks than a run has"
    return encoded


def _whole(rank: int, at: int, shape: Shape) -> dict[str, Any]:
    chunk = [layout.data_file(rank, 0), at, [0] * len(shape), [*shape]]
    return {"dtype": "float32", "shape": [*shape], "chunks": [chunk]}
