"""What `head.json` says: which job holds the folder, and which checkpoints are in it.

A checkpoint exists for readers while its entry is `KEPT`; nothing else about it matters. At most one entry of a step is
kept. Pure values: every change returns another head, and repeating a change changes nothing, so it may be tried again
after an answer was lost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_lite.bucket import naming
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.manifest import CheckpointKind

NO_JOB = "no job"
_FINDINGS = 3
_FINDING_LETTERS = 200


class Status(enum.Enum):
    """What became of a checkpoint."""

    KEPT = "kept"
    WEIGHTS = "weights"
    """Weights only; a full checkpoint of the same step took its place. It stays."""
    CORRUPT = "corrupt"
    """It was damaged. It stays."""
    ABANDONED = "abandoned"
    """Its branch was left by rolling back. It stays."""
    RETIRED = "retired"
    """It is being removed; the entry goes once its objects are gone."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint: the save `attempt` of `step`."""

    step: int
    attempt: str
    kind: CheckpointKind
    run_id: str
    digest: str
    """The one that its manifest ends with; empty where the manifest was damaged when the head was rebuilt."""
    status: Status = Status.KEPT
    findings: tuple[str, ...] = ()
    """What was wrong with a corrupt one, the beginning of it."""
    unknown: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields that a later version added."""

    @property
    def name(self) -> str:
        """Return the prefix of its objects."""
        return naming.attempt_name(self.step, self.attempt)

    def damaged(self, findings: Sequence[str]) -> Entry:
        """Return the entry of the same checkpoint, set aside with `findings`."""
        return replace(
            self, status=Status.CORRUPT, findings=tuple(each[:_FINDING_LETTERS] for each in findings[:_FINDINGS])
        )

    def after(self, other: Entry, abandons: Collection[tuple[int, str]]) -> Entry:
        """Return what becomes of this checkpoint with the commit of `other`."""
        if self.status is not Status.KEPT:
            return self
        if (self.step, self.run_id) in abandons:
            return replace(self, status=Status.ABANDONED)
        if self.step != other.step:
            return self
        is_replaced_by_full = (self.kind, other.kind) == (CheckpointKind.WEIGHTS_ONLY, CheckpointKind.FULL)
        return replace(self, status=Status.WEIGHTS if is_replaced_by_full else Status.RETIRED)


@dataclass(frozen=True)
class Head:
    """One version of `head.json`; the default is that of a new folder."""

    epoch: int = 0
    """How often the folder was taken."""
    change: int = 0
    """How often the head was written. So no content returns, and a store may take it for the version."""
    holder: Holder | None = None
    """The job that writes the folder; None if the last one gave it up."""
    beat_seconds: float = 0.0
    """How often the holder shows that it lives."""
    pinned: frozenset[int] = frozenset()
    entries: tuple[Entry, ...] = field(default=())
    """By the order of their commits."""
    unknown: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields that a later version added."""

    @property
    def kept(self) -> list[Entry]:
        """Return the checkpoints that readers see, by ascending step."""
        return sorted((entry for entry in self.entries if entry.status is Status.KEPT), key=lambda entry: entry.step)

    @property
    def holder_name(self) -> str:
        """Return the job that writes the folder, in words."""
        return NO_JOB if self.holder is None else str(self.holder)

    def find(self, name: str) -> Entry | None:
        """Return the entry of the checkpoint called `name`; None if there is none."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def kept_of(self, step: int) -> Entry | None:
        """Return the checkpoint of `step` that readers see; None if there is none."""
        return next((entry for entry in self.entries if entry.step == step and entry.status is Status.KEPT), None)

    def is_held_by(self, epoch: int, token: str) -> bool:
        """Return whether the holder of `epoch` with `token` has the folder still."""
        return self.epoch == epoch and self.holder is not None and self.holder.token == token

    def taken_by(self, holder: Holder, beat_seconds: float) -> Head:
        """Return the head after `holder` took the folder."""
        return replace(self, epoch=self.epoch + 1, holder=holder, beat_seconds=beat_seconds)

    def released(self) -> Head:
        """Return the head after its holder gave the folder up."""
        return replace(self, holder=None, beat_seconds=0.0)

    def with_entry(self, aside: Entry) -> Head:
        """Return the head with `aside`, which changes no other checkpoint."""
        return replace(self, entries=(*self.entries, aside))

    def with_commit(self, new: Entry, abandons: Collection[tuple[int, str]] = ()) -> Head:
        """Return the head after the commit of `new`, which abandons the (step, run id) in `abandons`.

        What `new` replaces is retired by the same change.
        """
        if self.find(new.name) is not None:
            return self
        left = frozenset(abandons)
        return replace(self, entries=(*(entry.after(new, left) for entry in self.entries), new))

    def with_retired(self, name: str) -> Head:
        """Return the head without the checkpoint `name` for readers; unchanged if its step is pinned."""
        return self._with_kept(
            {name}, lambda entry: entry if entry.step in self.pinned else replace(entry, status=Status.RETIRED)
        )

    def with_corrupt(self, name: str, findings: Sequence[str]) -> Head:
        """Return the head after the kept checkpoint `name` was found to be damaged."""
        return self._with_kept({name}, lambda entry: entry.damaged(findings))

    def with_brought_back(self, name: str, branch: Collection[str]) -> Head:
        """Return the head after the checkpoint `name`, which was set aside, came back in place of those in `branch`.

        Unchanged if another one of its step is kept.
        """
        left = self._with_kept(branch, lambda entry: replace(entry, status=Status.ABANDONED))
        found = self.find(name)
        if found is None or left.kept_of(found.step) is not None:
            return self
        kept = replace(found, status=Status.KEPT, findings=())
        return replace(left, entries=tuple(kept if entry.name == name else entry for entry in left.entries))

    def with_pins(self, added: Collection[int], removed: Collection[int]) -> Head:
        """Return the head with the steps `added` pinned and the steps `removed` not."""
        return replace(self, pinned=self.pinned.union(added).difference(removed))

    def without(self, names: Collection[str]) -> Head:
        """Return the head without the entries `names`, of checkpoints that no reader sees."""
        kept = (entry for entry in self.entries if entry.status is Status.KEPT or entry.name not in names)
        return replace(self, entries=tuple(kept))

    def _with_kept(self, names: Collection[str], change: Callable[[Entry], Entry]) -> Head:
        """Return the head with what `change` makes of each kept checkpoint in `names`."""
        changed = (
            change(entry) if entry.name in names and entry.status is Status.KEPT else entry for entry in self.entries
        )
        return replace(self, entries=tuple(changed))
