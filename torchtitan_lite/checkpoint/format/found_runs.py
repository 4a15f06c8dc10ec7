"""Finds what is regular about the chunks of a tensor: the runs that stand in the manifest in place of them.

They are found in the chunks, whatever made them. A description by mesh and placement would be shorter, but would have
to know every placement that a user brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS
from torchtitan_lite.store import layout

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Rows:
    """The boxes in the order in which those that adjoin along `dim` follow one another."""

    dim: int
    order: Numbers | None
    """None for the order that they have."""
    adjoins: npt.NDArray[np.bool_]
    """For each box but the last whether the next one has the same sizes and adjoins it."""

    def links(self, ranks: Numbers, at: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the step of the rank from each box but the last to the next one, and whether one run could join them.

        There are at least as many runs as boxes that are not joined, and one more. To find them takes longer.
        """
        if self.order is not None:
            ranks, at = ranks[self.order], at[self.order]
        steps: Numbers = ranks[1:] - ranks[:-1]
        return steps, self.adjoins & (at[1:] == at[:-1]) & (steps > 0)

    def runs(self, steps: Numbers, joins: npt.NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
        """Return count, number of the first chunk, step of the rank and dimension of each run."""
        continues = joins[1:] & joins[:-1] & (steps[1:] == steps[:-1])
        ends = np.append(np.flatnonzero(~continues), len(joins) - 1)
        """The last of each row of neighbours with one step."""
        found, first = [], 0
        while first <= len(joins):
            last = first
            if first < len(joins) and joins[first]:
                last = int(ends[np.searchsorted(ends, first)]) + 1
            number = first if self.order is None else int(self.order[first])
            is_run = last > first
            found.append((last - first + 1, number, int(steps[first]) if is_run else 1, self.dim if is_run else 0))
            first = last + 1
        return found


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of the chunks of a tensor: a row each."""

    offsets: Numbers
    sizes: Numbers

    def runs(self, ranks: Numbers, at: Numbers) -> list[list[Any]] | None:
        """Return the runs, in the form that JSON holds, of chunks which begin at byte `at` of the files of `ranks`.

        Return None where a list of the chunks is as short.
        """
        if len(ranks) < LEAST_CHUNKS:
            return None
        along = [(rows, *rows.links(ranks, at)) for rows in self._rows]
        found: list[tuple[int, int, int, int]] = []
        for rows, steps, joins in sorted(along, key=lambda each: -int(each[2].sum())):
            if not found or len(joins) - joins.sum() + 1 < len(found):
                runs = rows.runs(steps, joins)
                found = min(found or runs, runs, key=len)
        if not found or sum(count for count, _, _, _ in found) == len(found):
            return None
        offsets, sizes = self.offsets, self.sizes
        return [
            [count, [int(ranks[first]), step], int(at[first]), dim, offsets[first].tolist(), sizes[first].tolist()]
            for count, first, step, dim in found
        ]

    @cached_property
    def _rows(self) -> list[_Rows]:
        cut = np.flatnonzero((self.offsets != self.offsets[:1]).any(axis=0))
        return [self._along(int(dim)) for dim in cut]

    def _along(self, dim: int) -> _Rows:
        others = np.delete(self.offsets, dim, axis=1)
        along = self.offsets[:, dim]
        order = np.lexsort((*self.sizes.T[::-1], along, *others.T[::-1]))
        is_sorted = bool((order == np.arange(len(order))).all())
        others, along, sizes = others[order], along[order], self.sizes[order]
        adjoins = (
            (others[1:] == others[:-1]).all(axis=1)
            & (sizes[1:] == sizes[:-1]).all(axis=1)
            & (sizes[1:, dim] > 0)
            & (along[1:] == along[:-1] + sizes[:-1, dim])
        )
        return _Rows(dim, None if is_sorted else order, adjoins)


def with_runs(entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return `entries` of the table of tensors, with runs in place of lists of chunks where that is shorter."""
    return {key: _with_runs(entry) for key, entry in entries.items()}


def encode_runs(chunks: Sequence[Sequence[Any]]) -> list[list[Any]] | None:
    """Return the runs of `chunks`, which are [file, at, offsets, sizes] each, in the form that JSON holds.

    Return None where a list of the chunks is as short.
    """
    if len(chunks) < LEAST_CHUNKS:
        return None
    files, at, offsets, sizes = zip(*chunks, strict=True)
    ranks = [layout.rank_of(file) for file in files]
    if any(rank is None or file != layout.data_file(rank, 0) for rank, file in zip(ranks, files, strict=True)):
        return None
    boxes = Boxes(np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))
    return boxes.runs(np.array(ranks, dtype=np.int64), np.array(at, dtype=np.int64))


def _with_runs(entry: dict[str, Any]) -> dict[str, Any]:
    runs = encode_runs(entry["chunks"])
    return entry if runs is None else {name: of for name, of in entry.items() if name != "chunks"} | {"runs": runs}
