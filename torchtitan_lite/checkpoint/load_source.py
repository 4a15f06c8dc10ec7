"""Which checkpoint a run starts from, and of which run it then is.

Decided on the coordinator alone, from what is in the folder and what was asked for. Automatic
resume takes the newest committed full checkpoint and nothing else. An explicit step begins a branch
there; asked for again, once the branch has checkpoints of its own, it is the newest of those that is
taken, so that a restart of the same command throws nothing away. `initial_load_path` counts only
while the run has no checkpoint of its own, so that one command serves first start and restart.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.initial_path import checked_initial_path
from torchtitan_lite.checkpoint.seed import is_seed
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.store import CheckpointStore


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


def new_run() -> Lineage:
    """The lineage of a run that begins."""
    return Lineage(run_id=uuid.uuid4().hex[:8])


def choose_source(
    store: CheckpointStore, step: int, config: Checkpoint, passed_over: Collection[int] = ()
) -> LoadSource | None:
    """What to load when asked for `step` (-1: the newest); None: a fresh start. Raises `CheckpointNotFound`.

    Steps in `passed_over` are as if they were not there, unless `step` is one of them.
    """
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL and info.step not in passed_over]
    latest = full[-1] if full else None
    if step != -1 and not is_branch_of(latest, step, config):
        return _explicit(store, step)
    if latest is not None:
        return _of_a_run_that_goes_on(_committed(latest), store)
    return _initial(config) if config.initial_load_path else None


def is_branch_of(info: CheckpointInfo | None, step: int, config: Checkpoint) -> bool:
    """Whether `info` is on a branch begun at `step`, and no other one is asked for."""
    return info is not None and info.lineage.branch_point == step and not config.new_branch


def _of_a_run_that_goes_on(source: LoadSource, store: CheckpointStore) -> LoadSource:
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
    step = 0 if config.initial_load_model_only else _step_of(path)
    return _with_origin(
        LoadSource(
            path,
            step,
            model_only=config.initial_load_model_only,
            lineage=new_run(),
            initial=True,
            is_explicit=True,
        )
    )


def _step_of(path: Path) -> int:
    """The step of the checkpoint at `path`: its manifest says it, or where another tool wrote it, its name; else 0."""
    manifest = Manifest.of_folder(path)
    return manifest.step if manifest is not None else layout.parse_step(path.absolute().name) or 0


def _with_origin(source: LoadSource) -> LoadSource:
    """`source` with what its manifest, if it has one, says of the run that saved it."""
    manifest = Manifest.of_folder(source.path)
    if manifest is None:
        return source
    extra = manifest.extra
    return dataclasses.replace(
        source,
        topology=str(extra.get("topology", "")),
        config=dict(extra.get("config", {})),
        tensor_digests=dict(extra.get("tensor_digests", {})),
    )
