"""Decides which checkpoint a run starts from, and which lineage it then has.

Every function runs on the coordinator only, and decides from the folder and the configuration: on a shared file system
two ranks can see two different folders for some seconds. Automatic resume takes the latest committed full checkpoint
and nothing else, or what a run that diverged rolls back to, if a kill cut that short; it skips one whose ranks differed
when it was saved, if there is another. `load_step` begins a branch at that step; once the branch has checkpoints, the
same `load_step` takes the latest of these, so that a restart of the same command loses nothing. A step that a caller
passes to `load` is that very step, whatever came after it. `initial_load_path` counts only while the run has no
checkpoint of its own, so that one command serves for the first start and for restarts.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection, Sequence

from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.source import LoadSource, RunFacts, Wanted, counts_again
from torchtitan_lite.checkpoint.resume.wrong_folder import checked_initial_path
from torchtitan_lite.config.job_config import EXCLUDABLE_STATES, Checkpoint
from torchtitan_lite.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, CheckpointUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, of_equal_ranks
from torchtitan_lite.store.manifest_fields import (
    CONFIG,
    NAN_IN,
    NEVER_FINITE,
    RANKS_DIFFER,
    TENSOR_DIGESTS,
    TOPOLOGY,
    TRAINED_SECONDS,
)
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.rollbacks import Rollback, joint_rollbacks, of_run, unfinished
from torchtitan_lite.stores import usable


def new_run() -> Lineage:
    """Return the lineage of a new run."""
    return Lineage(run_id=uuid.uuid4().hex[:8])


def choose_source(
    store: StoresCheckpoints, wanted: Wanted, skipped: Collection[int] = (), rollbacks: Sequence[Rollback] = ()
) -> LoadSource | None:
    """Return what to load of what is `wanted`; None for a fresh start. **Coordinator only**.

    Ignores the steps in `skipped`, unless one of them is the step that is wanted. `rollbacks` are those on record in
    another folder of the run, which count, too. Raises `CheckpointNotFound`, and `CheckpointMismatch` for a step that
    holds only weights.
    """
    found = joint_rollbacks(rollbacks, store.rollbacks.read())
    if wanted.rolls_back:
        source: LoadSource | None = _rolled_back(store, found[-1], skipped)
    else:
        source = _chosen_source(store, wanted, skipped, found)
    if source is None:
        return None
    source = with_exclusions(source, wanted.config)
    return dataclasses.replace(source, rollbacks=of_run(found, source.lineage))


def good_steps(store: StoresCheckpoints, rollback: Rollback, skipped: Collection[int] = ()) -> list[CheckpointInfo]:
    """Return the checkpoints to which `rollback` may go and in which nothing was found wrong when they were saved."""
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL and info.step not in skipped]
    # What an earlier rollback has left may still be there, if nothing was saved since.
    left = rollback.left
    before = [info for info in full if info.step <= rollback.last and not left.leaves(info.step, info.run_id)]
    # A folder that was named by mistake, such as that of uploads, may hold another run.
    return [info for info in before if info.is_good and left.is_of(info.run_id)]


def _rolled_back(store: StoresCheckpoints, rollback: Rollback, skipped: Collection[int]) -> LoadSource:
    if not (good := good_steps(store, rollback, skipped)):
        finding = (
            f"it has no checkpoint of step {rollback.last} or before in which nothing was found wrong, and the run is "
            f"to roll back {rollback}. To resume from the latest one, move {layout.ROLLBACKS} away"
        )
        raise CheckpointNotFound(store.address, None, finding=finding)
    source = _committed(good[-1])
    return dataclasses.replace(source, lineage=rollback.left.rolled_back(rollback.run_id, source.step))


def latest_step(store: StoresCheckpoints, config: Checkpoint) -> int:
    """Return the latest committed step, full or weights-only, of the run that a load would resume; -1 for none."""
    return max((info.step for info in checkpoints_of_run(store, config)), default=-1)


def checkpoints_of_run(store: StoresCheckpoints, config: Checkpoint) -> list[CheckpointInfo]:
    """Return the committed checkpoints, full or weights-only, of the run that a load would resume, by step."""
    with usable(store.address):
        committed = [*of_equal_ranks([info for info in store.committed() if _has_recorded_sizes(info, store)])]
    if config.load_step != -1:
        committed = [info for info in committed if is_branch_of(info, config.load_step, config)]
    full = [info for info in committed if info.kind is CheckpointKind.FULL]
    if full and with_exclusions(_committed(full[-1]), config).lineage.counts_again:
        return []
    return committed


def _has_recorded_sizes(info: CheckpointInfo, store: StoresCheckpoints) -> bool:
    try:
        return not store.check_sizes(info)
    except CheckpointUnreadable:
        return False  # If it matters, the load that follows raises it.


def has_full(store: StoresCheckpoints) -> bool:
    """Return whether `store` has a full checkpoint, or had one: damaged ones are no fresh start."""
    has_undamaged = any(info.kind is CheckpointKind.FULL for info in store.committed())
    return has_undamaged or bool(store.damaged()) or bool(store.unreadable())


def is_branch_of(info: CheckpointInfo | None, step: int, config: Checkpoint) -> bool:
    """Return whether `info` is on a branch that began at `step`, and `config` does not ask for a new branch."""
    return info is not None and info.lineage.branch_point == step and not config.new_branch


def _chosen_source(
    store: StoresCheckpoints, wanted: Wanted, skipped: Collection[int], found: Sequence[Rollback]
) -> LoadSource | None:
    step, config = wanted.step, wanted.config
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL and info.step not in skipped]
    latest = of_equal_ranks(full)[-1] if full else None
    if step != -1 and (wanted.is_exact or not is_branch_of(latest, step, config)):
        return _explicit(store, step, config)
    if latest is not None and (rollback := unfinished(found, latest.run_id)) is not None:
        return _rolled_back(store, rollback, skipped)
    if latest is not None:
        source = dataclasses.replace(
            _committed(latest), skipped=tuple(info.step for info in full if info.step > latest.step)
        )
        return _of_a_run_that_continues(source, store)
    # What `initial_load_in_hf` names is no checkpoint: it is imported as step 0, which is then the latest one.
    return _initial(config) if config.initial_load_path and not config.initial_load_in_hf else None


def with_exclusions(source: LoadSource, config: Checkpoint) -> LoadSource:
    """Return `source` without the states that `config` excludes. Without the step counter, the run counts from the
    start again, on a branch.

    A checkpoint of a run that began like this is loaded completely: else each restart would count from the start again.
    """
    if source.model_only:
        return source
    if "train_state" not in config.exclude_from_loading:
        return dataclasses.replace(source, excluded=config.exclude_from_loading)
    is_its_own = not source.initial and counts_again(source.recorded.config)
    if is_its_own and not config.new_branch:
        return source
    # With the branch point, the same `load_step` continues this branch at the next start; that of an older branch is a
    # step of the old count.
    begun = source.lineage.branch_point if source.lineage.branch_point == config.load_step else None
    lineage = dataclasses.replace(
        new_run(),
        parent_step=source.lineage.parent_step,
        branch_point=begun,
        counts_again=True,
        ancestors=() if source.initial else source.lineage.branch(-1),
    )
    return dataclasses.replace(source, excluded=config.exclude_from_loading, lineage=lineage)


def _of_a_run_that_continues(source: LoadSource, store: StoresCheckpoints) -> LoadSource:
    """Return `source`, with a new run id if checkpoints of its run were abandoned: new ones would count as these."""
    abandoned = {run_id for info in store.intact() for _, run_id in info.lineage.abandons}
    if source.lineage.run_id not in abandoned:
        return source
    ancestors = source.lineage.branch(source.step)
    lineage = dataclasses.replace(new_run(), parent_step=source.step, ancestors=ancestors)
    return dataclasses.replace(source, lineage=lineage)


def _explicit(store: StoresCheckpoints, step: int, config: Checkpoint) -> LoadSource:
    unmanaged = {layout.parse_step(path.name): path for path in store.unmanaged()}
    branch = dataclasses.replace(new_run(), parent_step=step, branch_point=step)
    if step in unmanaged:
        path = unmanaged[step]
        return LoadSource(path, step, model_only=is_seed(path, step), lineage=branch, is_explicit=True)
    found = _committed(store.get(step))
    # Within the branch of `load_step` it is a part of that, so that the same command continues it.
    begun = found.lineage.branch_point if found.lineage.branch_point == config.load_step else step
    branch = dataclasses.replace(branch, branch_point=begun, ancestors=found.lineage.branch(step))
    return dataclasses.replace(found, lineage=branch, is_explicit=True)


def _committed(info: CheckpointInfo) -> LoadSource:
    if info.kind is CheckpointKind.WEIGHTS_ONLY:
        raise CheckpointMismatch(
            str(info.path),
            "  it holds weights only: no optimizer, no position in the data. To start a new run from these weights, "
            "set --checkpoint.initial_load_path to this folder and dump_folder to a new one.",
        )
    lineage = dataclasses.replace(info.lineage, parent_step=info.step, abandons=())
    model_only = is_seed(info.path, info.step)
    return _with_origin(LoadSource(info.path, info.step, model_only=model_only, lineage=lineage, nbytes=info.nbytes))


def _initial(config: Checkpoint) -> LoadSource:
    path, model_only = checked_initial_path(config.initial_load_path), config.initial_load_model_only
    saved_at = _step_of(path)
    step = 0 if model_only else saved_at
    source = LoadSource(path, step, model_only=model_only, lineage=new_run(), initial=True, is_explicit=True)
    return _with_origin(dataclasses.replace(source, found_at=saved_at))


def _step_of(path: Place) -> int:
    """Return the step of the checkpoint at `path`, from its manifest, or without one from its name; else 0."""
    manifest = CheckpointFolder(path).manifest_alone
    return manifest.step if manifest is not None else layout.parse_step(on_disk(path).absolute().name) or 0


def _with_origin(source: LoadSource) -> LoadSource:
    """Return `source` with what its manifest, if there is one, records about the run that saved it."""
    manifest = CheckpointFolder(source.path).manifest_alone
    if manifest is None:
        return source
    extra = manifest.extra
    recorded = RunFacts(
        topology=extra.get(TOPOLOGY, ""),
        config=extra.get(CONFIG, {}),
        tensor_digests=extra.get(TENSOR_DIGESTS, {}),
        has_nan=bool(extra.get(NAN_IN)),
        never_finite=extra.get(NEVER_FINITE, ()),
        ranks_differ=bool(extra.get(RANKS_DIFFER)),
        trained_seconds=extra.get(TRAINED_SECONDS, 0.0),
    )
    return dataclasses.replace(source, recorded=recorded)


_OF_A_RUN = tuple(f"{name}." for name in EXCLUDABLE_STATES)
"""Beginnings of keys that are in every full checkpoint, ours and torchtitan's, and in no seed checkpoint of ours."""


def is_seed(path: Place, step: int) -> bool:
    """Return whether the checkpoint of `step` at `path` is a seed; for an unreadable step 0, True. Coordinator.

    A seed is a step 0 with the model alone; one with an optimizer is the first of a loop that counts from 0.
    """
    if step != 0:
        return False
    try:
        contents = CheckpointFolder(path, "off").contents
    except CheckpointError:
        return True  # The load that follows meets the same error, and raises it.
    return not any(key.startswith(_OF_A_RUN) for key in contents)
