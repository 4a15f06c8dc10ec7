"""The end of a run: whether it has come, what is still missing then, and how that is written.

A start may find a run that was killed between its last checkpoint and its export, or between that and its weights in
Hugging Face's format. Each of these is written only if it is missing, so a start of a run that is complete changes
nothing on disk. Every method is **collective**, and the caller has taken the folders where it says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.resume.ending import Ended, ended_run, export_of
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.maker import SaveMaker
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest import CheckpointInfo


class LastExport(Protocol):
    """The weights of a run's last step in a format of other libraries, made from the committed checkpoint."""

    root: Path
    """The folder of all steps in that format."""

    def refuse_foreign_folder(self) -> None:
        """Raise ConfigError if something that no run wrote has the place of the last step. Any rank."""

    def made(self, checkpoint: CheckpointInfo) -> bool:
        """Return whether the complete export of `checkpoint` is there. **Coordinator only**."""
        ...

    def write(self, step: int) -> None:
        """Write the export of the committed checkpoint of `step`, durable on return. **Collective**."""


class LastFormat(Protocol):
    """Knows how a model is written in a format of other libraries, such as a `HuggingFaceModel`."""

    def last_export(self, config: JobConfig, run: RunState, folders: RunFolders, context: RunContext) -> LastExport:
        """Return what writes the last step of `run`. Any rank."""
        ...


class RunEnd:
    """The end of the run in `folders`; `last_save` is None if the run ends in no format of other libraries."""

    def __init__(
        self, config: JobConfig, folders: RunFolders, maker: SaveMaker, last_save: LastExport | None, peers: Peers
    ) -> None:
        self._config = config
        self._folders = folders
        self._maker = maker
        self._last_save = last_save
        self._peers = peers

    def found(self) -> tuple[Ended | None, bool]:
        """Return how the run ended, and whether it lacks its weights in Hugging Face's format. Changes nothing."""
        return self._peers.on_coordinator(self._found)

    def refuse_foreign_folder(self) -> None:
        """Raise ConfigError if what no run wrote has the place of the last step in Hugging Face's format."""
        if self._last_save is not None:
            self._peers.on_coordinator(self._last_save.refuse_foreign_folder)

    def write_hugging_face(self, step: int) -> None:
        """Write the committed `step` in Hugging Face's format, if the run ends in it. Under the lease; durable."""
        if self._last_save is not None and not self._config.checkpoint.load_only:
            self._last_save.write(step)

    def write_missing(self, step: int) -> None:
        """Write what the last `step`, now the state, still lacks. Under the lease; durable, raises `SaveFailed`."""
        store, export, last_save = self._folders.checkpoints, self._folders.exports, self._last_save
        if export is not None and self._peers.on_coordinator(
            lambda: export_of(step, self._maker.origin.lineage.run_id, export, self._config) is None
        ):
            self._maker.export(step)
        if last_save is not None and not self._peers.on_coordinator(lambda: last_save.made(store.get(step))):
            last_save.write(step)

    def _found(self) -> tuple[Ended | None, bool]:
        if not self._config.checkpoint.enable_checkpoint:
            return None, False
        ended = ended_run(self._folders.checkpoints, self._folders.exports, self._config)
        if ended is None or ended.last is None or self._last_save is None:
            return ended, False
        return ended.also_in(self._last_save.root), not self._last_save.made(ended.last)


def build_last_save(
    format: LastFormat | None, config: JobConfig, run: RunState, folders: RunFolders, context: RunContext
) -> LastExport | None:
    """Return the last export of `run` in `format`, None if `config` wants none. Raises ConfigError without `format`."""
    section = config.checkpoint
    if not section.last_save_in_hf or not section.enable_checkpoint or section.create_seed_checkpoint:
        return None
    if format is None:
        raise ConfigError(
            "checkpoint.last_save_in_hf: nothing says where the tensors of this model are in Hugging Face's files. "
            "Pass hugging_face=HuggingFaceModel(config, places); docs/own_loop.md shows one."
        )
    return format.last_export(config, run, folders, context)
