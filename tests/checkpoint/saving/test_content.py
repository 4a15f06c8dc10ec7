"""The copies that saves write from: each is read until its own save is over."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from tests.checkpoint.small_run import target
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.saving.content import Copies, write_in_place
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.stager import Copying, Stager, do_not_watch
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.pool import Pool
from torchtitan_lite.store.store import CheckpointStore


def test_a_save_whose_end_is_noted_after_the_next_one_began_releases_its_own_copy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pool = Pool()
    pool.resize(3)
    stager = Stager(HostCopier(), pool=pool)
    copies = Copies(Copying(stager), write_in_place, do_not_watch)
    image = PlanCache(Peers(timedelta(seconds=60))).plan({"w": torch.zeros(3)}).file()
    for step in (1, 2):
        copies.content(image, target(store, step))
    copies.release()  # By the thread of the first save, which runs with the lowest priority.
    assert [slot.step for slot in stager.pool.slots if slot.is_read] == [2], "its write continues"
    copies.release()
    copies.release()  # Of a save that failed before it had a copy.
    assert not any(slot.is_read for slot in stager.pool.slots)
    stager.close()
