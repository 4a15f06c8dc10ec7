"""The folders of a run: its checkpoints, its exports, and the leases that reserve both for this job.

While a lease is held no other job writes there; taking the folders removes what a crash left. Methods that touch a
folder are **coordinator only**.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.errors import ConfigError, FolderUnusable, TorchtitanLiteError
from torchtitan_lite.log import logger
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.store import CheckpointStore


class RunFolders:
    """The stores `checkpoints` and, if the run exports, `exports`."""

    def __init__(self, config: JobConfig, run_id: str, checkpoints: CheckpointStore | None = None) -> None:
        section, dump_folder = config.checkpoint, Path(config.job.dump_folder)
        self.checkpoints = checkpoints or CheckpointStore(dump_folder / section.folder)
        self.exports = CheckpointStore(dump_folder / section.export_folder) if section.export_folder else None
        self._stores = [store for store in (self.checkpoints, self.exports) if store is not None]
        self._leases = {
            store.root: Lease(
                store.root,
                run_id=run_id,
                timeout_seconds=section.lease_timeout_seconds,
                make_room=functools.partial(_recover, store),
            )
            for store in self._stores
        }

    @property
    def roots(self) -> list[Path]:
        """The paths of the folders. Any rank."""
        return [store.root for store in self._stores]

    def take(self) -> list[str]:
        """Reserve the folders for this job, and remove what a crash left in them. Return the tokens of the leases.

        Raises `FolderInUse`, `FolderUnusable`, and `ConfigError` if both are the same folder.
        """
        self._refuse_one_for_both()
        faults.point("lease")
        # All leases before the first recovery, which removes files: until then they may be another job's.
        for root, lease in self._leases.items():
            with usable(root):
                lease.take()
        faults.point("recover")
        for store in self._stores:
            with usable(store.root):
                _recover(store)
        return [lease.token for lease in self._leases.values()]

    def first_without(self, tokens: Sequence[str]) -> int | None:
        """Return which of `roots` is the first in which this host does not see the lease of its token; None for none.

        Any rank. `tokens` are those that `take` returned on the coordinator.
        """
        seen = enumerate(zip(self._leases.values(), tokens, strict=True))
        return next((number for number, (lease, token) in seen if not lease.is_visible(token)), None)

    def release(self) -> None:
        """Give the folders up to other jobs."""
        for lease in self._leases.values():
            lease.release()

    def fence(self, store: CheckpointStore) -> Callable[[], None]:
        """Return a function that raises `LeaseLost` once the folder of `store` belongs to another job."""
        return self._leases[store.root].check

    def _refuse_one_for_both(self) -> None:
        if self.exports is not None and self.exports.is_same_folder(self.checkpoints):
            raise ConfigError(
                f"checkpoint.export_folder: {self.exports.root} is also the folder of checkpoints, where the "
                "export would replace the last full checkpoint. Name another folder."
            )


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Raise `FolderUnusable` for an OSError in the block; errors of this package pass unchanged."""
    try:
        yield
    except TorchtitanLiteError:
        raise
    except OSError as error:
        raise FolderUnusable(str(folder), str(error)) from error


def _recover(store: CheckpointStore) -> bool:
    """Remove what a crash left in the folder of `store`. Return whether there was anything."""
    recovered = store.recover()
    for path in recovered:
        logger.info("Recovered after a save that was cut off: %s", path)
    return bool(recovered)
