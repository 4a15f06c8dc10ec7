"""The end of a run: whether it has come, what is still missing then, and how that is written.

A start may find a run that was killed between its last checkpoint and its export, or between that and its weights in
Hugging Face's format. Each of these is written only if it is missing, so a start of a run that is complete changes
nothing on disk. Every method is **collective**, and the caller has taken the folders where it says so.
"""

from __future__ import annotations

from torchtitan_lite.checkpoint.hugging_face.last_save import LastSave
from torchtitan_lite.checkpoint.resume.ending import Ended, ended_run, export_of
from torchtitan_lite.checkpoint.saving.run_saves import RunSaves
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.run_folders import RunFolders


class RunEnd:
    """The end of the run in `folders`; `last_save` is None if the run ends without Hugging Face's format."""

    def __init__(
        self, config: JobConfig, folders: RunFolders, saves: RunSaves, last_save: LastSave | None, peers: Peers
    ) -> None:
        self._config = config
        self._folders = folders
        self._saves = saves
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
            lambda: export_of(step, self._saves.origin.lineage.run_id, export, self._config) is None
        ):
            self._saves.export(step)
        if last_save is not None and not self._peers.on_coordinator(lambda: last_save.made(store.get(step))):
            last_save.write(step)

    def _found(self) -> tuple[Ended | None, bool]:
        if not self._config.checkpoint.enable_checkpoint:
            return None, False
        ended = ended_run(self._folders.checkpoints, self._folders.exports, self._config)
        if ended is None or ended.last is None or self._last_save is None:
            return ended, False
        return ended.also_in(self._last_save.root), not self._last_save.made(ended.last)
