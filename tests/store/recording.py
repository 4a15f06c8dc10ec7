"""A disk that keeps what was synced, and any part of the rest.

`Recorder` does real operations on real files and passes each one on to a `Disk`, which knows what is durable and what
is pending. `Disk.losses` are the ways in which a crash may treat what is pending: of the changes of names in a folder
any subset may survive, each rename completely or not at all, independent of other folders; of the bytes of a file any
write may be missing, cut off in the middle, or zeros. `Disk.tree` is the folder after the crash, `lay_out` creates it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.disk.durable import Durable

Leaf = bytes | Path | None
Tree = dict[str, Leaf]
"""By relative path: bytes of a file, target of a link, None for a folder."""
Lost = Mapping[int, str]
"""How each pending event is lost, by its position; events that are not in here are kept."""

DROPPED, TORN, ZEROED = "dropped", "torn", "zeroed"
REQUEST_BYTES = 4096
_FEW = 5
"""Up to this many changes of names, all subsets are tried."""


@dataclass(frozen=True)
class Renaming:
    """In a folder, the entries in `moved` lose their names and those in `named` get new ones, in one atomic step."""

    node: int
    moved: tuple[int, ...]
    named: tuple[tuple[str, int], ...]
    ways = (DROPPED,)

    def on(self, names: dict[str, int]) -> None:
        for name in [name for name, node in names.items() if node in self.moved]:
            del names[name]
        names.update(self.named)


@dataclass(frozen=True)
class Writing:
    """`data` is written at `offset`."""

    node: int
    offset: int
    data: bytes
    ways = (DROPPED, TORN, ZEROED)

    def on(self, content: bytes, how: str = "") -> bytes:
        data = bytes(len(self.data)) if how == ZEROED else self.data
        data = data[: len(data) // 2] if how == TORN else data
        return content[: self.offset].ljust(self.offset, b"\0") + data + content[self.offset + len(data) :]


@dataclass(frozen=True)
class Sizing:
    """The file ends after `num_bytes`; if `grows_only`, not before."""

    node: int
    num_bytes: int
    grows_only: bool = False
    ways = (DROPPED,)

    def on(self, content: bytes, how: str = "") -> bytes:
        return (content if self.grows_only else content[: self.num_bytes]).ljust(self.num_bytes, b"\0")


@dataclass(frozen=True)
class Sync:
    """Makes everything before it in `node` durable."""

    node: int
    path: str = ""
    """Path of what was synced, for messages."""


Event = Renaming | Writing | Sizing | Sync


class Disk:
    """Folders and files by number; 0 is the outermost folder."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytes | Path] = {}
        self.seen: dict[int, dict[str, int]] = {0: {}}
        """The names as a process sees them now."""
        self.under_way: list[Renaming | Writing | Sizing] = []

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Return a disk with the contents of `root`, all durable."""
        disk, numbers = cls(), {root: 0}
        for path in sorted(root.rglob("*")):
            number = disk.number()
            numbers[path] = number
            disk.folders[numbers[path.parent]][path.name] = number
            if path.is_symlink():
                disk.files[number] = path.readlink()
            elif path.is_dir():
                disk.folders[number] = {}
            else:
                disk.files[number] = path.read_bytes()
        disk.seen = {number: dict(names) for number, names in disk.folders.items()}
        return disk

    def copy(self) -> Disk:
        """Return an independent copy."""
        other = Disk()
        other.folders = {number: dict(names) for number, names in self.folders.items()}
        other.seen = {number: dict(names) for number, names in self.seen.items()}
        other.files, other.under_way = dict(self.files), list(self.under_way)
        return other

    def number(self) -> int:
        """Return a number that no file and no folder has."""
        return len(self.folders) + len(self.files)

    def find(self, parts: Iterable[str]) -> int:
        """Return the number of what is at the path of `parts` now."""
        number = 0
        for part in parts:
            number = self.seen[number][part]
        return number

    def do(self, event: Event) -> None:
        """Apply `event`."""
        if isinstance(event, Sync):
            synced = [change for change in self.under_way if change.node == event.node]
            self.under_way = [change for change in self.under_way if change.node != event.node]
            for change in synced:
                self._keep(change, self.folders, self.files)
            return
        self.under_way.append(event)
        if isinstance(event, Renaming):
            event.on(self.seen[event.node])

    def do_all(self) -> None:
        """Make everything pending durable."""
        for node in {change.node for change in self.under_way}:
            self.do(Sync(node))

    def losses(self) -> Iterator[Lost]:
        """Yield what a crash may lose now; first, nothing."""
        names = [at for at, change in enumerate(self.under_way) if isinstance(change, Renaming)]
        data = [at for at, change in enumerate(self.under_way) if not isinstance(change, Renaming)]
        of_names, of_data = list(_losses_of_names(names)), list(self._losses_of_data(data))
        for lost_names, lost_data in itertools.product(of_names, of_data):
            yield {**lost_names, **lost_data}

    def tree(self, lost: Lost) -> Tree:
        """Return what is left after a crash that loses `lost` of what is pending."""
        touched = {change.node for change in self.under_way}
        folders = {number: dict(self.folders[number]) if number in touched else self.folders[number]
                   for number in self.folders}  # fmt: skip
        files = dict(self.files)
        for at, change in enumerate(self.under_way):
            if (how := lost.get(at, "")) != DROPPED:
                self._keep(change, folders, files, how)
        tree: Tree = {}
        _walk(0, "", folders, files, tree)
        return tree

    @staticmethod
    def _keep(
        change: Renaming | Writing | Sizing,
        folders: dict[int, dict[str, int]],
        files: dict[int, bytes | Path],
        how: str = "",
    ) -> None:
        if isinstance(change, Renaming):
            change.on(folders[change.node])
        else:
            content = files[change.node]
            assert isinstance(content, bytes)
            files[change.node] = change.on(content, how)

    def _losses_of_data(self, positions: list[int]) -> Iterator[Lost]:
        yield {}
        ways = {at: self.under_way[at].ways for at in positions}
        for at in positions:
            yield from ({at: how} for how in ways[at])
        if len(positions) > 1:
            for how in (DROPPED, TORN, ZEROED):
                yield {at: how if how in ways[at] else DROPPED for at in positions}
            for at in range(1, len(positions)):
                yield dict.fromkeys(positions[:at], DROPPED)
                yield dict.fromkeys(positions[at:], DROPPED)
            for node in {self.under_way[at].node for at in positions}:
                for how in (DROPPED, ZEROED):
                    yield {
                        at: how if how in ways[at] else DROPPED for at in positions if self.under_way[at].node == node
                    }


def _losses_of_names(positions: list[int]) -> Iterator[Lost]:
    if len(positions) <= _FEW:
        for count in range(len(positions) + 1):
            for dropped in itertools.combinations(positions, count):
                yield dict.fromkeys(dropped, DROPPED)
        return
    yield {}
    for at, position in enumerate(positions):
        yield {position: DROPPED}
        yield dict.fromkeys(positions[:at] + positions[at + 1 :], DROPPED)
        yield dict.fromkeys(positions[at:], DROPPED)
        yield dict.fromkeys(positions[: at + 1], DROPPED)


def _walk(
    number: int, prefix: str, folders: dict[int, dict[str, int]], files: dict[int, bytes | Path], tree: Tree
) -> None:
    for name, child in folders[number].items():
        path = prefix + name
        tree[path] = files.get(child)
        if child in folders:
            _walk(child, path + "/", folders, files, tree)


def lay_out(tree: Tree, root: Path) -> None:
    """Create `root` with the contents `tree`."""
    root.mkdir(parents=True)
    for name in sorted(tree):
        leaf = tree[name]
        if leaf is None:
            (root / name).mkdir()
        elif isinstance(leaf, Path):
            (root / name).symlink_to(leaf)
        else:
            (root / name).write_bytes(leaf)


class Recorder(Durable):
    """Does each operation in `root`, the outermost folder, and records it in `disk` and `log`.

    Syncs are only recorded. `before` and `after` are called around each event with its number, from 1 on. A write takes
    `REQUEST_BYTES` at most, so that a small file is written by several.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        *,
        exchanges: bool = True,
    ) -> None:
        self.root = root
        self.disk = disk or Disk.of(root)
        self.start = self.disk.copy()
        self.log: list[Event] = []
        self._exchanges = exchanges
        self.before: Callable[[int], None] = lambda _: None
        self.after: Callable[[int], None] = lambda _: None
        self._lock = threading.RLock()
        self._numbers = {
            _inode(path): self._find(path) for path in root.rglob("*") if path.is_file() and not path.is_symlink()
        }

    def rename(self, src: Path, dst: Path) -> None:
        with self._lock:
            number, parent = self._find(src), self._within_one_folder(src, dst)
            event = Renaming(parent, (number,), ((dst.name, number),))
            self._begin()
            super().rename(src, dst)
            self._record(event)

    replace = rename

    def exchange(self, a: Path, b: Path) -> bool:
        if not self._exchanges:
            return False
        with self._lock:
            numbers, parent = (self._find(a), self._find(b)), self._within_one_folder(a, b)
            self._begin()
            # Three renames replace the call, so that this does not depend on the file system.
            swap(a, b)
            self._record(Renaming(parent, numbers, ((b.name, numbers[0]), (a.name, numbers[1]))))
            return True

    def create(self, path: Path) -> int:
        with self._lock:
            self._begin()
            fd = super().create(path)
            self._record_new_file(path)
            return fd

    def set_direct(self, fd: int, is_direct: bool) -> None:
        """Do nothing: requests are cut where no direct one may be."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._begin()
        os.ftruncate(fd, max(num_bytes, os.fstat(fd).st_size))
        self._record(Sizing(self._of_fd(fd), num_bytes, grows_only=True))

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self._begin()
            written = super().write_at(fd, data[:REQUEST_BYTES], offset)
            self._record(Writing(self._of_fd(fd), offset, bytes(data[:written])))
            return written

    def set_size(self, fd: int, num_bytes: int) -> None:
        self._begin()
        super().set_size(fd, num_bytes)
        self._record(Sizing(self._of_fd(fd), num_bytes))

    def fsync_file(self, fd: int) -> None:
        self._begin()
        number = self._of_fd(fd)
        self._record(Sync(number, self._path_of(number)))

    def fsync_dir(self, path: Path) -> None:
        self._begin()
        assert path.is_dir()
        number = self._find(path)
        self._record(Sync(number, self._path_of(number)))

    def write_file(self, path: Path, data: bytes) -> None:
        with self._lock:
            self._begin()
            path.write_bytes(b"")
            self._record_new_file(path)
            self._begin()
            path.write_bytes(data)
            number = self._find(path)
            self._record(Writing(number, 0, data))
            self._begin()
            self._record(Sync(number, self._path_of(number)))

    def remove_file(self, path: Path) -> None:
        with self._lock:
            event = Renaming(self._find(path.parent), (self._find(path),), ())
            self._begin()
            super().remove_file(path)
            self._record(event)

    def remove_tree(self, path: Path) -> None:
        with self._lock:
            for child in sorted(path.iterdir()):
                is_folder = child.is_dir() and not child.is_symlink()
                self.remove_tree(child) if is_folder else self.remove_file(child)
            event = Renaming(self._find(path.parent), (self._find(path),), ())
            self._begin()
            path.rmdir()
            self._record(event)

    def make_dir(self, path: Path) -> None:
        with self._lock:
            if not path.is_dir():
                self.make_dir(path.parent)
                self._begin()
                number, parent = self.disk.number(), self._find(path.parent)
                self.disk.folders[number], self.disk.seen[number] = {}, {}
                self.start.folders[number], self.start.seen[number] = {}, {}
                self._record(Renaming(parent, (), ((path.name, number),)))
            super().make_dir(path)

    def _record_new_file(self, path: Path) -> None:
        """Record the new, empty file `path`."""
        names = self.disk.seen[self._find(path.parent)]
        if path.name in names:
            self._record(Sizing(names[path.name], 0))
            return
        number = self.disk.number()
        self.disk.files[number] = self.start.files[number] = b""
        self._numbers[_inode(path)] = number
        self._record(Renaming(self._find(path.parent), (), ((path.name, number),)))

    def _begin(self) -> None:
        self.before(len(self.log) + 1)

    def _record(self, event: Event) -> None:
        with self._lock:
            self.log.append(event)
            self.disk.do(event)
        self.after(len(self.log))

    def _find(self, path: Path) -> int:
        return self.disk.find(path.relative_to(self.root).parts)

    def _within_one_folder(self, a: Path, b: Path) -> int:
        assert a.parent == b.parent, "the store renames within one folder"
        return self._find(a.parent)

    def _of_fd(self, fd: int) -> int:
        status = os.fstat(fd)
        return self._numbers[status.st_dev, status.st_ino]

    def _path_of(self, number: int) -> str:
        """Return the path of what has `number`."""
        for folder, names in self.disk.seen.items():
            for name, child in names.items():
                if child == number:
                    return f"{self._path_of(folder)}/{name}".lstrip("/")
        return ""


def swap(a: Path, b: Path) -> None:
    spare = a.with_name("spare")
    for src, dst in ((a, spare), (b, a), (spare, b)):
        src.rename(dst)


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
