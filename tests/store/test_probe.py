"""What a file system lacks is found at the start, in a folder that never stays: refused if a promise rests on it."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.no_threads import no_threads
from tests.store.crashing import NEVER, Crash, Cut
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.store import probe as module
from torchtitan_lite.store.layout import Listing, is_probe
from torchtitan_lite.store.probe import (
    DIRECT,
    EXCHANGE,
    EXCLUSIVE,
    NEEDS,
    RENAMES,
    REPLACES,
    SIZES,
    SYNCED_FOLDERS,
    WANTS,
    WRITTEN,
    log_lacks,
    probe,
)
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.stores import usable


class Lacking(Durable):
    """A file system in which `operation` is refused with `code`, or is done in silence in another way."""

    def __init__(self, operation: str, code: int = errno.EINVAL, *, is_silent: bool = False) -> None:
        self._operation, self._code, self._is_silent = operation, code, is_silent

    def _is_it(self, operation: str, name: object) -> bool:
        if operation != self._operation:
            return False
        if not self._is_silent:
            raise OSError(self._code, os.strerror(self._code), str(name))
        return True

    def fsync_dir(self, path: Path) -> None:
        self._is_it("fsync_dir", path)

    def create(self, path: Path) -> int:
        if path.exists() and self._is_it("create", path):
            return os.open(path, os.O_WRONLY)
        return super().create(path)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        if self._operation == "write_at" and len(data) < 4096:
            return len(data) if self._is_it("write_at", fd) else 0
        return super().write_at(fd, data, offset)

    def set_direct(self, fd: int, is_direct: bool) -> None:
        if is_direct:
            self._is_it("set_direct", fd)

    def set_size(self, fd: int, num_bytes: int) -> None:
        if not self._is_it("set_size", fd):
            super().set_size(fd, num_bytes)

    def rename(self, src: Path, dst: Path) -> None:
        self._is_it("rename", src)
        super().rename(src, dst)

    def replace(self, src: Path, dst: Path) -> None:
        if not self._is_it("replace", src):
            super().replace(src, dst)

    def exchange(self, a: Path, b: Path) -> bool:
        return not self._is_it("exchange", a) and super().exchange(a, b)


def test_a_file_system_with_all_of_it_lacks_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    assert [each for each in probe(tmp_path) if each != DIRECT] == []
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("operation", "is_silent", "lacks"),
    [("set_direct", False, DIRECT), ("exchange", True, EXCHANGE)],
)
def test_what_is_only_worse_without_it_is_named(tmp_path: Path, operation: str, is_silent: bool, lacks: str) -> None:
    assert lacks in probe(tmp_path, Lacking(operation, is_silent=is_silent))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("operation", "is_silent", "need"),
    [
        ("fsync_dir", False, SYNCED_FOLDERS),
        ("create", True, EXCLUSIVE),
        ("write_at", True, WRITTEN),
        ("set_size", True, SIZES),
        ("replace", False, REPLACES),
        ("replace", True, REPLACES),
        ("rename", False, RENAMES),
    ],
)
def test_what_a_promise_rests_on_is_refused_as_a_lack_of_the_file_system(
    tmp_path: Path, operation: str, is_silent: bool, need: str
) -> None:
    with pytest.raises(FolderUnusable) as refused:
        probe(tmp_path, Lacking(operation, is_silent=is_silent))
    message = str(refused.value)
    assert f"its file system does not {need}" in message and NEEDS[need] in message
    assert "The cause is its file system, not a permission" in message
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EIO])
def test_another_refusal_is_none_of_the_file_system(tmp_path: Path, code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as refused:
        probe(tmp_path, Lacking("rename", code))
    assert not isinstance(refused.value, FolderUnusable)
    with pytest.raises(FolderUnusable), usable(tmp_path):
        probe(tmp_path, Lacking("rename", code))


class Killed(Cut):
    """Does nothing from operation `at` on: what would clean up is dead, too."""

    def _operation(self) -> None:
        self.done += 1
        if self.done >= self.at:
            raise self.stop


def test_what_a_kill_at_any_operation_leaves_is_removed_by_the_next_start(tmp_path: Path) -> None:
    complete = Killed(NEVER)
    probe(tmp_path, complete)
    for at in range(1, complete.done + 1):
        with pytest.raises(Crash):
            probe(tmp_path, Killed(at))
        assert [is_probe(path.name) for path in tmp_path.iterdir()] in ([], [True])
        CheckpointStore(tmp_path).recover()
        assert not [*tmp_path.iterdir()]
    assert complete.done > 8


def test_a_name_like_it_is_no_leftover(tmp_path: Path) -> None:
    for name in (".probe-", ".probe-x", "probe-1", ".probe-1.bak"):
        (tmp_path / name).mkdir()
    assert Listing(tmp_path).leftovers() == []


def test_a_start_waits_for_a_slow_file_system_only_so_long_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def hangs(root: Path) -> list[str]:
        answers.wait()
        return [EXCHANGE]

    monkeypatch.setattr(module, "probe", hangs)
    monkeypatch.setattr(module, "_TRIED", {})
    try:
        log_lacks(tmp_path, 0.05)
        assert f"{tmp_path} is slow: its file system was not checked within 0.05 s" in caplog.text
    finally:
        answers.set()
    with caplog.at_level("INFO"):
        log_lacks(tmp_path, 60)
    assert f"has no {EXCHANGE}: {WANTS[EXCHANGE]}" in caplog.text


def test_where_the_system_has_no_more_threads_it_is_tried_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRIED", {})
    monkeypatch.setattr(module, "probe", lambda root: probe(root, Lacking("rename")))
    with no_threads(), pytest.raises(FolderUnusable, match=RENAMES):
        log_lacks(tmp_path, 60)


def test_a_lack_of_what_is_needed_refuses_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIED", {})
    tried = []

    def lacking(root: Path) -> list[str]:
        tried.append(root)
        return probe(root, Lacking("rename"))

    monkeypatch.setattr(module, "probe", lacking)
    for _ in range(2):
        with pytest.raises(FolderUnusable, match=RENAMES):
            log_lacks(tmp_path, 60)
    assert tried == [tmp_path] * 2, "each start tries it again"


def test_of_two_folders_of_one_file_system_each_is_refused_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial: Future[list[str]] = Future()
    trial.set_exception(FolderUnusable("another folder", "it renames nothing", fix="Mount one that does"))
    monkeypatch.setattr(module, "_TRIED", {tmp_path.stat().st_dev: trial})
    with pytest.raises(FolderUnusable, match=rf"^{tmp_path} .*it renames nothing\. Mount one that does"):
        log_lacks(tmp_path, 60)


def test_the_page_on_file_systems_has_what_is_tried_and_what_follows() -> None:
    page = Path(__file__).parents[2] / "docs" / "file_systems.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    assert [[name, follows] for name, follows in [*NEEDS.items(), *WANTS.items()] if [name, follows] not in rows] == []
