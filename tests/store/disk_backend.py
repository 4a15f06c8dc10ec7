"""A folder of checkpoints on a disk that keeps what was synced, and any part of the rest."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

from tests.disk.sources import bounced
from tests.store.backend import UNSUPPORTED, Backend, Fault, Files, Seen, Written
from tests.store.crashing import Crash
from tests.store.filled import remove_begun
from tests.store.recording import DROPPED, Disk, Lost, Recorder, lay_out
from torchtitan_lite.disk.block_writer import write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.store import CheckpointStore

ERROR, KILL, POWER_CUT, DONE = range(4)
"""DONE: the operation is done and reports an error, as one that a network file system sent twice."""
_KINDS = (ERROR, KILL, POWER_CUT, DONE, KILL, POWER_CUT)
_CODES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC)


class DiskBackend(Backend):
    """The folder `checkpoint` in `base`, the outermost folder of the disk.

    Recorded, and cut there; or with the operations of `durable`.
    """

    store: CheckpointStore
    crash = Crash

    def __init__(
        self,
        base: Path | None = None,
        *,
        exchanges: bool = True,
        disk: Disk | None = None,
        durable: Durable | None = None,
    ) -> None:
        memory = Path("/dev/shm")
        self._own = None if base else tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)
        self.base = base or Path(self._own.name, "outputs")  # type: ignore[union-attr]  # one of the two is there
        self.base.mkdir(exist_ok=True)
        self.root = self.base / "checkpoint"
        self._exchanges, self._durable = exchanges, durable
        self.attach(disk)

    def attach(self, disk: Disk | None) -> None:
        """Continue as a process that knows nothing, on `disk`; None: where all that is there is durable."""
        if self._durable is None:
            self.recorder = Recorder(self.base, disk, exchanges=self._exchanges)
        self.store = CheckpointStore(self.root, durable=self._durable or self.recorder)

    def crowd(self) -> None:
        """Put in what is not ours."""
        for name in UNSUPPORTED[:-1]:
            (self.root / name).mkdir(parents=True)
            (self.root / name / layout.METADATA).write_bytes(b"theirs")
        (self.root / UNSUPPORTED[-1]).symlink_to("elsewhere")
        self.attach(None)

    def open(self) -> CheckpointStore:
        return CheckpointStore(self.root)

    def seen(self) -> Seen:
        """Return what a reader finds, with the bytes of the manifests."""
        found = self.read_all()
        return Seen({step: saved for step, (saved, _) in found.items()}, [manifest for _, manifest in found.values()])

    def next_process(self) -> None:
        self.attach(None if self._durable else self.recorder.disk)

    def start(self) -> None:
        self.store.recover()

    def arm(self, fault: Fault | None) -> None:
        first, self.has_struck = len(self.recorder.log), False

        def strike(number: int) -> None:
            if fault is not None and number - first == fault.at and not self.has_struck:
                self.has_struck = True
                code = _CODES[fault.seed % len(_CODES)]
                raise OSError(code, os.strerror(code)) if _KINDS[fault.kind] in (ERROR, DONE) else Crash

        is_done = fault is not None and _KINDS[fault.kind] == DONE
        self.recorder.before = _do_nothing if is_done else strike
        self.recorder.after = strike if is_done else _do_nothing

    def settle(self, fault: Fault) -> None:
        """Keep or lose what is not synced; seed 0 keeps all, 1 loses all."""
        if _KINDS[fault.kind] != POWER_CUT:
            return
        disk, chance = self.recorder.disk, random.Random(fault.seed)
        lost: Lost = {}
        if fault.seed == 1:
            lost = dict.fromkeys(range(len(disk.under_way)), DROPPED)
        elif fault.seed > 1:
            ways = ((at, chance.choice(["", "", *change.ways])) for at, change in enumerate(disk.under_way))
            lost = {at: how for at, how in ways if how}
        tree = disk.tree(lost)
        shutil.rmtree(self.base)
        lay_out(tree, self.base)
        self.attach(None)

    def refuse_changes(self) -> None:
        def refuse(_: int) -> NoReturn:
            raise AssertionError("something was done after the folder was lost")

        self.recorder.before = refuse

    def commit_late(self, written: Written) -> None:
        CheckpointStore(self.root, durable=self.recorder).recover()

        def fence() -> NoReturn:
            self.refuse_changes()
            raise LeaseLost(str(self.root), "another")

        self.commit(written, fence)

    def put(self, place: str, name: str, data: bytes) -> FileRecord:
        return write_blocks(self.root / place / name, bounced(data), durable=self.store.durable)

    def remove_failed(self, step: int) -> None:
        remove_begun(self.store, step)

    def files(self, place: Place) -> Files:
        return _files_in(on_disk(place))

    def change(self, place: Place, name: str, data: bytes | None) -> None:
        path = on_disk(place) / name
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        self.attach(None)

    def pin(self, *steps: int, unpin: int | None = None) -> frozenset[int]:
        pinned = super().pin(*steps, unpin=unpin)
        self.attach(None)
        return pinned

    def foreign(self) -> object:
        there = [self.root / name for name in UNSUPPORTED if os.path.lexists(self.root / name)]
        return {path.name: path.readlink() if path.is_symlink() else _files_in(path) for path in there}

    def aside(self) -> dict[str, Files]:
        return {name: _files_in(self.root / name) for name in self._names() if layout.parse_set_aside(name)}

    def leftovers(self) -> list[str]:
        known = (*UNSUPPORTED, layout.PINS)
        others = [name for name in self._names() if name not in known and layout.parse_step(name) is None]
        return [name for name in others if not layout.parse_set_aside(name)]

    def close(self) -> None:
        if self._own is not None:
            self._own.cleanup()

    def _names(self) -> list[str]:
        return os.listdir(self.root) if self.root.is_dir() else []  # noqa: PTH208  # names


def _do_nothing(_: int) -> None:
    """Let the operation be done."""


def _files_in(folder: Path) -> Files:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}
