"""Which checkpoints are to be uploaded, and what their commit abandons there. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.retention import RetentionPolicy, judge_checkpoints

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
    ones are there is never sent, nor what the run of the target has left: its commit would fail.
    """
    there = {save_of(info) for info in target}
    wanted = not_left(source, target)
    lacking = {info.step: info for info in wanted if save_of(info) not in there}
    together = {info.step: info for info in (*not_left(target, source), *wanted)} | lacking
    verdicts = judge_checkpoints(policy, [*together.values()], pinned=pinned, now=now)
    return [each.info for each in reversed(verdicts) if not each.goes and lacking.get(each.info.step) is each.info]


def not_left(infos: Sequence[CheckpointInfo], others: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return those of `infos` that the run of none of `others`, in another folder, has left behind."""
    lineages = {info.lineage for info in others}
    return [info for info in infos if not any(each.leaves(info.step, info.run_id) for each in lineages)]


def is_of_another_run(source: Sequence[CheckpointInfo], target: Sequence[CheckpointInfo]) -> bool:
    """Return whether `target` has checkpoints, and none of a run of `source`, of its ancestors or begun in it."""
    here, there = _family(source), _family(target)
    runs = {info.run_id for info in source}
    return bool(source and target) and here.isdisjoint(info.run_id for info in target) and there.isdisjoint(runs)


def _family(infos: Sequence[CheckpointInfo]) -> set[str]:
    """Return the runs of `infos` and their ancestors."""
    return {info.run_id for info in infos}.union(run for info in infos for _, run in info.lineage.ancestors)


def lineage_in(target: Sequence[CheckpointInfo], lineage: Lineage) -> Lineage:
    """Return the `lineage` of a checkpoint for `target`: its commit there abandons what its run has left.

    On disk only the first commit of a branch abandons something, and that one may never be uploaded.
    """
    left = ((info.step, info.run_id) for info in target if lineage.leaves(info.step, info.run_id))
    return dataclasses.replace(lineage, abandons=tuple(dict.fromkeys((*lineage.abandons, *left))))


def continues(disk: CheckpointInfo | None, info: CheckpointInfo) -> bool:
    """Return whether `info` of the target comes after `disk`, the latest full checkpoint on disk; None for none.

    Of another run it does if that run began in the one of `disk`: what `disk` has beyond is left behind.
    """
    if disk is None:
        return True
    return info.step > disk.step if info.run_id == disk.run_id else info.lineage.comes_from(disk.run_id)
