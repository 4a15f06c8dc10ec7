"""Which checkpoints stay.

Pure: takes committed checkpoints, returns those to purge; no clock, no disk. Only full checkpoints are counted and
purged, and only undamaged ones: a damaged checkpoint is left for a load to find. Whatever the policy says, three
checkpoints stay: the latest full one, the latest full one known to be good (this run committed or loaded it), and the
latest full one in whose weights no NaN was found, because a run that diverged can roll back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind


class RetentionPolicy(Protocol):
    """Decides which checkpoints stay."""

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        """Return the steps of `committed` that stay."""


@dataclass(frozen=True)
class KeepAll:
    """Keeps every checkpoint."""

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        return {info.step for info in committed}


@dataclass(frozen=True)
class KeepLatest:
    """Keeps the `count` full checkpoints of the highest steps, and every weights-only one."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"KeepLatest: expected at least 1 checkpoint to keep, found {self.count}.")

    def keep(self, committed: Sequence[CheckpointInfo]) -> set[int]:
        full = _full_steps(committed)
        return {info.step for info in committed} - set(full[: -self.count])


def build_retention(config: Checkpoint) -> RetentionPolicy:
    """Return the policy for `keep_latest_k`; 0 keeps all."""
    return KeepLatest(config.keep_latest_k) if config.keep_latest_k else KeepAll()


def presumed_sound(info: CheckpointInfo) -> bool:
    """Return True: a checkpoint with a manifest counts as undamaged."""
    return True


def to_purge(
    policy: RetentionPolicy,
    committed: Sequence[CheckpointInfo],
    protected: AbstractSet[int] = frozenset(),
    *,
    known_good: AbstractSet[int] = frozenset(),
    is_sound: Callable[[CheckpointInfo], bool] = presumed_sound,
) -> list[CheckpointInfo]:
    """Return the checkpoints that `policy` does not keep, lowest step first.

    Never a step in `protected`, a weights-only checkpoint, the latest full one, the latest full one of the steps in
    `known_good`, or the latest full one without NaN. `is_sound` is called for full checkpoints only, and only if there
    would be something to purge; a checkpoint that is not sound counts as absent.
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
