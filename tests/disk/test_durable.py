import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.disk import durable
from torchtitan_lite.disk.durable import DISK


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writing_atomically_replaces_the_contents_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for data in (b"old", b"", b"new"):
        DISK.write_atomically(path, data)
        assert path.read_bytes() == data
    assert names(tmp_path) == ["config.json"]


def test_a_write_that_is_cut_before_its_end_leaves_the_old_contents(tmp_path: Path) -> None:
    class CutBeforeReplace(durable.Durable):
        def replace(self, src: Path, dst: Path) -> None:
            raise KeyboardInterrupt

    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        CutBeforeReplace().write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    DISK.write_atomically(path, b"newer")
    assert (path.read_bytes(), names(tmp_path)) == (b"newer", ["metrics.jsonl"])


def test_a_write_that_is_refused_leaves_nothing_but_the_old_contents(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").mkdir()  # Which no file replaces.
    with pytest.raises(IsADirectoryError):
        DISK.write_atomically(path, b"new")
    assert names(tmp_path) == ["config.json"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").write_bytes(b"untouched")
    (folder := tmp_path / "folder").mkdir()
    (folder / ".pins.json.tmp").symlink_to(outside)
    DISK.write_atomically(folder / "pins.json", b"new")
    assert (outside.read_bytes(), (folder / "pins.json").read_bytes()) == (b"untouched", b"new")
    assert names(folder) == ["pins.json"]


def test_writing_into_a_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DISK.write_atomically(tmp_path / "nowhere" / "file", b"")


def test_an_exchange_swaps_two_folders_or_does_nothing(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (a / "of a").mkdir(parents=True)
    (b / "of b").mkdir(parents=True)
    swapped = DISK.exchange(a, b)
    assert (names(a), names(b)) == ((["of b"], ["of a"]) if swapped else (["of a"], ["of b"]))


def test_an_exchange_with_a_missing_path_fails_and_names_both(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    try:
        assert DISK.exchange(tmp_path / "a", tmp_path / "b") is False
    except FileNotFoundError as error:
        assert (error.filename, error.filename2) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert names(tmp_path) == ["a"]


def test_a_folder_is_made_with_its_parents_and_may_be_there_already(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "checkpoint" / "step-1.staging"
    DISK.make_dir(folder)
    DISK.make_dir(folder)
    assert folder.is_dir()


def test_a_folder_is_not_made_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_bytes(b"")
    with pytest.raises(OSError, match="outputs"):
        DISK.make_dir(tmp_path / "outputs" / "checkpoint")


def test_removing_a_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    DISK.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").read_bytes() == b"kept"


class Refusing:
    """Replaces a function of the C library: fails with each of `codes`, then calls `then`."""

    def __init__(self, codes: Sequence[int], then: Callable[..., int] = lambda *arguments: 0) -> None:
        self._codes, self._then = iter(codes), then
        self.num_calls = 0

    def __call__(self, *arguments: object) -> int:
        self.num_calls += 1
        code = next(self._codes, None)
        if code is None:
            return self._then(*arguments)
        ctypes.set_errno(code)
        return -1


def two_folders(folder: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (folder / name / f"of {name}").mkdir(parents=True)
    return folder / "a", folder / "b"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_an_unsupported_exchange_changes_nothing_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    a, b = two_folders(tmp_path)
    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(renameat2=Refusing([code])))
    assert DISK.exchange(a, b) is False
    assert (names(a), names(b)) == (["of a"], ["of b"])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EROFS, errno.ENOSPC])
def test_an_exchange_that_fails_otherwise_raises_the_error_of_the_system_and_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    a, b = two_folders(tmp_path)
    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(renameat2=Refusing([code])))
    with pytest.raises(OSError) as caught:
        DISK.exchange(a, b)
    error = caught.value
    assert (error.errno, error.strerror) == (code, os.strerror(code))
    assert (error.filename, error.filename2) == (str(a), str(b))


def test_the_system_refuses_to_exchange_a_folder_with_one_inside_it_and_changes_nothing(tmp_path: Path) -> None:
    a, _ = two_folders(tmp_path)
    assert DISK.exchange(a, a / "of a") is False
    assert (names(tmp_path), names(a)) == (["a", "b"], ["of a"])


def can_exchange(folder: Path) -> bool:
    """Return whether the system can swap two names in `folder`."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    a, b = two_folders(folder / "probe")
    return renameat2 is not None and renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0


def test_an_exchange_swaps_wherever_the_system_can_and_returns_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange(tmp_path):
        pytest.skip("the system has no exchange of names here")
    a, b = two_folders(tmp_path)
    assert DISK.exchange(a, b) is True
    assert (names(a), names(b)) == (["of b"], ["of a"])
    monkeypatch.chdir(tmp_path)
    assert DISK.exchange(Path("a"), Path("b")) is True
    assert (names(a), names(b)) == (["of a"], ["of b"])


def test_a_created_file_is_empty_readable_by_others_and_never_one_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of another save")
    umask = os.umask(0o022)
    try:
        os.close(DISK.create(tmp_path / "new"))
        with pytest.raises(FileExistsError, match="file"):
            DISK.create(tmp_path / "file")
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "new").read_bytes() == b""
    assert (tmp_path / "file").read_bytes() == b"of another save"


def test_room_is_reserved_for_the_complete_file_and_interrupted_calls_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[object] = []

    def note(*arguments: object) -> int:
        requests.append(arguments)
        return 0

    fallocate = Refusing([errno.EINTR, errno.EINTR], note)
    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(fallocate64=fallocate))
    DISK.allocate(7, 5 << 30)
    assert (requests, fallocate.num_calls) == ([(7, 0, 0, 5 << 30)], 3)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV])
def test_where_the_system_cannot_reserve_room_nothing_is_done(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fallocate = Refusing([code])
    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(fallocate64=fallocate))
    DISK.allocate(7, 100)
    assert fallocate.num_calls == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_without_room_the_error_of_the_system_is_raised(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fallocate = Refusing([code])
    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(fallocate64=fallocate))
    with pytest.raises(OSError) as caught:
        DISK.allocate(7, 100)
    assert (caught.value.errno, caught.value.strerror) == (code, os.strerror(code))
    assert fallocate.num_calls == 1


def test_allocated_room_takes_space_on_the_disk(base: Path) -> None:
    num_bytes = 64 << 10
    with (base / "probe").open("wb") as probe, (base / "file").open("wb") as file:
        if ctypes.CDLL(None).fallocate(probe.fileno(), 0, ctypes.c_long(0), ctypes.c_long(num_bytes)) != 0:
            pytest.skip("the file system cannot allocate")
        DISK.allocate(file.fileno(), num_bytes)
        status = os.fstat(file.fileno())
    assert (status.st_size, status.st_blocks * 512 >= num_bytes) == (num_bytes, True)


def test_a_file_is_written_over_a_longer_one(tmp_path: Path) -> None:
    for data in (b"longer", b"old", b""):
        DISK.write_file(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data


def test_a_folder_that_another_rank_makes_at_the_same_moment_is_no_error(tmp_path: Path) -> None:
    class SecondToMakeIt(durable.Durable):
        def make_dir(self, path: Path) -> None:
            super().make_dir(path)
            if path == tmp_path / "outputs":
                (path / "checkpoint").mkdir()

    SecondToMakeIt().make_dir(tmp_path / "outputs" / "checkpoint" / "step-1.staging")
    assert (tmp_path / "outputs" / "checkpoint" / "step-1.staging").is_dir()


@pytest.mark.parametrize("operation", ["rename", "replace"])
def test_a_renamed_file_replaces_another(tmp_path: Path, operation: str) -> None:
    (tmp_path / "a").write_bytes(b"of a")
    (tmp_path / "b").write_bytes(b"of b")
    getattr(DISK, operation)(tmp_path / "a", tmp_path / "b")
    assert (names(tmp_path), (tmp_path / "b").read_bytes()) == (["b"], b"of a")


def test_a_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("file")
    DISK.remove_file(tmp_path / "link")
    assert names(tmp_path) == ["file"]


class Twice:
    """Sends a request twice, as the client of a network file system may after an answer that was lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.count = 0
        for name in names:
            monkeypatch.setattr(os, name, self._twice(getattr(os, name)))

    def _twice(self, request: Callable[..., object]) -> Callable[..., object]:
        def send(*args: Any, **kwargs: Any) -> object:
            self.count += 1
            request(*args, **kwargs)
            return request(*args, **kwargs)

        return send


def test_what_was_done_is_done_though_the_request_was_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree" / "folder").mkdir(parents=True)
    for name in ("file", "tree/file", "tree/folder/file"):
        (tmp_path / name).write_bytes(b"data")
    twice = Twice(monkeypatch, "rename", "replace", "unlink", "rmdir")
    DISK.rename(tmp_path / "file", tmp_path / "renamed")
    DISK.replace(tmp_path / "renamed", tmp_path / "replaced")
    DISK.remove_file(tmp_path / "replaced")
    DISK.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == []
    assert twice.count == 7


@pytest.mark.parametrize("name", ["rename", "replace"])
def test_a_rename_of_what_is_not_there_is_an_error_whatever_has_the_new_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_bytes(b"kept")
    with pytest.raises(FileNotFoundError):
        getattr(DISK, name)(tmp_path / "none", tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_bytes_are_written_at_their_offset_and_the_file_has_its_size(tmp_path: Path) -> None:
    fd = DISK.create(tmp_path / "file")
    assert DISK.write_at(fd, memoryview(b"end"), 5) == 3
    assert DISK.write_at(fd, memoryview(b"begin"), 0) == 5
    DISK.set_size(fd, 7)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"beginen"


def test_a_file_too_large_for_any_disk_is_refused_by_the_system(base: Path) -> None:
    with (base / "probe").open("wb") as probe, (base / "file").open("wb") as file:
        if ctypes.CDLL(None).fallocate(probe.fileno(), 0, ctypes.c_long(0), ctypes.c_long(4096)) != 0:
            pytest.skip("the file system cannot allocate")
        with pytest.raises(OSError) as caught:
            DISK.allocate(file.fileno(), 1 << 61)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_syncing_a_folder_refuses_what_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        DISK.fsync_dir(tmp_path / "file")


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda folder: DISK.fsync_dir(folder), ""),
        (lambda folder: DISK.write_file(folder / "file", b"x"), "file"),
        (lambda folder: DISK.write_atomically(folder / "file", b"x"), ".file.tmp"),
        (lambda folder: DISK.make_dir(folder / "new"), ""),
    ],
    ids=["fsync_dir", "write_file", "write_atomically", "make_dir"],
)
def test_a_failing_sync_names_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None], name: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError) as caught:
        act(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / name))


def test_a_failing_rename_names_both_paths(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        DISK.rename(tmp_path / "none", tmp_path / "other")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "none"), str(tmp_path / "other"))
