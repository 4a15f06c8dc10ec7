"""The weights of a checkpoint in a model, for evaluation: no optimizer, no data, no lease, beside a job that trains.

Full checkpoints, weights-only ones and those of other tools are taken alike. Nothing on disk changes: a damaged
checkpoint is skipped and stays where it is, for the job that owns the folder to set aside.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from torchtitan_lite.checkpoint.resume.initial_path import checked_initial_path
from torchtitan_lite.checkpoint.resume.load_source import LoadSource, new_run
from torchtitan_lite.checkpoint.resume.restore import Restore
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointDamaged, CheckpointNotFound, CheckpointUnsafe
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.run_folders import usable
from torchtitan_lite.store.store import CheckpointStore


def load_model(
    model: nn.Module | Sequence[nn.Module], folder: str | os.PathLike[str], step: int = -1, **checkpoint: Any
) -> int:
    """Load the model's weights of `step` (-1: the latest) and return the step. **Collective**; changes nothing on disk.

    `folder` holds `step-N` folders, full or weights-only ones, or is one checkpoint itself, of this or another tool.
    `checkpoint` takes keys of `[checkpoint]` about loading, such as `load_rename`, `load_strictness`,
    `save_trained_only` or `verify_on_load`. Floating tensors of another dtype are cast to the model's. With the latest
    wanted, a damaged checkpoint is skipped, with a warning. Raises `CheckpointNotFound`, `CheckpointMismatch` (before
    the model is touched), `CheckpointDamaged`, `AllCheckpointsDamaged`, and ConfigError for a wrong argument.
    """
    config = loop_config(folder, {**checkpoint, "load_only": True})
    wrapper = ModelWrapper(arguments.model_parts(model), trained_only=config.checkpoint.save_trained_only)
    peers = Peers(timedelta(seconds=config.checkpoint.timeout_seconds))
    damaged: dict[int, str] = {}
    while True:
        source, damaged = peers.on_coordinator(functools.partial(_chosen, Path(folder), step, damaged))
        try:
            _restore(source, config, peers, wrapper)
        except (CheckpointDamaged, CheckpointUnsafe) as error:
            if source.is_explicit:
                raise
            damaged[source.saved_at] = error.finding
            if peers.is_coordinator:
                _warn(source.saved_at, error.finding)
        else:
            return source.saved_at


def _restore(source: LoadSource, config: JobConfig, peers: Peers, model: ModelWrapper) -> None:
    optimizer = OptimizerWrapper(model.parts, [], {})
    Restore(source, config, peers, model=model, optimizer=optimizer, small_states={}, topology="").run()


def _chosen(folder: Path, step: int, damaged: Mapping[int, str]) -> tuple[LoadSource, dict[int, str]]:
    """Return the checkpoint to load, and the damaged ones by step. Coordinator only; raises `CheckpointNotFound`."""
    store = CheckpointStore(folder)
    with usable(folder):
        places = {info.step: info.path for info in store.committed()}
        found = {number: error.finding for number, error in store.damaged().items() if number not in damaged}
        others = {number: path for path in store.unmanaged() if (number := layout.parse_step(path.name)) is not None}
    if step != -1:
        places = {**others, **places}
        if step not in places:
            raise CheckpointNotFound(str(folder), step, sorted(places))
        return _source(places[step], step, is_explicit=True), {}
    for number, finding in found.items():
        _warn(number, finding)
    damaged = {**damaged, **found}
    if candidates := [number for number in sorted(places) if number not in damaged]:
        return _source(places[candidates[-1]], candidates[-1], is_explicit=False), damaged
    if damaged:
        raise AllCheckpointsDamaged(str(folder), damaged)
    path = checked_initial_path(str(folder))
    return _source(path, layout.parse_step(path.absolute().name) or 0, is_explicit=True), damaged


def _source(path: Path, step: int, *, is_explicit: bool) -> LoadSource:
    lineage = new_run()
    return LoadSource(path, 0, model_only=True, lineage=lineage, initial=True, is_explicit=is_explicit, found_at=step)


def _warn(step: int, finding: str) -> None:
    logger.warning("Step %d is damaged: %s. Trying an older one", step, finding)
