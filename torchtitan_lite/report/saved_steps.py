"""The checkpoints of a run: what each save cost, and what became of it. Pure.

Events say what was saved and purged, the folders of checkpoints and exports say what is there now. A checkpoint in them
belongs to the save of its step, and if possible of its kind, whose commit is nearest to the time in its manifest.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.events import Committed, Event, Purged, Quarantined, SaveFailure, SaveStarted
from torchtitan_lite.examining.inventory import FolderState, ListedCheckpoint
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.examining.summary import bytes_by_file
from torchtitan_lite.report.lines import known
from torchtitan_lite.report.starts import ReportedStart
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place

LARGEST_RATE = 1e15
"""Bytes a second that no storage takes; a line of another program may say anything."""


class Fate(enum.Enum):
    """What became of a checkpoint; the value is the word in the page."""

    KEPT = "kept"
    PURGED = "purged"
    QUARANTINED = "quarantined"
    ABANDONED = "abandoned"
    SET_ASIDE = "set aside"
    DAMAGED = "damaged"
    FAILED = "failed"
    CUT = "cut off"
    UNDER_WAY = "under way"
    GONE = "not there any more"
    UNSEEN = "not looked at"
    """Its folder could not be read."""

    @property
    def word(self) -> str:
        """Its class in the page."""
        return self.name.lower().replace("_", "-")


_FATE_OF_STATE = {
    FolderState.COMMITTED: Fate.KEPT,
    FolderState.FOREIGN: Fate.KEPT,
    FolderState.DAMAGED: Fate.DAMAGED,
    FolderState.UNREADABLE: Fate.DAMAGED,
    FolderState.UNKNOWN_FORMAT: Fate.UNSEEN,
    FolderState.QUARANTINED: Fate.QUARANTINED,
    FolderState.ABANDONED: Fate.ABANDONED,
    FolderState.SET_ASIDE: Fate.SET_ASIDE,
    FolderState.BEING_REPLACED: Fate.SET_ASIDE,
    FolderState.BEING_REMOVED: Fate.PURGED,
}
_FATE_OF_EVENT: Mapping[type[Event], Fate] = {Purged: Fate.PURGED, Quarantined: Fate.QUARANTINED}


@dataclass(frozen=True)
class Save:
    """One save, or a checkpoint that the events do not know."""

    step: int
    time: float
    """Unix seconds of its commit; of its start where it was not committed."""
    start: int
    """The number of the start that saved it; 0 if unknown."""
    fate: Fate = Fate.GONE
    kind: str = "full"
    nbytes: int | None = None
    seconds: float | None = None
    """From the start of the save to its commit, on rank 0."""
    stall_seconds: float | None = None
    """That it blocked training."""
    slowest: str = ""
    """The slowest rank, if the event names it."""
    note: str = ""

    @property
    def bytes_per_second(self) -> float | None:
        """Its bandwidth; None if it is not known, or one that no disk has."""
        if not self.nbytes or not self.seconds:
            return None
        rate = self.nbytes / self.seconds
        return rate if 0 < rate <= LARGEST_RATE else None

    @property
    def is_impossible(self) -> bool:
        """Whether its figures are known and cannot be those of a save."""
        return bool(self.nbytes) and self.seconds is not None and self.bytes_per_second is None


def saves_of(
    starts: Sequence[ReportedStart], entries: Sequence[ListedCheckpoint], *, are_seen: bool = True
) -> list[Save]:
    """Return the saves of all `starts` in their order, then the `entries` in the folders that none of them made.

    `are_seen`: whether what has no entry is gone; else its folder could not be read.
    """
    saves = [save for start in starts for save in _of_start(start, is_last=start is starts[-1])]
    by_step: dict[int, list[int]] = {}
    for index, save in enumerate(saves):
        by_step.setdefault(save.step, []).append(index)
    for time, event in (recorded for start in starts for recorded in start.events):
        # What is removed is the last save of the step before that.
        earlier = [index for index in by_step.get(event.step, ()) if saves[index].time <= time]
        if type(event) in _FATE_OF_EVENT and earlier:
            last = max(earlier, key=lambda index: saves[index].time)
            if saves[last].fate is Fate.GONE:
                saves[last] = dataclasses.replace(saves[last], fate=_FATE_OF_EVENT[type(event)])
    found, unknown = _matched_entries(saves, by_step, entries)
    for index, save in enumerate(saves):
        if index in found:
            entry = found[index]
            fate = _FATE_OF_STATE.get(entry.state, save.fate)
            saves[index] = dataclasses.replace(save, fate=fate, note=entry.finding)
        elif save.fate is Fate.GONE and not are_seen:
            saves[index] = dataclasses.replace(save, fate=Fate.UNSEEN)
    return [*saves, *(_of_entry(entry) for entry in unknown)]


def _of_start(start: ReportedStart, *, is_last: bool) -> list[Save]:
    """Return the saves that `start` began; Fate.GONE stands for committed, until the folder was looked at."""
    saves: dict[tuple[int, str], Save] = {}  # The last step may be saved in full and exported.
    begun: dict[int, str] = {}
    may_continue = is_last and start.end == "unknown"
    for time, event in start.events:
        step = event.step
        match event:
            case SaveStarted():
                fate = Fate.UNDER_WAY if may_continue else Fate.CUT
                begun[step] = kind = event.kind or "full"
                saves[step, kind] = Save(step, time, start.number, fate, kind)
            case SaveFailure() if step in begun:
                failed = saves[step, begun[step]]
                saves[step, begun[step]] = dataclasses.replace(failed, fate=Fate.FAILED, note=event.reason)
            case Committed():
                kind = event.kind or "full"
                saves[step, kind] = Save(
                    step,
                    time,
                    start.number,
                    Fate.GONE,
                    kind,
                    event.bytes or None,
                    known(event.seconds),
                    known(event.stall_seconds),
                    _slowest(event),
                )
    return list(saves.values())


def _matched_entries(
    saves: Sequence[Save], by_step: Mapping[int, Sequence[int]], entries: Sequence[ListedCheckpoint]
) -> tuple[dict[int, ListedCheckpoint], list[ListedCheckpoint]]:
    """Return the entry of each save that is still in the folder, by its index, and the entries of no save."""
    found: dict[int, ListedCheckpoint] = {}
    unknown = []
    for entry in entries:
        if entry.state is FolderState.HALF_WRITTEN:
            continue  # The save that wrote it is known as cut off or under way.
        free = [index for index in by_step.get(entry.step or 0, []) if index not in found]
        free = [index for index in free if saves[index].fate is not Fate.FAILED]
        if free:
            found[min(free, key=lambda index: _distance(saves[index], entry))] = entry
        else:
            unknown.append(entry)
    return found, unknown


def _distance(save: Save, entry: ListedCheckpoint) -> tuple[bool, float]:
    """Return how far `entry` is from what `save` wrote: first whether it is of another kind, then in seconds."""
    return entry.kind is not None and entry.kind.value != save.kind, abs(save.time - entry.created_at)


def _slowest(event: Committed) -> str:
    rank, seconds = event.slowest_rank, event.slowest_seconds
    return "" if rank is None or seconds is None else f"rank {rank}, {seconds:.3f} s"


def _of_entry(entry: ListedCheckpoint) -> Save:
    fate = _FATE_OF_STATE.get(entry.state, Fate.CUT)
    kind = entry.kind.value if entry.kind is not None else ""
    return Save(entry.step or 0, entry.created_at, 0, fate, kind, entry.nbytes, note=entry.finding)


# How the bytes of one checkpoint are spread over the ranks that wrote it.


OTHER = "other"
MAX_PARTS = 4


@dataclass(frozen=True)
class ShardMap:
    """The bytes of one checkpoint by rank, and in each rank by part of the state."""

    step: int
    ranks: Mapping[int, Mapping[str, int]]
    """Rank to part to bytes, by ascending rank. All parts of a rank sum to its files."""
    parts: tuple[str, ...]
    """The largest parts first; the last one may be `OTHER`."""

    @property
    def totals(self) -> dict[int, int]:
        """Bytes by rank."""
        return {rank: sum(parts.values()) for rank, parts in self.ranks.items()}


def read_shards(folder: Place, step: int) -> ShardMap | None:
    """Return the shard map of the checkpoint in `folder`; None if it cannot be read. No tensor is read."""
    try:
        opened = open_checkpoint(folder)
        by_file = bytes_by_file(opened.contents)
    except (TorchtitanLiteError, OSError):
        return None
    return shard_map(step, opened.sizes, by_file)


def shard_map(step: int, sizes: Mapping[str, int], by_file: Mapping[str, Mapping[str, int]]) -> ShardMap | None:
    """Return the shard map of files with these `sizes` and tensors; None without a file of a rank."""
    totals: Counter[str] = Counter()
    for parts in by_file.values():
        totals.update(parts)
    named = [part for part, _ in totals.most_common(MAX_PARTS - 1)]
    ranks: dict[int, Counter[str]] = {}
    for name, size in sizes.items():
        if (rank := layout.rank_of(name)) is None:
            continue
        found = ranks.setdefault(rank, Counter())
        parts = {part: nbytes for part, nbytes in by_file.get(name, {}).items() if part in named}
        found.update(parts)
        # What is next to the tensors, headers and padding for the most part.
        found[OTHER] += max(0, size - sum(parts.values()))
    if not ranks:
        return None
    has_other = any(parts[OTHER] for parts in ranks.values())
    return ShardMap(step, dict(sorted(ranks.items())), (*named, OTHER) if has_other else tuple(named))
