"""A keeper may open as many descriptors as it has to hold, whatever the process that starts it may open."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from torchtitan_lite.memory.keeper import messages, process
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.memory.keeper.process import Answer


def test_a_keeper_raises_its_own_limit_and_leaves_that_of_its_starter(runtime: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    # Above every descriptor that is open here: earlier tests of this process have some.
    few = (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 32, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, few)
    try:
        keeper.start()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    described = keeper.describe()
    assert described is not None
    lines = Path(f"/proc/{described.pid}/limits").read_text().splitlines()
    (soft,) = (line.split()[3] for line in lines if line.startswith("Max open files"))
    assert int(soft) == min(4096, before[1] if before[1] != resource.RLIM_INFINITY else 4096)
    keeper.end()


def test_memory_is_freed_and_answered_where_this_user_may_have_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    freed = os.memfd_create("arena")
    process._answer_in_thread(Answer({"names": []}, freed=[freed]), its)
    assert messages.receive(ours)[0]["names"] == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(freed)
    ours.close()
    freed = os.memfd_create("arena")
    process._answer_in_thread(Answer({}, freed=[freed]), its)  # Whoever asked has hung up.
    its.close()
