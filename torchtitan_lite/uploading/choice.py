"""Which checkpoints are to be uploaded. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torchtitan_lite.store.lineage import Lineage, abandoned_by, without_abandoned
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.retention import RetentionPolicy, judge

Save = tuple[int, str, float]
"""The step, the run and the Unix second of one save: the same in each folder that has it."""


def save_of(info: CheckpointInfo) -> Save:
    """Return which save made the checkpoint `info`."""
    return info.step, info.run_id, info.created_at


def missing(
    source: Sequence[CheckpointInfo],
    target: Sequence[CheckpointInfo],
    policy: RetentionPolicy,
    *,
    pinned: AbstractSet[int] = frozenset(),
    now: float,
) -> list[CheckpointInfo]:
    """Return the checkpoints of `source` that `target` lacks and that `policy` would keep there, the latest first.

    The latest one is the one that a lost disk would cost. What the policy would remove from the target as soon as later
    ones are there is never sent.
    """
    there = {save_of(info) for info in target}
    lacking = {info.step: info for info in source if save_of(info) not in there}
    together = {info.step: info for info in without_abandoned([*target, *source])} | lacking
    verdicts = judge(policy, [*together.values()], pinned=pinned, now=now)
    return [each.info for each in reversed(verdicts) if not each.goes and lacking.get(each.info.step) is each.info]


def is_of_another_run(source: Sequence[CheckpointInfo], target: Sequence[CheckpointInfo]) -> bool:
    """Return whether `target` has checkpoints, and none of a run that `source` has, or that a branch there left."""
    runs = {info.run_id for info in source}
    branches = any(info.lineage.branch_point is not None for info in source)
    return bool(runs and target) and not branches and runs.isdisjoint(info.run_id for info in target)


def lineage_in(target: Sequence[CheckpointInfo], lineage: Lineage, source: Sequence[CheckpointInfo]) -> Lineage:
    """Return the `lineage` of a checkpoint of `source` for `target`: its commit there abandons what `source` left.

    In `source` only the first commit of a branch abandons something, and that one may never be uploaded.
    """
    if not source or source[-1].run_id != lineage.run_id:
        return lineage  # Of a run that is over: a later branch may have begun in it.
    kept = {(info.step, info.run_id) for info in source}
    left = [info for info in target if (info.step, info.run_id) not in kept]
    there = abandoned_by(lineage.run_id, lineage.branch_point, left)
    return dataclasses.replace(lineage, abandons=tuple(dict.fromkeys((*lineage.abandons, *there))))


def continues(disk: CheckpointInfo | None, info: CheckpointInfo, target: Sequence[CheckpointInfo]) -> bool:
    """Return whether `info` of `target` comes after `disk`, the latest full checkpoint on disk; None for none.

    Of another run than that only if `target` has left that one: uploads come late, so what the disk has left by a roll
    back may still be there.
    """
    if disk is None:
        return True
    if info.run_id == disk.run_id:
        return info.step > disk.step
    left = {pair for each in target for pair in each.lineage.abandons}
    return (disk.step, disk.run_id) in left
