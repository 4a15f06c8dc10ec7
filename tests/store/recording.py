"""A disk that keeps what was synced, and of the rest whatever it likes.

`Recorder` does real operations on real files and tells each one to a `Disk`, which knows what is
there for certain and what is only on its way. `Disk.losses` are the ways in which a crash may treat
what is on its way: of the names in a folder any part may be there, each rename whole or not at all,
whatever became of other folders; of the bytes of a file any write may be missing, cut off in the
middle, or zeros. `Disk.tree` is the folder that is then found, `lay_out` makes it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.durable import Durable

NEVER = 10**9
Leaf = bytes | Path | None
Tree = dict[str, Leaf]
"""By relative path: a file's bytes, a link's target, None for a folder."""
Lost = Mapping[int, str]
"""By position among what is on its way, how it was lost; what is not named here was kept."""

DROPPED, TORN, ZEROED = "dropped", "torn", "zeroed"
_FEW = 5
"""So many changes of names that all subsets can be tried."""


class Change(Protocol):
    """What was done and is not synced."""

    node: int
    """The file or folder in which it was done."""

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be lost."""


@dataclass(frozen=True)
class Renaming:
    """In a folder, those in `moved` lose their names, and then each of `named` has a new one, in one atomic step."""

    node: int
    moved: tuple[int, ...]
    named: tuple[tuple[str, int], ...]

    @property
    def ways(self) -> tuple[str, ...]:
        return (DROPPED,)

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

    @property
    def ways(self) -> tuple[str, ...]:
        return (DROPPED, TORN, ZEROED)

    def on(self, content: bytes, how: str = "") -> bytes:
        data = bytes(len(self.data)) if how == ZEROED else self.data
        data = data[: len(data) // 2] if how == TORN else data
        return content[: self.offset].ljust(self.offset, b"\0") + data + content[self.offset + len(data) :]


@dataclass(frozen=True)
class Sizing:
    """The file ends after `num_bytes`, or not before if it only grows."""

    node: int
    num_bytes: int
    grows_only: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        return (DROPPED,)

    def on(self, content: bytes, how: str = "") -> bytes:
        return (content if self.grows_only else content[: self.num_bytes]).ljust(self.num_bytes, b"\0")


@dataclass(frozen=True)
class Sync:
    """What was done in `node` is kept from here on."""

    node: int
    told: str = ""
    """Of what, for a person."""


Event = Renaming | Writing | Sizing | Sync


class Disk:
    """Folders and files by number, 0 being the outermost folder."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytes | Path] = {}
        self.seen: dict[int, dict[str, int]] = {0: {}}
        """The names as a process sees them that asks now."""
        self.under_way: list[Renaming | Writing | Sizing] = []

    @classmethod
    def of(cls, root: Path) -> Disk:
        """One that has what is in `root`, for certain."""
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
        """One that goes its own way from here."""
        other = Disk()
        other.folders = {number: dict(names) for number, names in self.folders.items()}
        other.seen = {number: dict(names) for number, names in self.seen.items()}
        other.files, other.under_way = dict(self.files), list(self.under_way)
        return other

    def number(self) -> int:
        """One that no file and no folder has."""
        return len(self.folders) + len(self.files)

    def find(self, parts: Iterable[str]) -> int:
        """The number of what is at the path of `parts` now."""
        number = 0
        for part in parts:
            number = self.seen[number][part]
        return number

    def do(self, event: Event) -> None:
        """Takes note of `event`."""
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
        """Everything is kept that is under way."""
        for node in {change.node for change in self.under_way}:
            self.do(Sync(node))

    def losses(self) -> Iterator[Lost]:
        """What a crash may do now; the first is that nothing is lost."""
        names = [at for at, change in enumerate(self.under_way) if isinstance(change, Renaming)]
        data = [at for at, change in enumerate(self.under_way) if not isinstance(change, Renaming)]
        of_names, of_data = list(_losses_of_names(names)), list(self._losses_of_data(data))
        for lost_names, lost_data in itertools.product(of_names, of_data):
            yield {**lost_names, **lost_data}

    def tree(self, lost: Lost) -> Tree:
        """What is found after a crash that treats what is under way as `lost` says."""
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


class Contents:
    """Files by what is in them, each written once; `lay_out` makes links to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[bytes, Path] = {}

    def lay_out(self, tree: Tree, root: Path) -> None:
        """`root`, which is not there yet, holds `tree`. Nothing may write into its files."""
        root.mkdir(parents=True)
        for name in sorted(tree):
            leaf = tree[name]
            if leaf is None:
                (root / name).mkdir()
            elif isinstance(leaf, Path):
                (root / name).symlink_to(leaf)
            else:
                (root / name).hardlink_to(self._file(leaf))

    def _file(self, data: bytes) -> Path:
        if data not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[data] = self._folder / str(len(self._files))
            self._files[data].write_bytes(data)
        return self._files[data]


def lay_out(tree: Tree, root: Path) -> None:
    """`root`, which is not there yet, holds `tree`, and nothing else has its files."""
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
    """Does to `root`, the outermost folder, what it is told, tells `disk`, and writes it down in `log`.

    Syncs are only told. `before` is called before each event with its number, from 1 on. A write takes `request_bytes`
    at most, so that a small file is written by several.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        *,
        exchanges: bool = True,
        before: Callable[[int], None] = lambda _: None,
        request_bytes: int = 4096,
    ) -> None:
        self.root = root
        self.disk = disk or Disk.of(root)
        self.start = self.disk.copy()
        self.log: list[Event] = []
        self._exchanges = exchanges
        self.before = before
        self._request_bytes = request_bytes
        self._lock = threading.RLock()
        self._numbers = {
            _inode(path): self._find(path) for path in root.rglob("*") if path.is_file() and not path.is_symlink()
        }

    def rename(self, src: Path, dst: Path) -> None:
        with self._lock:
            number, parent = self._find(src), self._within_one_folder(src, dst)
            event = Renaming(parent, (number,), ((dst.name, number),))
            self._ask()
            super().rename(src, dst)
            self._tell(event)

    def replace(self, src: Path, dst: Path) -> None:
        with self._lock:
            number, parent = self._find(src), self._within_one_folder(src, dst)
            event = Renaming(parent, (number,), ((dst.name, number),))
            self._ask()
            super().replace(src, dst)
            self._tell(event)

    def exchange(self, a: Path, b: Path) -> bool:
        if not self._exchanges:
            return False
        with self._lock:
            numbers, parent = (self._find(a), self._find(b)), self._within_one_folder(a, b)
            self._ask()
            # Three renames stand for the call, so that this does not depend on the filesystem.
            spare = a.with_name("spare")
            for src, dst in ((a, spare), (b, a), (spare, b)):
                src.rename(dst)
            self._tell(Renaming(parent, numbers, ((b.name, numbers[0]), (a.name, numbers[1]))))
            return True

    def create(self, path: Path, *, direct: bool) -> int:
        with self._lock:
            self._ask()
            fd = super().create(path, direct=False)
            self._tell_of_new_file(path)
            return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._ask()
        os.ftruncate(fd, max(num_bytes, os.fstat(fd).st_size))
        self._tell(Sizing(self._of_fd(fd), num_bytes, grows_only=True))

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self._ask()
            written = super().write_at(fd, data[: self._request_bytes], offset)
            self._tell(Writing(self._of_fd(fd), offset, bytes(data[:written])))
            return written

    def set_size(self, fd: int, num_bytes: int) -> None:
        self._ask()
        super().set_size(fd, num_bytes)
        self._tell(Sizing(self._of_fd(fd), num_bytes))

    def fsync_file(self, fd: int) -> None:
        self._ask()
        number = self._of_fd(fd)
        self._tell(Sync(number, self._told(number)))

    def fsync_dir(self, path: Path) -> None:
        self._ask()
        assert path.is_dir()
        number = self._find(path)
        self._tell(Sync(number, self._told(number)))

    def write_file(self, path: Path, data: bytes) -> None:
        with self._lock:
            self._ask()
            path.write_bytes(b"")
            self._tell_of_new_file(path)
            self._ask()
            path.write_bytes(data)
            number = self._find(path)
            self._tell(Writing(number, 0, data))
            self._ask()
            self._tell(Sync(number, self._told(number)))

    def remove_file(self, path: Path) -> None:
        with self._lock:
            event = Renaming(self._find(path.parent), (self._find(path),), ())
            self._ask()
            super().remove_file(path)
            self._tell(event)

    def remove_tree(self, path: Path) -> None:
        with self._lock:
            for child in sorted(path.iterdir()):
                is_folder = child.is_dir() and not child.is_symlink()
                self.remove_tree(child) if is_folder else self.remove_file(child)
            event = Renaming(self._find(path.parent), (self._find(path),), ())
            self._ask()
            path.rmdir()
            self._tell(event)

    def make_dir(self, path: Path) -> None:
        with self._lock:
            if not path.is_dir():
                self.make_dir(path.parent)
                self._ask()
                number, parent = self.disk.number(), self._find(path.parent)
                self.disk.folders[number], self.disk.seen[number] = {}, {}
                self.start.folders[number], self.start.seen[number] = {}, {}
                self._tell(Renaming(parent, (), ((path.name, number),)))
            super().make_dir(path)

    def _tell_of_new_file(self, path: Path) -> None:
        """Of the empty file `path`, which is there."""
        names = self.disk.seen[self._find(path.parent)]
        if path.name in names:
            self._tell(Sizing(names[path.name], 0))
            return
        number = self.disk.number()
        self.disk.files[number] = self.start.files[number] = b""
        self._numbers[_inode(path)] = number
        self._tell(Renaming(self._find(path.parent), (), ((path.name, number),)))

    def _ask(self) -> None:
        self.before(len(self.log) + 1)

    def _tell(self, event: Event) -> None:
        with self._lock:
            self.log.append(event)
            self.disk.do(event)

    def _find(self, path: Path) -> int:
        return self.disk.find(path.relative_to(self.root).parts)

    def _within_one_folder(self, a: Path, b: Path) -> int:
        assert a.parent == b.parent, "the store renames within one folder"
        return self._find(a.parent)

    def _of_fd(self, fd: int) -> int:
        status = os.fstat(fd)
        return self._numbers[status.st_dev, status.st_ino]

    def _told(self, number: int) -> str:
        """The path of what has `number`."""
        for folder, names in self.disk.seen.items():
            for name, child in names.items():
                if child == number:
                    return f"{self._told(folder)}/{name}".lstrip("/")
        return ""


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
