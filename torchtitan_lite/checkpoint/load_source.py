"""Which checkpoint a run starts from.

Decided on the coordinator alone, from what is in the folder and what was asked for. Automatic
resume takes the newest committed full checkpoint and nothing else; an explicit step is taken or
refused, never replaced by another; `initial_load_path` counts only while the run has no checkpoint
of its own, so that one command serves the first start and every restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointMismatch, CheckpointNotFound
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


@dataclass(frozen=True)
class LoadSource:
    """A checkpoint to load; `step` is where the run goes on from, 0 if it starts anew with these weights."""

    path: Path
    step: int
    model_only: bool
    nbytes: int = 0
    initial: bool = False


def choose_source(store: CheckpointStore, step: int, config: Checkpoint) -> LoadSource | None:
    """What to load when asked for `step` (-1: the newest); None: a fresh start. Raises `CheckpointNotFound`."""
    if step != -1:
        return _explicit(store, step)
    for path in store.unmanaged():
        logger.warning("%s has no manifest and is passed over; to load it, ask for its step or path.", path)
    latest = store.latest()
    if latest is not None:
        return _committed(latest)
    return _initial(config) if config.initial_load_path else None


def _explicit(store: CheckpointStore, step: int) -> LoadSource:
    unmanaged = {layout.parse_step(path.name): path for path in store.unmanaged()}
    if step in unmanaged:
        return LoadSource(unmanaged[step], step, model_only=step == 0)
    return _committed(store.get(step))


def _committed(info: CheckpointInfo) -> LoadSource:
    if info.kind is CheckpointKind.WEIGHTS_ONLY:
        raise CheckpointMismatch(
            str(info.path),
            "  it holds weights only: no optimizer, no position to go on from. To start a new run from these weights, "
            "set --checkpoint.initial_load_path to this folder and dump_folder to a new one.",
        )
    # Step 0 is a seed checkpoint: weights that a run begins with.
    return LoadSource(info.path, info.step, model_only=info.step == 0, nbytes=info.nbytes)


def _initial(config: Checkpoint) -> LoadSource:
    path = Path(config.initial_load_path)
    if not (path / layout.METADATA).is_file():
        raise CheckpointNotFound(str(path), None)
    return LoadSource(path, 0, model_only=config.initial_load_model_only, initial=True)
