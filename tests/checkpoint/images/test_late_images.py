"""A process of the start before that still keeps images while the next start looks: what it adds is seen by all ranks.

Ranks of one host know each other by what their keeper holds, and share it out. A list from before the end of that
process could differ from rank to rank, and two ranks would write into the same memory.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import steps_in
from tests.checkpoint.images.starts import run
from torchtitan_lite.checkpoint.images.held_images import HeldImages
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.keeper.client import HeldMemory, Keeper

pytestmark = pytest.mark.usefixtures("memory_tier")


class KeepsOneMore(Keeper):
    """A keeper with which a process of the start before is registered, which keeps one more arena before it ends."""

    has_ended_now = False

    def held(self, start_id: str | None = None) -> list[HeldMemory]:
        return [
            HeldMemory(*each, not self.has_ended_now)
            for each in ((h.name, h.arena_fd, h.mark_fd) for h in super().held())
        ]

    def wait_until_unmapped(self, seconds: float, start_id: str | None = None) -> bool:
        (first, *others) = super().held()
        fds = os.memfd_create("arena"), os.memfd_create("mark")
        for fd in fds:
            os.ftruncate(fd, 4096)
        self.keep("zz", fds)
        for each in (first, *others):
            each.close()
        for fd in fds:
            os.close(fd)
        self.has_ended_now = True
        return True


def test_what_was_kept_while_a_start_waited_is_among_what_it_finds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 3)
    before = steps_in(folder)
    images = HeldImages(KeepsOneMore(folder, 60.0, runtime=runtime_folder()), "new", Peers(timedelta(seconds=60)))
    open_before = len([*Path("/proc/self/fd").iterdir()])
    images.look(topology="")
    assert "zz" in images._own_host
    assert [each.key.step for each in images.complete] == before[::-1]
    images.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == open_before
