"""Which checkpoint a run starts from, and of which run it then is.

Decided on the coordinator alone, from what is in the folder and what was asked for. Automatic
resume takes the latest committed full checkpoint and nothing else. A `load_step` of the
configuration begins a branch there; asked for again, once the branch has checkpoints of its own, it
is the latest of those that is taken, so that a restart of the same command throws nothing away. A
step that a caller names is that step, whatever came after it. `initial_load_path` counts only while
the run has no checkpoint of its own, so that one command serves first start and restart.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.resume.initial_path import checked_initial_path
from torchtitan_lite.checkpoint.resume.seed import is_seed
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.manifest_fields import NAN_IN
from torchtitan_lite.store.store import CheckpointStore

_TRAIN_STATE = "train_state"


@dataclass(frozen=True)
class LoadSource:
    """A checkpoint to load."""

    path: Path
    step: int
    """Where the run goes on from; 0 if it starts anew with these weights."""
    model_only: bool
    lineage: Lineage
    """Of the run that goes on from it."""
    nbytes: int = 0
    initial: bool = False
    """Whether it is another run's, taken as a beginning."""
    is_explicit: bool = False
    """Whether just this one was asked for: no other one will do."""
    topology: str = ""
    """Of the run that saved it; empty if unknown."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of the run that saved it; empty if unknown."""
    tensor_digests: dict[str, str] = field(default_factory=dict)
    """By key; empty if it has none."""
    excluded: tuple[str, ...] = ()
    """States that this load leaves as they are."""
    has_nan: bool = False
    """Whether NaN was seen in its weights when they were saved."""

    found_at: int | None = None
    """The step at which it was saved, where the run that begins with it does not go on from there."""

    @property
    def saved_at(self) -> int:
        """The step at which it was saved."""
        return self.step if self.found_at is None else self.found_at

    @property
    def continues_at(self) -> int | None:
        """The step that the run goes on from; None if it counts from the start."""
        return None if self.lineage.counts_again or (self.initial and self.model_only) else self.step


def new_run() -> Lineage:
    """The lineage of a run that begins."""
    return Lineage(run_id=uuid.uuid4().hex[:8])


def choose_source(
    store: CheckpointStore,
    step: int,
    config: Checkpoint,
    skipped: Collection[int] = (),
    *,
    is_exact: bool = False,
) -> LoadSource | None:
    """What to load when asked for `step` (-1: the latest); None: a fresh start. Raises `CheckpointNotFound`.

    Steps in `skipped` are as if they were not there, unless `step` is one of them. `is_exact`: `step` itself is
    meant, not the latest of a branch that was begun there.
    """
    source = _chosen(store, step, config, skipped, is_exact)
    return None if source is None else _with_exclusions(source, config)


def latest_step(store: CheckpointStore, config: Checkpoint) -> int:
    """The latest committed step, full or weights only, of what a load would go on with; -1 if there is none."""
    return max((info.step for info in of_the_run(store, config)), default=-1)


def of_the_run(store: CheckpointStore, config: Checkpoint) -> list[CheckpointInfo]:
    """Return what is committed, full or weights only, of what a load would go on with, by ascending step."""
    committed = [info for info in store.committed() if _is_whole(info, store)]
    if config.load_step != -1:
        committed = [info for info in committed if is_branch_of(info, config.load_step, config)]
    full = [info for info in committed if info.kind is CheckpointKind.FULL]
    if full and _with_exclusions(_committed(full[-1]), config).lineage.counts_again:
        return []
    return committed


def _is_whole(info: CheckpointInfo, store: CheckpointStore) -> bool:
    try:
        return not store.check_sizes(info)
    except CheckpointUnreadable:
        return False  # If it matters, the load that follows says so.


def is_branch_of(info: CheckpointInfo | None, step: int, config: Checkpoint) -> bool:
    """Whether `info` is on a branch begun at `step`, and no other one is asked for."""
    return info is not None and info.lineage.branch_point == step and not config.new_branch


def _chosen(
    store: CheckpointStore, step: int, config: Checkpoint, skipped: Collection[int], is_exact: bool
) -> LoadSource | None:
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL and info.step not in skipped]
    latest = full[-1] if full else None
    if step != -1 and (is_exact or not is_branch_of(latest, step, config)):
        return _explicit(store, step)
    if latest is not None:
        return _of_a_run_that_continues(_committed(latest), store)
    return _initial(config) if config.initial_load_path else None


def _with_exclusions(source: LoadSource, config: Checkpoint) -> LoadSource:
    """`source` without what `config` excludes; where that is the step counter, the run counts again, on a branch.

    A checkpoint of a run that began so is its own: all of it is loaded, or each restart would count again.
    """
    if source.model_only:
        return source
    if _TRAIN_STATE not in config.exclude_from_loading:
        return dataclasses.replace(source, excluded=config.exclude_from_loading)
    is_its_own = not source.initial and _TRAIN_STATE in _exclusions_of(source.config)
    if is_its_own and not config.new_branch:
        return source
    # With the branch point of before: asked for by the same `load_step` again, it is this branch that goes on.
    run_id, parent = new_run().run_id, source.lineage.parent_step
    lineage = dataclasses.replace(source.lineage, run_id=run_id, parent_step=parent, counts_again=True)
    return dataclasses.replace(source, excluded=config.exclude_from_loading, lineage=lineage)


def _exclusions_of(config: dict[str, Any]) -> Collection[str]:
    """What the configuration in a manifest, which may hold anything, excluded from loading."""
    section = config.get("checkpoint")
    excluded = section.get("exclude_from_loading") if isinstance(section, dict) else None
    return excluded if isinstance(excluded, list) else ()


def _of_a_run_that_continues(source: LoadSource, store: CheckpointStore) -> LoadSource:
    """`source`; of a new run if checkpoints of its own were abandoned, for what it saves would be taken for these."""
    abandoned = {run_id for info in store.intact() for _, run_id in info.lineage.abandons}
    if source.lineage.run_id not in abandoned:
        return source
    return dataclasses.replace(source, lineage=dataclasses.replace(new_run(), parent_step=source.step))


def _explicit(store: CheckpointStore, step: int) -> LoadSource:
    unmanaged = {layout.parse_step(path.name): path for path in store.unmanaged()}
    branch = dataclasses.replace(new_run(), parent_step=step, branch_point=step)
    if step in unmanaged:
        path = unmanaged[step]
        return LoadSource(path, step, model_only=is_seed(path, step), lineage=branch, is_explicit=True)
    return dataclasses.replace(_committed(store.get(step)), lineage=branch, is_explicit=True)


def _committed(info: CheckpointInfo) -> LoadSource:
    if info.kind is CheckpointKind.WEIGHTS_ONLY:
        raise CheckpointMismatch(
            str(info.path),
            "  it holds weights only: no optimizer, no position to go on from. To start a new run from these weights, "
            "set --checkpoint.initial_load_path to this folder and dump_folder to a new one.",
        )
    source = LoadSource(
        info.path,
        info.step,
        model_only=is_seed(info.path, info.step),
        lineage=dataclasses.replace(info.lineage, parent_step=info.step, abandons=()),
        nbytes=info.nbytes,
    )
    return _with_origin(source)


def _initial(config: Checkpoint) -> LoadSource:
    path = checked_initial_path(config.initial_load_path)
    saved_at = _step_of(path)
    step = 0 if config.initial_load_model_only else saved_at
    return _with_origin(
        LoadSource(
            path,
            step,
            model_only=config.initial_load_model_only,
            lineage=new_run(),
            initial=True,
            is_explicit=True,
            found_at=saved_at,
        )
    )


def _step_of(path: Path) -> int:
    """The step of the checkpoint at `path`: its manifest says it, or where another tool wrote it, its name; else 0."""
    manifest = CheckpointFolder(path).manifest
    return manifest.step if manifest is not None else layout.parse_step(path.absolute().name) or 0


def _with_origin(source: LoadSource) -> LoadSource:
    """`source` with what its manifest, if it has one, says of the run that saved it."""
    manifest = CheckpointFolder(source.path).manifest
    if manifest is None:
        return source
    extra = manifest.extra
    return dataclasses.replace(
        source,
        topology=extra.get("topology", ""),
        config=extra.get("config", {}),
        tensor_digests=extra.get("tensor_digests", {}),
        has_nan=bool(extra.get(NAN_IN)),
    )
