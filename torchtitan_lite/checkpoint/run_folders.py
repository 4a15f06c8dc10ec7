"""The folders of a run: its checkpoints, its exports, and the leases that reserve both for this job.

While a lease is held no other job writes there; taking the folders removes what a crash left. Methods that touch a
folder are **coordinator only**.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.disk.new_file import LOOK_SECONDS
from torchtitan_lite.errors import ConfigError, FolderUnusable, TorchtitanLiteError
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.store import CheckpointStore, recover


def open_store(folder: str, dump_folder: str = "", look_seconds: float = LOOK_SECONDS) -> StoresCheckpoints:
    """Return the store of `folder`: an address such as s3://bucket/run, else a path below `dump_folder`. Any rank.

    `look_seconds`: for how long a rank looks for the folder of a save that another host made.
    Touches neither disk nor network. Raises ConfigError for another address, `ExtraMissing` without the client of one.
    """
    if not is_in_object_store(folder):
        return CheckpointStore(Path(dump_folder) / folder, look_seconds=look_seconds)
    from torchtitan_lite.bucket.store import open_bucket  # Its client is an extra, and takes its time.

    return open_bucket(folder)


def look_seconds(timeout_seconds: float) -> float:
    """Return for how long a rank looks for what another host has made, while the others wait `timeout_seconds`."""
    return min(LOOK_SECONDS, timeout_seconds / 2)


class RunFolders:
    """The stores `checkpoints` and, if the run exports, `exports`."""

    def __init__(self, config: JobConfig, run_id: str, checkpoints: StoresCheckpoints | None = None) -> None:
        section, dump_folder = config.checkpoint, config.job.dump_folder
        patience = look_seconds(section.timeout_seconds)
        self.checkpoints = checkpoints or open_store(section.folder, dump_folder, patience)
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
        return [mount_of(store.root) if isinstance(store, CheckpointStore) else "" for store in self._stores]

    @property
    def identities(self) -> list[str]:
        """The folders, each the same however it is spelt. Any rank."""
        return [store.identity for store in self._stores]

    @property
    def on_disk(self) -> list[CheckpointStore]:
        """Those that are on disk. Any rank."""
        return [store for store in self._stores if isinstance(store, CheckpointStore)]

    @property
    def are_all_on_disk(self) -> bool:
        """Return whether all are on disk, that of uploads included. Any rank."""
        return all(isinstance(store, CheckpointStore) for store in (*self._stores, self.uploads or self.checkpoints))

    def take(self) -> list[str]:
        """Reserve the folders for this job, and remove what a crash left in them. Return the tokens of the leases.

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
                recover(store)
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

    def fence(self, store: StoresCheckpoints) -> Callable[[], None]:
        """Return a function that raises `LeaseLost` once the folder of `store` belongs to another job."""
        return self._leases[store].check

    def _refuse_one_for_both(self) -> None:
        if self.uploads is not None and self.uploads.identity in self.identities:
            raise ConfigError(
                f"checkpoint.upload_folder: {self.uploads.address} is another folder of this run, too. Name one of its "
                "own."
            )
        if self.exports is not None and self.exports.identity == self.checkpoints.identity:
            raise ConfigError(
                f"checkpoint.export_folder: {self.exports.address} is also the folder of checkpoints, where the "
                "export would replace the last full checkpoint. Name another folder."
            )


_FIXES = {
    "Give this user the permissions for it": (errno.EACCES, errno.EPERM),
    "Mount it so that it can be written": (errno.EROFS,),
    "Make room there": (errno.ENOSPC, errno.EDQUOT),
    "Make it a folder": (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    "Raise the limit of open files": (errno.EMFILE, errno.ENFILE),
    "The cause is its file system, not a permission: mount one there that can do this": (
        *(errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY),
    ),
}
_IT_FAILED = "The cause is its file system, not a permission: start the same command again once it works"
"""For EIO, ESTALE, ENOLCK, ENOTEMPTY, ETIMEDOUT and the like: there are many, and each file system has its own."""


def _fix_of(error: OSError) -> str:
    """Return what helps against an `error` in a folder on disk; empty where the system has given no code."""
    return next((fix for fix, codes in _FIXES.items() if error.errno in codes), _IT_FAILED if error.errno else "")


@contextmanager
def usable(folder: Path | str, key: str = "") -> Iterator[None]:
    """Raise `FolderUnusable` for an OSError in the block; errors of this package pass unchanged.

    `key` is the option that names `folder`; empty for that of the checkpoints.
    """
    try:
        yield
    except TorchtitanLiteError:
        raise
    except OSError as error:
        fix = "" if is_in_object_store(str(folder)) else _fix_of(error)
        raise FolderUnusable(str(folder), str(error), key, fix) from error
