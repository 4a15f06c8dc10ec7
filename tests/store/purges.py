"""Which checkpoints a policy lets go, by the same decision as a run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.retention import RetentionPolicy, judge_checkpoints


def to_purge(
    policy: RetentionPolicy,
    committed: Sequence[CheckpointInfo],
    protected: AbstractSet[int] = frozenset(),
    *,
    known_good: AbstractSet[int] = frozenset(),
    is_sound: Callable[[CheckpointInfo], bool] = lambda info: True,
) -> list[CheckpointInfo]:
    """Return the checkpoints that go by `judge_checkpoints`, lowest step first."""
    judged = judge_checkpoints(policy, committed, protected, known_good=known_good, is_sound=is_sound)
    return [verdict.info for verdict in judged if verdict.goes]
