"""Where the parts of a tensor are: which ranks hold which box of it. Coordinator only, pure.

It is computed for all ranks at once, in columns: from the placements and from the ranks' coordinates in their mesh, as
`shards.box_of` does it for one rank. All tensors of one shape that are placed alike share one spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.chunk_runs import Chunk, Shape, StoredTensor, chunk_mismatch, row_major_strides
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.found_runs import Boxes
from torchtitan_lite.checkpoint.format.shards import Split, split_order

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Holders:
    """Ranks that hold a tensor, all placed in one way: on a mesh, or each of them has all of it."""

    ranks: Numbers
    """Ascending."""
    mesh: Shape = ()
    """The sizes of the mesh; empty without one."""
    placements: tuple[Split, ...] = ()
    coordinates: Numbers | None = None
    """A row for each of `ranks`, its coordinate in the mesh; None without a mesh."""


class Spread:
    """The boxes of a tensor of `shape`, and the ranks that hold each of them: those of all `holders`.

    Empty boxes are left out, except that a tensor without elements has one. Raises ValueError unless the boxes cover
    the tensor exactly once.
    """

    def __init__(self, shape: Shape, holders: Sequence[Holders]) -> None:
        self.shape = shape
        boxes = [_boxes(shape, each) for each in holders]
        offsets = np.concatenate([offsets for offsets, _ in boxes])
        sizes = np.concatenate([sizes for _, sizes in boxes])
        ranks = np.concatenate([each.ranks for each in holders])
        of_holders = np.repeat(np.arange(len(holders)), [len(each.ranks) for each in holders])
        if math.prod(shape):
            kept = sizes.all(axis=1)
            offsets, sizes, ranks, of_holders = offsets[kept], sizes[kept], ranks[kept], of_holders[kept]
            place = offsets @ np.array(row_major_strides(shape), dtype=np.int64)
        else:
            # One box, of the whole shape: a load finds it there, however its own ranks divide nothing.
            place, offsets, sizes = np.zeros(len(ranks), dtype=np.int64), offsets * 0, offsets * 0 + np.array(shape)
        order = np.lexsort((ranks, place))
        place = place[order]
        self.ranks: Numbers = ranks[order]
        """The ranks that hold the first box, ascending, then those of the second one, and so on."""
        self.of_holders: Numbers = of_holders[order]
        """For each of `ranks` which of the holders it is one of."""
        self.starts: Numbers = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]])[: len(place)])
        """Where the ranks of each box begin."""
        self.offsets: Numbers = offsets[order][self.starts]
        self.sizes: Numbers = sizes[order][self.starts]
        """Of each box."""
        self.counts: Numbers = np.diff(np.append(self.starts, len(place)))
        """How many ranks hold each box."""
        if finding := self._misfit(sizes[order], is_grid=len(holders) == 1 and bool(holders[0].mesh)):
            raise ValueError(finding)

    @cached_property
    def numels(self) -> Numbers:
        """The number of elements of each box."""
        found: Numbers = self.sizes.prod(axis=1, dtype=np.int64)
        return found

    @cached_property
    def is_cut(self) -> npt.NDArray[np.bool_]:
        """Whether each box has elements, but not all of the tensor's."""
        return (self.numels > 0) & (self.numels < math.prod(self.shape))

    @cached_property
    def is_shared(self) -> npt.NDArray[np.bool_]:
        """Whether several ranks hold each box."""
        return self.counts > 1

    @cached_property
    def largest_shared(self) -> int:
        """The number of elements of the largest box that several ranks hold."""
        return int((self.numels * self.is_shared).max(initial=0))

    @cached_property
    def boxes(self) -> Boxes:
        """The boxes, in whose places runs are found."""
        return Boxes(self.offsets, self.sizes)

    @cached_property
    def kinds(self) -> tuple[list[Shape], Numbers]:
        """The different sizes of boxes, and for each box which of them it has."""
        if len(self.sizes) == 1:
            return [tuple(self.sizes[0].tolist())], np.zeros(1, dtype=np.int64)
        different, of_box = np.unique(self.sizes, axis=0, return_inverse=True)
        return [tuple(sizes) for sizes in different.tolist()], of_box.reshape(-1)

    def _misfit(self, sizes: Numbers, *, is_grid: bool) -> str:
        if not math.prod(self.shape):
            return ""
        if len(sizes) > len(self.sizes) and (sizes != np.repeat(self.sizes, self.counts, axis=0)).any():
            return "its chunks overlap"
        if is_grid and self.numels.sum() == math.prod(self.shape):
            return ""  # Placements make the cells of a grid.
        chunks = [
            Chunk("", 0, tuple(o), tuple(s)) for o, s in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        ]
        return chunk_mismatch(StoredTensor(DTYPES["uint8"], self.shape, chunks))


def _boxes(shape: Shape, holders: Holders) -> tuple[Numbers, Numbers]:
    """Return offsets and sizes of the box of each rank, a row each."""
    count = len(holders.ranks)
    offsets = np.zeros((count, len(shape)), dtype=np.int64)
    sizes = np.empty((count, len(shape)), dtype=np.int64)
    sizes[:] = shape
    if holders.coordinates is None:
        return offsets, sizes
    for dim, whole in enumerate(shape):
        for mesh_dim in split_order(dim, holders.mesh, holders.placements):
            num_rows = -(-sizes[:, dim] // holders.mesh[mesh_dim])
            begin = np.minimum(holders.coordinates[:, mesh_dim] * num_rows, sizes[:, dim])
            offsets[:, dim] += begin
            sizes[:, dim] = np.minimum(num_rows, sizes[:, dim] - begin)
        offsets[sizes[:, dim] == 0, dim] = whole
    return offsets, sizes
