"""The entries of all ranks, as the joint plan is made of them: pieces that ranks have alike, and tensors over these."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.chunk_runs import Shape
from torchtitan_lite.checkpoint.format.file_data import extent_of
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.placement import Numbers, Spread
from torchtitan_lite.checkpoint.planning.rank_summary import PlanEntry, SectionAnswer, section_of
from torchtitan_lite.store import layout


@dataclass
class Section:
    """A piece of entries, and the ranks that have it."""

    ranks: list[int] = field(default_factory=list)
    entries: Sequence[PlanEntry] = ()
    meshes: Mapping[int, Shape] = field(default_factory=dict)
    first: int = 0
    coordinates: dict[int, Numbers] = field(default_factory=dict)
    is_of_owner: bool = False
    """Whether it is the piece of one of the ranks that have it: the others write nothing of its places."""

    def fill(self, text: bytes, first: int) -> None:
        self.entries, self.meshes = section_of(text)
        self.first = first
        self.column = np.array(self.ranks, dtype=np.int64)
        self.is_decided = bytearray(len(self.entries))
        self.patterns = [-1] * len(self.entries)

    def of_owner(self, rank: int) -> Section:
        """Return the piece as `rank` alone has it; what is decided of either is decided of both."""
        own = copy.copy(self)
        own.ranks, own.column, own.is_of_owner = [rank], np.array([rank], dtype=np.int64), True
        own.coordinates = {}
        return own

    def packed(self) -> bytes:
        answer = SectionAnswer(self.first, bytes(self.is_decided), self.patterns)
        return zlib.compress(pickle.dumps(tuple(answer)), 1)


Place = tuple[Section, int]
"""An entry, by its section and its number there."""


Boxes = slice | Numbers
ALL = slice(None)


@dataclass
class JointTensor:
    """A tensor of the joint state, spread over ranks."""

    spread: Spread
    is_lowest_ranks: bool
    """Whether of each part only the lowest rank that holds it may write it."""
    key: str
    dtype: str
    places: Sequence[Place]
    """The entries that have it, in the order of the holders of its spread."""

    def __post_init__(self) -> None:
        self.itemsize = DTYPES[self.dtype].itemsize
        self.writers: Numbers = self.spread.starts
        """For each box the row of `spread.ranks` that writes it: at first that of the lowest rank."""

    @property
    def is_decided(self) -> bool:
        """Whether a rank cannot know by itself whether it writes its part."""
        return self.is_lowest_ranks or not self.spread.numels.any() or self.spread.largest_shared > 0

    def by_place(self) -> Iterator[tuple[Place, Boxes]]:
        """Yield the boxes that are written by ranks with each of the places."""
        if len(self.places) == 1:
            yield self.places[0], ALL
            return
        of_box = self.spread.of_holders[self.writers]
        for number, place in enumerate(self.places):
            yield place, np.flatnonzero(of_box == number)

    def entry(self, at: Numbers) -> dict[str, object]:
        """Return its entry in the manifest's table; the elements of each box begin `at` these bytes of their files."""
        spread, ranks = self.spread, self.spread.ranks[self.writers]
        described: dict[str, object] = {"dtype": self.dtype, "shape": list(spread.shape)}
        if runs := spread.boxes.runs(ranks, at):
            return described | {"runs": runs}
        columns = ranks.tolist(), at.tolist(), spread.offsets.tolist(), spread.sizes.tolist()
        chunks = [[layout.data_file(rank, 0), *where] for rank, *where in zip(*columns, strict=True)]
        return described | {"chunks": chunks}


class RankFiles:
    """One file of each rank, as far as it is laid out."""

    def __init__(self, num_ranks: int) -> None:
        self._ends: Numbers = np.zeros(num_ranks, dtype=np.int64)
        self._extents: dict[tuple[Spread, str], tuple[Numbers, Numbers]] = {}

    def place(self, tensor: JointTensor, boxes: Boxes) -> Numbers:
        """Put these boxes at the ends of their files; return the bytes at which their elements begin."""
        before, until_next = self._extents_of(tensor)
        where = tensor.spread.ranks[tensor.writers[boxes]]
        at: Numbers = self._ends[where] + before[boxes]
        self._ends[where] += until_next[boxes]
        return at

    def _extents_of(self, tensor: JointTensor) -> tuple[Numbers, Numbers]:
        alike = tensor.spread, tensor.dtype
        if alike not in self._extents:
            kinds, of_box = tensor.spread.kinds
            found = np.array([extent_of((DTYPES[tensor.dtype], sizes)) for sizes in kinds], dtype=np.int64)
            self._extents[alike] = found[of_box, 0], found[of_box, 1]
        return self._extents[alike]


def agreeing(lowest: PlanEntry, places: Sequence[Place]) -> tuple[list[Place], list[str]]:
    """Return those of `places` with a tensor like `lowest`, or with an object as it is, and how the others differ."""
    agreeing: list[Place] = []
    odd: list[str] = []
    for section, at in places:
        entry = section.entries[at]
        if bool(entry.dtype) != bool(lowest.dtype):
            kinds = ["a tensor" if each.dtype else "an object" for each in (lowest, entry)]
            ranks = places[0][0].ranks[0], section.ranks[0]
            raise ValueError(
                f"{lowest.key} is {kinds[0]} on rank {ranks[0]} and {kinds[1]} on rank {ranks[1]}, and a checkpoint "
                "can hold only one of them. Use a name of its own for each"
            )
        if (entry.shape, entry.dtype) == (lowest.shape, lowest.dtype):
            agreeing.append((section, at))
            continue
        section.is_decided[at] = 1  # And is given to no rank.
        if not entry.is_lowest_ranks and not odd:
            rank, second = places[0][0].ranks[0], section.ranks[0]
            odd.append(f"{lowest.key} ({_shown_entry(lowest)} on rank {rank}, {_shown_entry(entry)} on rank {second})")
    return agreeing, odd


def _shown_entry(entry: PlanEntry) -> str:
    return f"{list(entry.shape)} of torch.{entry.dtype}"


# Which of the ranks that hold a part of a tensor writes it. Pure.


def balance(tensors: Sequence[JointTensor], num_ranks: int) -> None:
    """Choose the writer of each part of `tensors`: each is written once, the bytes spread evenly.

    A part of only one rank stays there. The others go, those of the largest tensors first, to the rank with the fewest
    bytes among their holders (Graham's rule: at most 4/3 of the best possible).
    """
    loads: Numbers = np.zeros(num_ranks, dtype=np.int64)
    shared: list[JointTensor] = []
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
    for tensor in sorted(shared, key=lambda each: int(each.spread.largest_shared) * each.itemsize, reverse=True):
        spread = tensor.spread
        boxes = spread.is_shared & (spread.numels > 0)
        rows = _with_least(spread, loads, boxes)
        if len(rows) < len(tensor.writers):
            tensor.writers = tensor.writers.copy()
            tensor.writers[boxes] = rows
        else:
            tensor.writers = rows
        np.add.at(loads, spread.ranks[rows], spread.numels[boxes] * tensor.itemsize)


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
