"""Which checkpoints stay.

Pure: committed checkpoints come in, steps go out; no clock, no disk. Only full checkpoints are
counted and only full ones are purged, and of these only the sound ones: what is damaged is for a
load to find, and neither counted nor purged. Whatever a policy says, the latest full one stays, and
so does the latest one known to be good (one that this run has committed or loaded), and the latest
one in whose weights no NaN was seen: a run that diverged can go back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind


class RetentionPolicy(Protocol):
    """Says which checkpoints stay."""

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        """The steps of `committed` that stay."""


@dataclass(frozen=True)
class KeepAll:
    """Every checkpoint stays."""

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        return {info.step for info in committed}


@dataclass(frozen=True)
class KeepLatest:
    """The `count` full checkpoints of the highest steps stay, and every weights-only one."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"KeepLatest: expected at least 1 checkpoint to keep, found {self.count}.")

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        full = _full_steps(committed)
        return {info.step for info in committed} - set(full[: -self.count])


def build_retention(config: Checkpoint) -> RetentionPolicy:
    """The policy that `keep_latest_k` asks for; 0 keeps all."""
    return KeepLatest(config.keep_latest_k) if config.keep_latest_k else KeepAll()


def presumed_sound(info: CheckpointInfo) -> bool:
    """That a checkpoint has its manifest is all that is asked."""
    return True


def to_purge(
    policy: RetentionPolicy,
    committed: Sequence[CheckpointInfo],
    protected: AbstractSet[int] = frozenset(),
    *,
    known_good: AbstractSet[int] = frozenset(),
    is_sound: Callable[[CheckpointInfo], bool] = presumed_sound,
) -> list[CheckpointInfo]:
    """What `policy` lets go, oldest first; never a step in `protected`, a weights-only one or the latest full one.

    Nor the latest full one of the steps in `known_good`, nor the latest one without NaN. `is_sound` is
    asked of full checkpoints alone, and only if something would be let go: those that are not are as if they were not
    there.
    """
    purged = _let_go(policy, committed, protected, known_good)
    if purged:
        sound = [info for info in committed if info.kind is not CheckpointKind.FULL or is_sound(info)]
        purged = _let_go(policy, sound, protected, known_good)
    return purged


def _let_go(
    policy: RetentionPolicy,
    committed: Sequence[CheckpointInfo],
    protected: AbstractSet[int],
    known_good: AbstractSet[int],
) -> list[CheckpointInfo]:
    full = _full_steps(committed)
    finite = _full_steps([info for info in committed if not info.has_nan])
    last_good = [step for step in finite if step in known_good][-1:]
    purged = set(full[:-1]) - policy.keep(committed) - protected - {*last_good, *finite[-1:]}
    return sorted((info for info in committed if info.step in purged), key=lambda info: info.step)


def _full_steps(committed: Sequence[CheckpointInfo]) -> list[int]:
    return sorted(info.step for info in committed if info.kind is CheckpointKind.FULL)
