"""The saves that follow one plan: what the next one may share with the last, and what the digests of two show.

Files of the same layout only can be equal, so the record of what was written ends with its plan. It ends with a load,
too: what a load found damaged, or did not look at, is not shared any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.file_data import FileLayout, TensorPlace
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord


class Parent(NamedTuple):
    """The durable save whose still files the next one may share."""

    step: int
    place: str
    """The name of its checkpoint."""


NO_PARENT = Parent(-1, "")


class Moved(NamedTuple):
    """What a save showed of the tensors of one rank, next to the save before it."""

    changed: Sequence[str]
    """Keys of tensors in the still file that have changed."""
    unchanged: Mapping[str, int]
    """Of tensors in the other file that have not: how many pieces, by key."""


class StillFile(NamedTuple):
    """A rank's report about its still file."""

    size: int
    blocks: bytes
    is_linked: bool = False
    """Whether it shares its bytes with the file of the save before."""
    refusal: str = ""
    """Why it does not, although it could; empty if it does or could not."""


class NoSavesOfPlan:
    """Nothing is shared."""

    def parent(self, store: str) -> Parent:
        """Return the save whose still files the next one into `store` may share. Coordinator only."""
        return NO_PARENT

    def spared_bytes(self, store: str) -> int:
        """Return how many bytes of a checkpoint the next save into `store` need not write. Coordinator only."""
        return 0

    def still_of(self, step: int) -> FileRecord | None:
        """Return the record of the still file that this rank wrote, or shared, in the save of `step`. Any rank."""
        return None

    def note_written(self, step: int, still: FileRecord, changes: FileRecord) -> Moved | None:
        """Note this rank's files in the save of `step`; return what they show, None for nothing. Any rank."""
        return None

    def note_committed(
        self, save: Parent, store: str, files: Sequence[StillFile], moved: Sequence[Moved], tensors: Mapping[str, Any]
    ) -> None:
        """Note that the save into `store` is durable, with these still `files`. Coordinator only.

        `moved` is what all ranks saw in it, `tensors` are the manifest's.
        """

    def forget(self) -> None:
        """Let the next save share nothing. Any rank."""


class HearsOfSaves(Protocol):
    """Who draws conclusions from saves. Coordinator only."""

    def note(self, moved: Sequence[Moved], tensors: Mapping[str, Any]) -> None:
        """Note what all ranks saw in a save; `tensors` are the manifest's."""

    def note_refusal(self, step: int, refusal: str) -> None:
        """Note why still files that had not changed could not be shared in the save of `step`."""


@dataclass(frozen=True)
class _Files:
    still: FileRecord
    changes: FileRecord


class SavesOfPlan(NoSavesOfPlan):
    """Of a plan by which this rank writes the tensors `keys` as `placed`; smaller ones than `least_bytes` never move.

    Still files are shared at most `full_every` times in a row.
    """

    def __init__(
        self, placed: FileLayout, keys: Sequence[str], least_bytes: int, full_every: int, listener: HearsOfSaves
    ) -> None:
        self._placed, self._keys, self._least_bytes = placed, keys, least_bytes
        self._full_every, self._listener = full_every, listener
        self._files: dict[int, _Files] = {}
        """Of the last two saves, by step: a save that fails leaves the one before it to share with."""
        self._parent = NO_PARENT, ""
        """The last durable save, and its store."""
        self._num_shared = self._still_bytes = 0
        self._is_under_way = False
        """Whether a save has begun and is not durable: it is being written, or has failed."""

    def parent(self, store: str) -> Parent:
        self._is_under_way = True
        return self._parent_in(store)

    def spared_bytes(self, store: str) -> int:
        # After a failed save, whose still files may have changed, there should be room for all.
        return 0 if self._is_under_way or self._parent_in(store) == NO_PARENT else self._still_bytes

    def still_of(self, step: int) -> FileRecord | None:
        return self._files[step].still if step in self._files else None

    def note_written(self, step: int, still: FileRecord, changes: FileRecord) -> Moved | None:
        last = next(reversed(self._files.values()), None)
        self._files.pop(step, None)
        self._files = dict([*self._files.items()][-1:]) | {step: _Files(still, changes)}
        if last is None:
            return None
        num_still = self._placed.num_still
        changed = [self._keys[number] for number in _changed(self._places(0, num_still), last.still, still)]
        unchanged: dict[str, int] = {}
        for number in _unchanged(self._places(num_still), last.changes, changes, self._least_bytes):
            key = self._keys[num_still + number]
            unchanged[key] = unchanged.get(key, 0) + 1
        return Moved(changed, unchanged) if changed or unchanged else None

    def note_committed(
        self, save: Parent, store: str, files: Sequence[StillFile], moved: Sequence[Moved], tensors: Mapping[str, Any]
    ) -> None:
        self._parent, self._is_under_way = (save, store), False
        self._still_bytes = sum(file.size for file in files)
        self._num_shared = self._num_shared + 1 if any(file.is_linked for file in files) else 0
        self._listener.note(moved, tensors)
        if refusals := [file.refusal for file in files if file.refusal]:
            self._listener.note_refusal(save.step, refusals[0])

    def forget(self) -> None:
        self._parent, self._num_shared = (NO_PARENT, ""), 0
        self._files = {}

    def _parent_in(self, store: str) -> Parent:
        save, of_store = self._parent
        return save if of_store == store and self._num_shared < self._full_every else NO_PARENT

    def _places(self, begin: int, end: int | None = None) -> Sequence[TensorPlace]:
        """Return the places of some tensors, counted from the first byte of their file."""
        places = self._placed.places[begin:end]
        if begin < self._placed.num_still:
            return places
        return [dataclasses.replace(place, data_at=place.data_at - self._placed.changes_at) for place in places]


_Numbers = npt.NDArray[np.int64]


class _Blocks:
    """The blocks in which two files of one layout differ, next to the `places` of tensors in them."""

    def __init__(self, places: Sequence[TensorPlace], before: FileRecord, now: FileRecord) -> None:
        blocks = [np.frombuffer(each.blocks, dtype=np.uint64) for each in (before, now)]
        shared = min(map(len, blocks))
        self.differ = np.flatnonzero(blocks[0][:shared] != blocks[1][:shared])
        begins = np.array([place.data_at for place in places], dtype=np.int64)
        ends = np.array([place.data_end for place in places], dtype=np.int64)
        self.num_bytes = ends - begins
        self.around = begins // BLOCK_BYTES, -(-ends // BLOCK_BYTES)
        """The first block that has a byte of each tensor, and the one after the last."""
        self.within = -(-begins // BLOCK_BYTES), ends // BLOCK_BYTES
        """The same for blocks that have no other byte."""

    def count(self, blocks: tuple[_Numbers, _Numbers]) -> _Numbers:
        """Return for each tensor how many of these blocks differ."""
        first, end = (np.searchsorted(self.differ, each) for each in blocks)
        counts: _Numbers = np.maximum(end - first, 0)
        return counts


def _changed(places: Sequence[TensorPlace], before: FileRecord, now: FileRecord) -> Iterator[int]:
    """Yield the numbers of the tensors that have changed, or may have: a block has parts of several."""
    if not places or before.blocks == now.blocks:
        return
    blocks = _Blocks(places, before, now)
    is_certain = blocks.count(blocks.within) > 0
    explained = {
        block
        for number in np.flatnonzero(is_certain).tolist()
        for block in range(int(blocks.around[0][number]), int(blocks.around[1][number]))
    }
    blocks.differ = np.array([block for block in blocks.differ.tolist() if block not in explained], dtype=np.int64)
    yield from np.flatnonzero(is_certain | (blocks.count(blocks.around) > 0)).tolist()


def _unchanged(places: Sequence[TensorPlace], before: FileRecord, now: FileRecord, least_bytes: int) -> Iterator[int]:
    """Yield the numbers of the tensors of at least that size that look unchanged."""
    if not places:
        return
    blocks = _Blocks(places, before, now)
    # The blocks at its ends have bytes of its neighbours.
    has_own = blocks.within[1] > blocks.within[0]
    counts = np.where(has_own, blocks.count(blocks.within), blocks.count(blocks.around))
    yield from np.flatnonzero((counts == 0) & (blocks.num_bytes >= least_bytes)).tolist()
