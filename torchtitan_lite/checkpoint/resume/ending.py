"""Decides whether a run has ended and left the checkpoints that its configuration wants.

A run has ended when its last full checkpoint is there and, with an export folder, the export of the same
step; without one, a weights-only checkpoint is enough. The last step is `training.steps`, or an earlier
one where the data ended. Only the checkpoint that a run makes at its end shows the latter: an export or a
weights-only step below the run's `training.steps`. Reads manifests and file sizes; changes nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.source import recorded_section
from torchtitan_lite.checkpoint.resume.load_source import checkpoints_of_run
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.manifest_fields import CONFIG
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import usable

_SAYS_WHERE_DATA_END = ("dataset", "dataset_path", "dataset_text_key", "seq_len", "max_epochs")
"""Keys of [training]: while they are unchanged, the data ends at the same step."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its last step, and the folders that hold it."""

    step: int
    folders: tuple[str, ...]
    by_data: bool = False
    """Whether the data ended before `training.steps`."""
    last: CheckpointInfo | None = field(default=None, compare=False, repr=False)
    """Its last checkpoint."""

    def also_in(self, folder: Path) -> Ended:
        """Return this with `folder` as a further one that holds the last step."""
        return dataclasses.replace(self, folders=(*self.folders, str(folder)))

    def summary(self, steps: int) -> str:
        """Return a sentence for the log of a run that asked for `steps`: what it left, and how to train on."""
        *others, last = self.folders
        where = f"{', '.join(others)} and {last}" if others else last
        if self.by_data:
            return f"the data ended at step {self.step}, which is in {where}. To continue, raise --training.max_epochs."
        if self.step > steps:
            return (
                f"step {self.step} is in {where}, beyond --training.steps={steps}. "
                f"To continue, raise --training.steps above {self.step}."
            )
        return f"step {self.step} of {steps} is in {where}. To continue, raise --training.steps."


def ended_run(store: StoresCheckpoints, export: StoresCheckpoints | None, config: JobConfig) -> Ended | None:
    """Return how the run in `store` ended; None while there is something left to train, save or export.

    `export` is the store of exports, None if the run makes none. **Coordinator only**.
    """
    steps = checkpoints_of_run(store, config.checkpoint)
    if export is not None:
        steps = [info for info in steps if info.kind is CheckpointKind.FULL]
    if not steps:
        return None
    last = steps[-1]
    made_last = last if export is None else export_of(last.step, last.run_id, export, config)
    if made_last is None:
        return None
    by_data = last.step < config.training.steps
    if by_data and not _was_ended_by_data(made_last, config):
        return None
    return Ended(last.step, (store.address,) if export is None else (store.address, export.address), by_data, last)


def export_of(step: int, run_id: str, export: StoresCheckpoints, config: JobConfig) -> CheckpointInfo | None:
    """Return the complete export of `step` of the run `run_id`, as `config` wants it, from `export`; None if missing.

    An export of another run, such as of a branch that was left, does not count, nor one of another dtype.
    **Coordinator only**.
    """
    with usable(export.address):
        info = next((info for info in export.committed() if info.step == step), None)
    if info is None or info.run_id != run_id or export.check_sizes(info):
        return None
    dtype = _config_section(info, "checkpoint").get("export_dtype", config.checkpoint.export_dtype)
    return info if {dtype} == {config.checkpoint.export_dtype} else None


def _was_ended_by_data(made_last: CheckpointInfo, config: JobConfig) -> bool:
    if made_last.kind is not CheckpointKind.WEIGHTS_ONLY:
        return False  # A run makes full ones before its end, too.
    then, now = _config_section(made_last, "training"), config.to_dict()["training"]
    steps = then.get("steps")
    return (
        isinstance(steps, int)
        and made_last.step < steps
        and bool(then.get("max_epochs"))
        and all(then.get(name) == now[name] for name in _SAYS_WHERE_DATA_END)
    )


def _config_section(info: CheckpointInfo, name: str) -> dict[str, Any]:
    """Return the section `name` of the configuration in the manifest of `info`; empty if it has none."""
    manifest = CheckpointFolder(info.path).manifest_alone
    return {} if manifest is None else recorded_section(manifest.extra.get(CONFIG), name)
