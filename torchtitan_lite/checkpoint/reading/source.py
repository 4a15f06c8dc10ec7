"""A checkpoint to load: on disk, or offered by whoever keeps copies in memory.

`Sources` is that seam: by default there is nothing else. What a companion offers are `LoadSource`s that answer some of
the questions below in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.folder import Verify
from torchtitan_lite.checkpoint.schedule.interval import AtRisk, Tick
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.rollbacks import Rollback


@dataclass(frozen=True)
class Wanted:
    """What a load wants."""

    step: int
    """-1 for the latest."""
    config: Checkpoint
    is_exact: bool = False
    """Whether `step` means that very step, not the latest one of a branch that began there."""
    rolls_back: bool = False
    """Whether it wants what the last rollback on record goes to, and not a `step`."""


def recorded_section(config: Any, name: str) -> dict[str, Any]:
    """Return the section `name` of a `config` that a manifest records; empty without one. It may hold anything."""
    section = config.get(name) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def counts_again(config: Any) -> bool:
    """Return whether the run with the recorded `config` began without the step counter of what it loaded."""
    excluded = recorded_section(config, "checkpoint").get("exclude_from_loading")
    return isinstance(excluded, list) and "train_state" in excluded


@dataclass(frozen=True)
class RunFacts:
    """What a manifest records of the run that saved a checkpoint; the defaults are of one without a manifest."""

    topology: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    tensor_digests: dict[str, str] = field(default_factory=dict)
    """By key."""
    has_nan: bool = False
    """Whether NaN was seen in its weights or optimizer states."""
    never_finite: Sequence[str] = ()
    """The keys of optimizer states that were not finite at the run's first save."""
    ranks_differ: bool = False
    """Whether ranks were seen to hold different values of a tensor."""
    trained_seconds: float = 0.0
    """That the run had trained, in all its starts."""


@dataclass(frozen=True)
class LoadSource:
    """A checkpoint to load."""

    path: Place
    """Where it is; where it would be, if it is only in memory."""
    step: int
    """The step that the run resumes from; 0 if it starts from scratch with these weights."""
    model_only: bool
    lineage: Lineage
    """Lineage of the run that resumes from it."""
    nbytes: int = 0
    initial: bool = False
    """Whether it is from another run, to start a new one."""
    is_explicit: bool = False
    """Whether the user named it by step or path: no other one may replace it."""
    recorded: RunFacts = field(default_factory=RunFacts)
    excluded: tuple[str, ...] = ()
    """States that this load does not change."""
    skipped: tuple[int, ...] = ()
    """Later steps that it goes before, because ranks differed when those were saved."""

    rollbacks: tuple[Rollback, ...] = ()
    """How often its run rolled back by itself, if it continues."""

    found_at: int | None = None
    """The step at which it was saved, if the new run does not resume from there; else None."""

    @property
    def saved_at(self) -> int:
        """The step at which it was saved."""
        return self.step if self.found_at is None else self.found_at

    @property
    def continues_at(self) -> int | None:
        """The step that the run resumes from; None if it counts from the start."""
        return None if self.lineage.counts_again or (self.initial and self.model_only) else self.step

    @property
    def loaded(self) -> Tick:
        """The moment of the run at which it resumes."""
        return Tick(self.continues_at or 0, 0.0 if self.initial else self.recorded.trained_seconds)

    @property
    def on_disk(self) -> Tick:
        """The latest moment of the run that the disk has."""
        return self.loaded

    @property
    def at_risk(self) -> AtRisk:
        """The training in it that the disk lacks."""
        return AtRisk.between(self.on_disk, self.loaded)

    @property
    def is_proof(self) -> bool:
        """Whether a load of it proves that the step on disk is good."""
        return not (self.initial or self.recorded.has_nan or self.recorded.ranks_differ)

    @property
    def memory_step(self) -> int:
        """The step of the image in memory that it is; -1 if its bytes are on disk."""
        return -1

    @property
    def origin(self) -> str:
        """Where its bytes are, as events name it."""
        return "disk"

    @property
    def remark(self) -> str:
        """What the log adds to its load."""
        return ""

    def verify(self, config: Checkpoint) -> Verify:
        """Return how much of it is verified."""
        # What a run that diverged rolls back to is to be right.
        return config.verify_on_load if self.lineage.rolls_back_to is None else "full"


class Sources:
    """What there is to load besides the checkpoints on disk: nothing."""

    def look(self, topology: str) -> None:
        """Find what a run of `topology` could load. Before a choice; **collective**."""

    def preferred(self, chosen: LoadSource | None, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        """Return what goes before `chosen`, which `store` has for `wanted`; else `chosen`. **Coordinator only**."""
        return chosen

    def elsewhere(self, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        """Return what `store` lacks for `wanted`; None if it is not here either. **Coordinator only**."""
        return None

    def has_checkpoint(self) -> bool:
        """Return whether a full checkpoint is here, or was, in another folder. **Coordinator only**."""
        return False

    def good_steps(self, rollback: Rollback) -> Sequence[CheckpointInfo]:
        """Return the checkpoints here to which `rollback` may go, as `load_source.good_steps`. **Coordinator only**."""
        return ()

    def drop(self, source: LoadSource, error: CheckpointError) -> bool:
        """Return whether `source` was offered here; it is damaged then, and not offered again. **Collective**."""
        return False

    def opened(self, source: LoadSource, folder: str) -> AbstractContextManager[Files | None]:
        """Return a context with the files of `source`, None for those in its folder. **Collective**."""
        return nullcontext(None)

    def close(self) -> None:
        """Forget what `look` found: nothing of it was loaded."""
