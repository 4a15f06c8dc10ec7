"""The real disk is synced: files after all their bytes, folders after all their names.

The other tests of the store give it a `Durable` that records syncs without making them. Here `Durable` is the real
one, and `Syncs` records the calls of os.fsync and os.fdatasync, and makes them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.descriptors import num_open
from tests.disk.sources import bounced, in_place
from tests.store.filled import begun, manifest_of, without_token
from torchtitan_lite.disk.block_writer import Bounced, FileSource, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store.lease import FolderLease
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.store import CheckpointStore

Synced = tuple[str, int | tuple[str, ...]]
"""Name and size in bytes of a synced file, or name and entries of a synced folder, at the moment of the sync."""


class Syncs:
    """Records each sync, in order, by inode; the name is that at the call of `take`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._root = root
        self._seen: list[tuple[int, int | tuple[str, ...]]] = []
        self._called: dict[int, str] = {}
        self.fails = False
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(fd: int) -> None:
            status = os.fstat(fd)
            is_folder = os.path.isdir(f"/proc/self/fd/{fd}")  # noqa: PTH112  # of a descriptor, not of a path
            names = (without_token(name) for name in os.listdir(fd)) if is_folder else ()
            self._seen.append((status.st_ino, tuple(sorted(names)) if is_folder else status.st_size))
            self._called[status.st_ino] = Path(os.readlink(f"/proc/self/fd/{fd}")).name  # noqa: PTH115  # likewise
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(fd)

        return note

    def take(self) -> list[Synced]:
        """Return the syncs since the last call."""
        names = {path.lstat().st_ino: path.name for path in [self._root, *self._root.rglob("*")]}
        seen, self._seen[:] = list(self._seen), []
        return [(names.get(inode, self._called[inode]), found) for inode, found in seen]


@pytest.fixture
def root(base: Path) -> Path:
    """Create a folder, in memory if the system has that: the calls are the same, and a busy disk takes seconds."""
    (base / "root").mkdir()
    return base / "root"


@pytest.fixture
def syncs(root: Path, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(monkeypatch, root)


@pytest.fixture
def fd(root: Path) -> Iterator[int]:
    """Open the file `old`, which holds three bytes, for writing."""
    (root / "old").write_bytes(b"old")
    fd = os.open(root / "old", os.O_RDWR)
    yield fd
    os.close(fd)


def descriptors() -> int:
    return num_open()


def nothing(*_: object) -> None:
    pass


Act = Callable[[Durable, Path, int], object]


def create(durable: Durable, root: Path, _: int) -> None:
    os.close(durable.create(root / "new"))


def make_dirs(durable: Durable, root: Path, _: int) -> None:
    durable.make_dir(root / "a" / "b")
    durable.make_dir(root / "a" / "b")


def remove_dir(durable: Durable, root: Path, fd: int) -> None:
    (root / "empty").mkdir()
    durable.remove_dir(root / "empty")


def remove_tree(durable: Durable, root: Path, _: int) -> None:
    (root / "folder").mkdir()
    durable.remove_tree(root / "folder")


def exchange(durable: Durable, root: Path, _: int) -> None:
    (root / "other").write_bytes(b"other")
    durable.exchange(root / "old", root / "other")


SYNCS: dict[str, tuple[Act, list[Synced]]] = {
    "fsync_file": (lambda durable, root, fd: durable.fsync_file(fd), [("old", 3)]),
    "fsync_dir": (lambda durable, root, fd: durable.fsync_dir(root), [("root", ("old",))]),
    "write_file": (lambda durable, root, fd: durable.write_file(root / "new", b"five!"), [("new", 5)]),
    "write_atomically": (
        lambda durable, root, fd: durable.write_atomically(root / "new", b"five!"),
        [("new", 5), ("root", ("new", "old"))],
    ),
    "make_dir": (make_dirs, [("root", ("a", "old")), ("a", ("b",))]),
    # The callers of these sync the folder or the file, once for several operations.
    "rename": (lambda durable, root, fd: durable.rename(root / "old", root / "new"), []),
    "replace": (lambda durable, root, fd: durable.replace(root / "old", root / "new"), []),
    "exchange": (exchange, []),
    "create": (create, []),
    "allocate": (lambda durable, root, fd: durable.allocate(fd, 100), []),
    "set_direct": (lambda durable, root, fd: durable.set_direct(fd, False), []),
    "write_at": (lambda durable, root, fd: durable.write_at(fd, memoryview(b"new"), 0), []),
    "set_size": (lambda durable, root, fd: durable.set_size(fd, 1), []),
    "remove_file": (lambda durable, root, fd: durable.remove_file(root / "old"), []),
    "remove_dir": (remove_dir, []),
    "remove_tree": (remove_tree, []),
}


def test_every_operation_has_an_entry_that_says_what_it_syncs() -> None:
    assert SYNCS.keys() == {name for name in vars(Durable) if not name.startswith("_")}


@pytest.mark.parametrize("operation", SYNCS)
def test_an_operation_syncs_complete_files_and_the_folders_with_their_names_and_nothing_else(
    root: Path, fd: int, syncs: Syncs, operation: str
) -> None:
    act, synced = SYNCS[operation]
    before = descriptors()
    act(Durable(), root, fd)
    assert syncs.take() == synced
    assert descriptors() == before


@pytest.mark.parametrize("operation", [name for name, (_, synced) in SYNCS.items() if synced])
def test_a_failing_sync_raises_the_error_of_the_system_and_leaves_no_descriptor(
    root: Path, fd: int, syncs: Syncs, operation: str
) -> None:
    syncs.fails, before = True, descriptors()
    with pytest.raises(OSError, match="Input/output error"):
        SYNCS[operation][0](Durable(), root, fd)
    assert descriptors() == before
    assert len(syncs.take()) == 1


@pytest.mark.parametrize("source", [in_place, bounced])
@pytest.mark.parametrize("num_bytes", [0, 1, 9000])
def test_a_rank_s_file_is_synced_once_after_its_last_byte_and_its_size(
    root: Path, syncs: Syncs, source: Callable[[bytes], FileSource], num_bytes: int
) -> None:
    data = b"x" * max(num_bytes, 1)
    found = write_blocks(root / "file", source(data) if num_bytes else Bounced(0, nothing))
    assert found == FileRecord.of(data[:num_bytes])
    assert syncs.take() == [("file", num_bytes)]


def save(store: CheckpointStore, step: int, data: bytes) -> CheckpointInfo:
    """Save `data` as one rank does."""
    path = begun(store, step) / "__0_0.distcp"
    record = write_blocks(path, bounced(data), durable=store.durable)
    store.durable.write_file(path.with_name(".metadata"), b"of dcp")
    files = {path.name: record, ".metadata": FileRecord.of(b"of dcp")}
    return store.commit(step, manifest_of(step, files=files), place=path.parent.name)


FILES = (".metadata", "__0_0.distcp", "manifest.json")


def test_a_commit_has_synced_every_file_and_every_name_before_it_returns(root: Path, syncs: Syncs) -> None:
    info = save(CheckpointStore(root / "outputs" / "checkpoint"), 5, b"data")
    manifest_bytes = (info.path / "manifest.json").stat().st_size
    assert syncs.take() == [
        ("root", ("outputs",)),
        ("outputs", ("checkpoint",)),
        ("checkpoint", ("step-5.staging",)),
        ("__0_0.distcp", 4),
        (".metadata", 6),
        (".metadata", 6),  # Synced by the commit, too, because DCP does not sync what it writes.
        ("manifest.json", manifest_bytes),
        ("step-5", FILES),
        ("checkpoint", ("step-5.staging",)),
        ("checkpoint", ("step-5",)),
    ]


def test_a_replaced_checkpoint_is_trash_on_the_disk_only_after_the_new_one_has_its_name_there(
    root: Path, syncs: Syncs
) -> None:
    store = CheckpointStore(root)
    save(store, 5, b"old")
    syncs.take()
    save(store, 5, b"new")
    of_the_names = [found for name, found in syncs.take() if name == "root"]
    swapped = [("step-5", "step-5.staging")]
    renamed = [(".replaced-step-5-1", "step-5.staging"), (".replaced-step-5-1", "step-5")]
    staged = [("step-5", "step-5.staging")] * 2  # Once when the folder was created, and once when it was sealed.
    assert of_the_names in (
        [*staged, *swapped, (".trash-step-5-1", "step-5")],
        [*staged, *renamed, (".trash-step-5-1", "step-5")],
    )


def test_a_deleted_or_quarantined_checkpoint_has_its_new_name_on_the_disk_first(root: Path, syncs: Syncs) -> None:
    store = CheckpointStore(root)
    for step in (1, 2):
        save(store, step, b"data")
    syncs.take()
    store.empty(store.discard(store.get(1)))
    assert syncs.take() == [("root", ("step-1", "step-2")), ("root", (".trash-step-1-1", "step-2"))]
    aside = store.quarantine(2, ["a byte"])
    found = syncs.take()
    assert found == [
        ("root", ("step-2.corrupt",)),
        ("findings.json", (aside / "findings.json").stat().st_size),
        ("step-2.corrupt", tuple(sorted([*FILES, "findings.json"]))),
    ]


def test_a_recovery_syncs_what_it_found_before_it_removes_anything_for_it(root: Path, syncs: Syncs) -> None:
    store = CheckpointStore(root / "checkpoint")
    save(store, 1, b"data").path.rename(store.root / ".replaced-step-1-1")
    store.begin(2)
    syncs.take()
    store.recover()
    assert syncs.take() == [
        ("root", ("checkpoint",)),
        ("checkpoint", ("step-1", "step-2.staging")),
        ("checkpoint", ("step-1",)),
    ]


def test_the_lock_file_is_complete_on_the_disk_before_it_has_its_name(root: Path, syncs: Syncs) -> None:
    lease = FolderLease(root / "checkpoint", run_id="ours")
    lease.take()
    num_bytes = (root / "checkpoint" / "writer.lock").stat().st_size
    lease.release()
    (parent, names), (lock, found) = syncs.take()
    assert (parent, names, found) == ("root", ("checkpoint",), num_bytes)
    assert lock.startswith(".writer.lock.")


def test_twenty_saves_leave_no_descriptor_open(root: Path) -> None:
    store = CheckpointStore(root)
    save(store, 1, b"the first")
    before = descriptors()
    for step in range(1, 21):
        save(store, step, b"data")
        store.check_sizes(store.get(step))
    assert descriptors() == before
    store.quarantine(20, ["a byte"])
    store.recover()
    for info in store.committed():
        store.empty(store.discard(info))
    assert descriptors() == before
