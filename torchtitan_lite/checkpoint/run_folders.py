"""The folders of a run: its checkpoints, its exports, and the leases that reserve both for this job.

While a lease is held no other job writes there; taking the folders removes what a crash left. Methods that touch a
folder are **coordinator only**.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torchtitan_lite import faults
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.probe import log_lacks
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.store import recover_with_log
from torchtitan_lite.stores import look_seconds, open_store, usable


class RunFolders:
    """The stores `checkpoints` and, if the run exports, `exports`."""

    def __init__(self, config: JobConfig, run_id: str, checkpoints: StoresCheckpoints | None = None) -> None:
        section, dump_folder = config.checkpoint, config.job.dump_folder
        patience = look_seconds(section.timeout_seconds)
        # A store checks the lease that it gave last: one that was handed in may be that of another manager, too.
        given = copy.copy(checkpoints)
        self.checkpoints = given or open_store(section.folder, dump_folder, patience)
        self.exports = open_store(section.export_folder, dump_folder, patience) if section.export_folder else None
        self.uploads = open_store(section.upload_folder, dump_folder) if section.upload_folder else None
        """The second folder of checkpoints, which another process holds; None for none."""
        self._stores = [store for store in (self.checkpoints, self.exports) if store is not None]
        self._leases = {store: store.lease(run_id, section.lease_timeout_seconds) for store in self._stores}

    @property
    def addresses(self) -> list[str]:
        """The folders, as people write them. Any rank."""
        return [store.address for store in self._stores]

    @property
    def mounts(self) -> list[str]:
        """What each of `addresses` is on, as this rank sees it; empty for an object store. Any rank."""
        return ["" if store.root is None else mount_of(store.root) for store in self._stores]

    @property
    def identities(self) -> list[str]:
        """The folders, each the same however it is spelt. Any rank."""
        return [store.identity for store in self._stores]

    @property
    def on_disk(self) -> list[StoresCheckpoints]:
        """Those that are on disk. Any rank."""
        return [store for store in self._stores if store.root is not None]

    @property
    def are_all_on_disk(self) -> bool:
        """Return whether all are on disk, that of uploads included. Any rank."""
        return all(store.root is not None for store in (*self._stores, self.uploads or self.checkpoints))

    def take(self) -> list[str]:
        """Reserve the folders for this job, remove what a crash left, and try what their file systems lack.

        Return the tokens of the leases.

        Raises `FolderInUse`, `FolderUnusable`, and `ConfigError` if both are the same folder.
        """
        self._refuse_one_for_both()
        faults.point("lease")
        # All leases before the first recovery, which removes files: until then they may be another job's.
        for store, lease in self._leases.items():
            with usable(store.address):
                lease.take()
        faults.point("recover")
        for store in self._stores:
            with usable(store.address):
                recover_with_log(store)
                if store.root is not None:
                    log_lacks(store.root)
        return [lease.token for lease in self._leases.values()]

    def unseen(self, tokens: Sequence[str]) -> list[int]:
        """Return which of `addresses` have leases that this host does not see with their `tokens`.

        Any rank. `tokens` are those that `take` returned on the coordinator, which may have another number of folders.
        Raises `FolderUnusable` where the system does not let this rank see.
        """
        found = []
        for number, (store, token) in enumerate(zip(self._stores, tokens, strict=False)):
            with usable(store.address):
                if not self._leases[store].is_visible(token):
                    found.append(number)
        return found

    def release(self) -> None:
        """Give the folders up to other jobs."""
        for lease in self._leases.values():
            lease.release()

    def _refuse_one_for_both(self) -> None:
        if self.uploads is not None and self.uploads.identity in self.identities:
            raise ConfigError(
                f"checkpoint.upload_folder: {self.uploads.address} is already another folder of this run. Name a "
                "separate one."
            )
        if self.exports is not None and self.exports.identity == self.checkpoints.identity:
            raise ConfigError(
                f"checkpoint.export_folder: {self.exports.address} is also the folder of checkpoints, where the "
                "export would replace the last full checkpoint. Name another folder."
            )
