"""A folder of checkpoints on a network file system: rank 1, and each second job, work through another client."""

from __future__ import annotations

import errno
import itertools
from typing import NoReturn

from tests.disk.sources import bounced
from tests.network_disk import Answer, Client
from tests.store.backend import Fault, Written
from tests.store.disk_backend import DiskBackend
from tests.store.recording import Disk
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

_CODES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.ENOENT, errno.EEXIST)
_KINDS = (("change", False), ("change", True), ("any", False))
"""What a fault concerns, and whether it is done: an operation that was sent twice reports an error."""
_numbers = itertools.count()


class NetworkBackend(DiskBackend):
    """The folder `checkpoint` in a new folder of the file system of `mounted`, two clients that remember names."""

    def __init__(self, mounted: list[Client]) -> None:
        self._clients = mounted
        for client in mounted:
            client.reset()
            client.set(remembers=True)
        self._name = f"life{next(_numbers)}"
        super().__init__(mounted[0].source / self._name, durable=DISK)

    def attach(self, disk: Disk | None) -> None:
        self.store = self._store_of(0)

    def _store_of(self, client: int) -> CheckpointStore:
        return CheckpointStore(self._clients[client].folder / self._name / self.root.name, look_seconds=2.0)

    def next_process(self) -> None:
        self._clients.reverse()
        self.attach(None)

    def start(self) -> None:
        self.store.durable.make_dir(self.store.root)  # As the lease does, which a start takes first.
        super().start()

    def arm(self, fault: Fault | None) -> None:
        for client in self._clients:
            client.set()
        if fault is not None:
            operation, is_done = _KINDS[fault.kind % len(_KINDS)]
            code = _CODES[fault.seed % len(_CODES)]
            self._clients[0].set(Answer(operation, code, is_done=is_done, after=fault.at, times=1))

    def check_error(self, error: Exception) -> None:
        assert not isinstance(error, OSError) or error.filename, f"{error!r} names no file"

    def settle(self, fault: Fault) -> None:
        """Lose nothing: what ends is a process."""

    def refuse_changes(self) -> None:
        self._clients[0].set(Answer("change", errno.EROFS))

    def commit_late(self, written: Written) -> None:
        self._store_of(1).recover()

        def fence() -> NoReturn:
            self.refuse_changes()
            raise LeaseLost(str(self.root), "another")

        try:
            self.commit(written, fence)
        finally:
            self.arm(None)

    def put(self, place: str, name: str, data: bytes) -> FileRecord:
        client = (layout.rank_of(name) or 0) % 2
        store = self.store if client == 0 else self._store_of(1)
        return store.new_file(place, name).write(bounced(data))
