"""A file or a folder as it was when it was listed, and its removal: of what was listed, and of nothing else.

A file that was written, replaced or added since stops the removal, and a link is never followed: each folder is opened
as what was listed, and its files are removed in it, also if another one has its name by then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.plain_file import file_kind
from torchtitan_lite.errors import CheckpointUnsafe


class FileState(NamedTuple):
    """What differs once a file was written, or another one has its name."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Return the state of the file of which the system says `found`."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class ListedTree:
    """The files in `root`, and the folders, by their paths in it."""

    root: Path
    files: Mapping[str, FileState]
    folders: Mapping[str, tuple[int, int]]
    """Device and inode of each, those below first; "" is `root` itself. Empty where only files of `root` are listed."""

    @classmethod
    def of_folder(cls, root: Path) -> ListedTree:
        """Return all of the folder `root`. Raises `CheckpointUnsafe` for a link, a pipe or a device in it; OSError."""
        files: dict[str, FileState] = {}
        folders: dict[str, tuple[int, int]] = {}
        for path, found in _files_below(root, ""):
            if stat.S_ISDIR(found.st_mode):
                folders[path] = (found.st_dev, found.st_ino)
            else:
                files[path] = FileState.of(found)
        return cls(root, files, folders)

    @classmethod
    def of_files(cls, root: Path, names: Sequence[str]) -> ListedTree:
        """Return those of the files `names` in `root` that exist. Raises as `of_folder` does."""
        files = {name: FileState.of(regular_file_stat(root / name)) for name in names if os.path.lexists(root / name)}
        return cls(root, files, {})

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(state.size for state in self.files.values())

    @property
    def num_left(self) -> int:
        """Return how many of the files, or what has their names, are still there."""
        return sum(os.path.lexists(self.root / path) for path in self.files)

    @property
    def modified_at(self) -> float:
        """Return when the last of its files was written, in Unix seconds."""
        return max((state.modified_ns for state in self.files.values()), default=0) / 1e9

    def remove(self, first: Sequence[str], durable: Durable = DISK) -> str:
        """Remove the files, `first` durably before all others, then the folders; return why it stopped, or "".

        Nothing is removed if anything is not as it was listed. Raises OSError.
        """
        if finding := self.change():
            return f"{finding}, so nothing in it was removed"
        for path in first:
            if finding := self._remove_file(path, durable):
                return finding
        for folder in dict.fromkeys(str(Path(path).parent) for path in first):
            durable.fsync_dir(self.root / folder)
        for path in sorted(self.files.keys() - {*first}):
            if finding := self._remove_file(path, durable):
                return finding
        for folder in self.folders:
            try:
                durable.remove_dir(self.root / folder)
            except OSError as error:
                names = sorted(os.listdir(self.root / folder))[:3]  # noqa: PTH208  # names, not paths
                if not names:
                    raise error from None
                return f"{', '.join(names)} was written since it was listed, and stays; the listed files are removed"
        durable.fsync_dir(self.root if "" not in self.folders else self.root.parent)
        return ""

    def change(self) -> str:
        """Return what is not as it was listed; the empty string if all is."""
        try:
            is_folder = bool(self.folders)
            now = ListedTree.of_folder(self.root) if is_folder else ListedTree.of_files(self.root, [*self.files])
        except (OSError, CheckpointUnsafe) as error:
            return f"it is not as it was listed any more ({error!s:.200})"
        if now.folders != self.folders:
            return "a folder in it was made or removed since it was listed"
        names = self.files.keys() | now.files.keys()
        changed = sorted(name for name in names if self.files.get(name) != now.files.get(name))
        return f"{', '.join(changed[:3])} was written or removed since it was listed" if changed else ""

    def _remove_file(self, path: str, durable: Durable) -> str:
        """Remove the file `path`; return why not if it is another one by now."""
        below, _, name = path.rpartition("/")
        with held(self.root / below, follows_link=False) as folder:
            of_folder = folder.path.stat()
            if self.folders and (of_folder.st_dev, of_folder.st_ino) != self.folders[below]:
                return f"{below or self.root.name} is another folder since it was listed, and stays"
            # Not the last of the state: it changes with the removal of another name of the file.
            if FileState.of((folder.path / name).lstat())[:4] != self.files[path][:4]:
                return f"{path} was written since it was listed, and stays"
            durable.remove_file(folder.path / name)
        return ""


def _files_below(root: Path, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file and folder in `folder` of `root`, by path, and the folder last."""
    with os.scandir(root / folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(root, path)
            else:
                yield path, regular_file_stat(root / path)
    yield folder, (root / folder).lstat()


def regular_file_stat(path: Path) -> os.stat_result:
    """Return what the system says of the file `path`. Raises `CheckpointUnsafe` for anything else, and OSError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointUnsafe(str(path), f"expected a file, found {file_kind(path)}")
    return found


# A folder that is held while it is written into: what has its name meanwhile may become another folder.


@dataclass(frozen=True)
class HeldFolder:
    """The folder that was `folder` when it was opened."""

    folder: Path
    path: Path
    """Leads to this folder whatever its name is, in this process and while it is held."""

    def has_its_name(self) -> bool:
        """Return whether the name still is this folder's."""
        try:
            return os.path.samestat(self.path.stat(), self.folder.lstat())
        except FileNotFoundError:
            return False


@contextmanager
def held(folder: Path, *, follows_link: bool = True) -> Iterator[HeldFolder]:
    """Yield `folder`, held in the block. An OSError about a file in it has the name of the folder.

    Unless it `follows_link`, a link to a folder is an OSError, too.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follows_link else os.O_NOFOLLOW))
    path = Path(f"/proc/self/fd/{fd}")
    try:
        yield HeldFolder(folder, path)
    except OSError as error:
        if error.errno is None or not str(error.filename).startswith(f"{path}/"):
            raise
        raise OSError(error.errno, error.strerror, str(folder / Path(str(error.filename)).name)) from error
    finally:
        os.close(fd)
