"""The weights of a checkpoint in a model, for evaluation: no optimizer, no data, no lease, while a job trains.

Full checkpoints, weights-only ones and those of other tools are taken alike. Nothing on disk changes: a damaged
checkpoint is skipped and stays where it is, for the job that owns the folder to set aside.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.load_source import new_run
from torchtitan_lite.checkpoint.resume.restore import Owners, Restore
from torchtitan_lite.checkpoint.resume.wrong_folder import checked_initial_path
from torchtitan_lite.checkpoint.state import arguments, fsdp1
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.events import ignore
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import of_equal_ranks
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import open_store, usable


def load_model(
    model: nn.Module | Sequence[nn.Module], folder: str | os.PathLike[str], step: int = -1, **checkpoint: Any
) -> int:
    """Load the model's weights of `step` (-1: the latest) and return the step. **Collective**; changes nothing on disk.

    `folder` holds `step-N` folders, full or weights-only ones, or is one checkpoint itself, of this or another tool.
    `checkpoint` takes keys of `[checkpoint]` about loading, such as `load_rename`, `load_strictness`,
    `save_trained_only` or `verify_on_load`. Floating tensors of another dtype are cast to the model's, unless
    `load_cast=False`. With the latest wanted, a damaged checkpoint is skipped, with a warning, and if the training job
    removes one during the load, the next is chosen. Raises `CheckpointNotFound`, `CheckpointMismatch` (before the model
    is touched), `CheckpointDamaged`, `AllCheckpointsDamaged`, `CheckpointUnreadable`, `FolderUnusable`, and
    ConfigError for a wrong argument.
    """
    config = loop_config(folder, {"load_cast": True, **checkpoint, "load_only": True})
    parts = arguments.model_parts(model)
    if config.checkpoint.save_trained_only:
        fsdp1.refuse_trained_only(parts)
    wrapper = ModelWrapper(parts, trained_only=config.checkpoint.save_trained_only)
    owners = Owners(wrapper, OptimizerWrapper(parts, [], {}))
    peers = Peers(timedelta(seconds=config.checkpoint.timeout_seconds))
    wanted = Wanted(step, config.checkpoint, is_exact=step != -1)
    candidates = Candidates(open_store(str(folder)), wanted, peers, ignore, choose=_choose)
    with closing(peers):
        for source in candidates:
            with candidates.trying(source):
                Restore(source, config, peers, owners, topology="").run()
    assert candidates.taken is not None, "a folder without checkpoints is refused, as is one in which all are damaged"
    return candidates.taken.step


def _choose(store: StoresCheckpoints, wanted: Wanted, skipped: Collection[int]) -> LoadSource | None:
    """Choose as `choose_source` does, among full and weights-only checkpoints; or `store` is one checkpoint itself.

    Return None if each one is in `skipped` or damaged. Raises `CheckpointNotFound`. Coordinator only.
    """
    if Path(store.address).is_file():
        checked_initial_path(store.address)  # Raises with what the file is.
    with usable(store.address):
        committed = store.committed()
        managed: dict[int, Place] = {info.step: info.path for info in committed}
        others = {number: path for path in store.unmanaged() if (number := layout.parse_step(path.name)) is not None}
        has_damaged = bool(store.damaged())
    if wanted.is_exact:
        paths = {**others, **managed}
        if wanted.step not in paths:
            raise CheckpointNotFound(store.address, wanted.step, sorted(paths))
        return _evaluation_source(paths[wanted.step], wanted.step, is_explicit=True)
    if left := of_equal_ranks([info for info in committed if info.step not in skipped]):
        return _evaluation_source(left[-1].path, left[-1].step, is_explicit=False)
    if managed or has_damaged:
        return None
    path = checked_initial_path(store.address)
    return _evaluation_source(path, layout.parse_step(path.name) or 0, is_explicit=True)


def _evaluation_source(path: Place, step: int, *, is_explicit: bool) -> LoadSource:
    return LoadSource(path, step, model_only=True, lineage=new_run(), is_explicit=is_explicit)
