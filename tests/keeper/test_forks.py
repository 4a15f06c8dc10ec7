"""A keeper that starts in a thread while the process forks, as a data loader does for its workers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from tests.forked import Forked
from torchtitan_lite.memory.keeper.client import Keeper

pytestmark = pytest.mark.slow(reason="forks hundreds of processes during eight starts")


workers: list[int] = []


def _fork_during_starts(root: str, runtime: str) -> None:
    """Fork workers that stay alive while a thread starts keepers; exit with 1 if a worker holds a start up."""
    reader, writer = os.pipe()
    sys.setswitchinterval(1e-6)
    for number in range(8):
        keeper = Keeper(Path(root) / str(number), 60.0, runtime=Path(runtime))
        starting = threading.Thread(target=keeper.start, daemon=True)
        starting.start()
        while starting.is_alive() and len(workers) < 400:
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                os.read(reader, 1)  # Until the process that forked it ends.
                os._exit(0)
            workers.append(pid)
        starting.join(20)
        if starting.is_alive():
            os._exit(1)
    os._exit(0)


def test_a_worker_that_is_forked_while_the_keeper_starts_does_not_hold_the_start_up(
    tmp_path: Path, memory_tier: Path
) -> None:
    process = Forked(_fork_during_starts, str(tmp_path), str(memory_tier))
    assert process.wait(60) == 0
