"""Which of the ranks that hold a part of a tensor writes it. Coordinator only, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.planning.spread import Numbers, Spread


@dataclass
class Spreading:
    """A tensor that is spread over ranks."""

    spread: Spread
    itemsize: int
    is_lowest_ranks: bool
    """Whether of each part only the lowest rank that holds it may write it."""
    writers: Numbers = field(init=False)
    """For each box the row of `spread.ranks` that writes it: at first that of the lowest rank."""

    def __post_init__(self) -> None:
        self.writers = self.spread.starts

    @property
    def is_decided(self) -> bool:
        """Whether a rank cannot know by itself whether it writes its part."""
        return self.is_lowest_ranks or not self.spread.numels.any() or self.spread.largest_shared > 0


def balance(tensors: Sequence[Spreading], num_ranks: int) -> None:
    """Choose the writer of each part of `tensors`: each is written once, the bytes spread evenly.

    A part of only one rank stays there. The others go, those of the largest tensors first, to the rank with the fewest
    bytes among their holders (Graham's rule: at most 4/3 of the best possible).
    """
    loads: Numbers = np.zeros(num_ranks, dtype=np.int64)
    shared: list[Spreading] = []
    of_lowest: dict[int, tuple[Spread, int]] = {}
    for tensor in tensors:
        spread = tensor.spread
        if tensor.is_lowest_ranks or not spread.largest_shared:
            num_bytes = of_lowest.get(id(spread), (spread, 0))[1] + tensor.itemsize
            of_lowest[id(spread)] = spread, num_bytes
        else:
            shared.append(tensor)
            if not spread.is_shared.all():
                alone = ~spread.is_shared
                np.add.at(loads, spread.ranks[spread.starts[alone]], spread.numels[alone] * tensor.itemsize)
    # Counted before the shared parts are given out: these ranks have to write them in any case.
    for spread, num_bytes in of_lowest.values():
        np.add.at(loads, spread.ranks[spread.starts], spread.numels * num_bytes)
    # The largest first: then no two ranks differ by more than the largest part. DCP goes through them in their order.
    for tensor in sorted(shared, key=_largest_part, reverse=True):
        spread = tensor.spread
        boxes = spread.is_shared & (spread.numels > 0)
        rows = _with_least(spread, loads, boxes)
        if len(rows) < len(tensor.writers):
            tensor.writers = tensor.writers.copy()
            tensor.writers[boxes] = rows
        else:
            tensor.writers = rows
        np.add.at(loads, spread.ranks[rows], spread.numels[boxes] * tensor.itemsize)


def _largest_part(tensor: Spreading) -> int:
    return int(tensor.spread.largest_shared) * tensor.itemsize


def _with_least(spread: Spread, loads: Numbers, boxes: npt.NDArray[np.bool_]) -> Numbers:
    """Return for each of `boxes` the row of `spread.ranks` that has the least of `loads`, the first of these."""
    starts, counts = spread.starts[boxes], spread.counts[boxes]
    rows = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
    of_rows = loads[spread.ranks[rows]]
    if len(counts) == 1:
        return rows[[of_rows.argmin()]]
    if (counts == counts[0]).all():
        with_least: Numbers = starts + of_rows.reshape(-1, counts[0]).argmin(axis=1)
        return with_least
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
    least = np.repeat(np.minimum.reduceat(of_rows, begins), counts)
    first = np.where(of_rows == least, rows, len(spread.ranks))
    found: Numbers = np.minimum.reduceat(first, begins)
    return found
