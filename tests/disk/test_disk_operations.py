"""Single operations on the disk: modes, relative paths, races with other processes, names in errors."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_lite import faults
from torchtitan_lite.disk import durable
from torchtitan_lite.disk.block_writer import Bounced, write_blocks
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.store.holder import Holder

ZEROS = Bounced(5000, lambda buffer, begin, end: None)


def test_an_exchange_of_relative_paths_goes_by_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "of a").mkdir(parents=True)
    (tmp_path / "b" / "of b").mkdir(parents=True)
    if DISK.exchange(tmp_path / "a", tmp_path / "b"):
        assert DISK.exchange(Path("a"), Path("b"))
    assert (tmp_path / "a" / "of a").is_dir() and (tmp_path / "b" / "of b").is_dir()


def test_a_new_file_may_be_read_by_all_and_written_by_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(DISK.create(tmp_path / "file"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_another_process_creates_at_the_same_moment_is_no_error(tmp_path: Path) -> None:
    class Racing(Durable):
        """Another process creates each folder right before this one does."""

        def make_dir(self, path: Path) -> None:
            super().make_dir(path)
            if path != tmp_path / "outputs" / "checkpoint":
                (path / "checkpoint").mkdir(exist_ok=True)

    Racing().make_dir(tmp_path / "outputs" / "checkpoint")
    assert (tmp_path / "outputs" / "checkpoint").is_dir()


def test_an_allocation_interrupted_by_a_signal_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([errno.EINTR, errno.EINTR, 0])

    def fallocate(*arguments: object) -> int:
        code = next(answers)
        ctypes.set_errno(code)
        return -1 if code else 0

    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(fallocate64=fallocate))
    DISK.allocate(0, 10)
    assert next(answers, None) is None


def test_allocated_room_belongs_to_the_file(tmp_path: Path) -> None:
    fd = DISK.create(tmp_path / "file")
    try:
        DISK.allocate(fd, 1 << 20)
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    finally:
        os.close(fd)


def test_an_error_that_names_another_file_keeps_its_name(tmp_path: Path) -> None:
    class Elsewhere(Durable):
        def allocate(self, fd: int, num_bytes: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "elsewhere")

    with pytest.raises(OSError) as caught:
        write_blocks(tmp_path / "file", ZEROS, durable=Elsewhere())
    assert caught.value.filename == "elsewhere"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("point", ["open", "write", "fsync"])
def test_a_fault_of_one_file_s_writes_leaves_others_alone(tmp_path: Path, point: str, direct: bool) -> None:
    faults.install(f"EIO@{point}:path=other,times=always", rank=0)
    write_blocks(tmp_path / "file", ZEROS, direct=direct)
    with pytest.raises(OSError) as caught:
        write_blocks(tmp_path / "other", ZEROS, direct=direct)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "other"))


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that waits for a signal, with a name that is not valid text."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        for number in range(1, signal.SIGRTMIN):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        Path("/proc/self/comm").write_bytes(b"\xff) \xfe")
        os.write(theirs, b"x")
        signal.pause()
    assert os.read(ours, 1) == b"x"
    yield pid
    os.close(ours)
    os.close(theirs)
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_checking_whether_a_process_lives_sends_it_no_signal(pid: int) -> None:
    holder = dataclasses.replace(Holder.this_process("theirs", 0), pid=pid, started=0)
    assert not holder.has_ended()
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, "any other signal would have ended it before"


def test_a_process_whose_name_is_not_valid_text_has_a_start_time(pid: int) -> None:
    holder = dataclasses.replace(Holder.this_process("theirs", 0), pid=pid, started=1)
    assert holder.has_ended(), "it started later: it is another one"


@pytest.mark.parametrize(
    ("field", "low", "high"), [("pid", 1, 2**31 - 1), ("started", 0, 2**63 - 1), ("since", 0, 253402300799)]
)
def test_a_lock_file_with_a_number_out_of_range_names_no_holder(field: str, low: int, high: int) -> None:
    holder = Holder.this_process("theirs", 0)
    for number, is_sound in ((low, True), (low - 1, False), (high, True), (high + 1, False)):
        changed = dataclasses.replace(holder, **{field: number})  # type: ignore[arg-type]  # a number each
        assert Holder.parse(changed.to_bytes(1, 1)) == (changed if is_sound else None)
        if is_sound:
            assert str(changed).startswith("run theirs (process ")
