"""A disk that stops at the n-th operation, and helpers that read what is in the folder then.

`Cut` does real operations on real files. With `power=True` it also takes back the renames that were not synced,
as a power cut may; if something relied on one of them before it was durable, a checkpoint is lost and a test fails.
recording.py covers what a power cut does to bytes and names that were never synced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.store.filled import without_token
from tests.store.recording import swap
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store.store import CheckpointStore

NEVER = 10**9


class Crash(BaseException):
    """The end of the process."""


class Cut(Durable):
    """Stops at operation `at`; syncs are recorded, not done."""

    def __init__(
        self,
        at: int = NEVER,
        exchanges: bool = True,
        power: bool = False,
        stop: BaseException | None = None,
        unsynced: Sequence[tuple[Path, Path]] = (),
    ) -> None:
        self.at, self.exchanges, self.power, self.stop = at, exchanges, power, stop or Crash()
        self.done = 0
        self.unsynced = list(unsynced)

    def _operation(self) -> None:
        self.done += 1
        if self.done == self.at:
            for src, dst in reversed(self.unsynced if self.power else []):
                swap(src, dst) if src.exists() else dst.rename(src)
            raise self.stop

    def rename(self, src: Path, dst: Path) -> None:
        self._operation()
        super().rename(src, dst)
        self.unsynced.append((src, dst))

    def link(self, src: Path, dst: Path) -> None:
        self._operation()
        super().link(src, dst)

    def create(self, path: Path) -> int:
        self._operation()
        return super().create(path)

    def set_direct(self, fd: int, is_direct: bool) -> None:
        """Do nothing: writes are cut where no direct one may be."""

    def replace(self, src: Path, dst: Path) -> None:
        self._operation()
        super().replace(src, dst)

    def exchange(self, a: Path, b: Path) -> bool:
        self._operation()
        if self.exchanges:
            swap(a, b)
            self.unsynced.append((a, b))
        return self.exchanges

    def fsync_file(self, fd: int) -> None:
        self._operation()

    def fsync_dir(self, path: Path) -> None:
        self._operation()
        self.unsynced = [(src, dst) for src, dst in self.unsynced if dst.parent != path]

    def write_file(self, path: Path, data: bytes) -> None:
        self._operation()
        path.write_bytes(data[: len(data) // 2])
        self._operation()
        path.write_bytes(data)

    def remove_file(self, path: Path) -> None:
        self._operation()
        super().remove_file(path)

    def remove_dir(self, path: Path) -> None:
        self._operation()
        super().remove_dir(path)

    def remove_tree(self, path: Path) -> None:
        for child in sorted(path.iterdir()):
            self.remove_tree(child) if child.is_dir() else self.remove_file(child)
        self._operation()
        path.rmdir()


Contents = dict[str, "bytes | Path | None"]


def contents(folder: Path) -> Contents:
    """Return everything in `folder`: bytes of a file, target of a link, None for a folder."""
    found: Contents = {}
    for path in sorted(folder.rglob("*")):
        name = without_token(str(path.relative_to(folder)))
        found[name] = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def steps_of(root: Path) -> dict[int, Contents]:
    """Return what a reader finds, by step."""
    return {info.step: contents(info.path) for info in CheckpointStore(root).committed()}
