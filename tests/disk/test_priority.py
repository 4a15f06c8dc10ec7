"""The writer process gives way to training; no thread of the training process does, which may hold the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.checkpoint.small_run import target
from torchtitan_lite.checkpoint.saving.content import write_in_place
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.checkpoint.staging.stager import StagedCopy
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.threads import NICE, Background, give_way
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")


def _nice_in_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def _nice_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_giving_way_affects_the_caller_and_the_threads_that_it_starts() -> None:
    before = _nice_of_this_thread()

    def both() -> int:
        give_way()
        assert _nice_of_this_thread() == min(before + NICE, 19)
        return _nice_in_thread(_nice_of_this_thread)

    assert _nice_in_thread(both) == min(before + NICE, 19)
    assert _nice_of_this_thread() == before
    assert _nice_in_thread(_nice_of_this_thread) == before


@pytest.mark.skipif(platform.machine() not in IOPRIO_GET, reason="the system call's number is not known here")
def test_giving_way_sets_the_lowest_best_effort_io_priority() -> None:
    def class_and_level() -> int:
        give_way()
        return ctypes.CDLL(None).syscall(IOPRIO_GET[platform.machine()], 1, 0)

    best_effort = 2
    assert divmod(_nice_in_thread(class_and_level), 1 << 13) == (best_effort, 7)


def test_a_save_succeeds_also_where_another_priority_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(by: int) -> int:
        raise PermissionError

    def work() -> int:
        give_way()
        return _nice_of_this_thread()

    monkeypatch.setattr(os, "nice", refuse)
    assert _nice_in_thread(work) == _nice_of_this_thread()


def _nice_of_all_threads() -> set[int]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found


def test_no_thread_is_lowered_while_a_thread_writes_a_save(tmp_path: Path) -> None:
    before = _nice_of_this_thread()
    while_writing: list[set[int]] = []

    def write(new: NewFile, staged: StagedCopy, of: SaveTarget) -> FileRecord:
        while_writing.append(_nice_of_all_threads())
        return write_in_place(new, staged, of)

    saver = ThreadSaver(Peers(timedelta(seconds=60)), write=write)
    pending = saver.save({"weight": torch.ones(3)}, target(CheckpointStore(tmp_path), 1))
    pending.durable.result(60)
    saver.close(60)
    assert while_writing == [{before}]


def test_no_thread_is_lowered_while_work_runs_in_the_background() -> None:
    before = _nice_of_this_thread()
    background, while_running = Background("test"), []
    background.run("look", lambda: while_running.append(_nice_of_all_threads()))
    assert background.close(60)
    assert while_running == [{before}]
