"""What images must not do to a run: bring back what its owner deleted, lose what was loaded, or fail its saves."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.images.starts import run
from tests.checkpoint.small_run import SmallRun

pytestmark = pytest.mark.usefixtures("memory_tier")


@pytest.mark.parametrize("interval", [0, 1])
def test_a_step_that_was_deleted_from_the_disk_does_not_come_back_from_memory(tmp_path: Path, interval: int) -> None:
    folder = tmp_path / "run"
    run(folder, 4, interval=2, memory_interval=interval)
    shutil.rmtree(folder / "step-4")  # Its owner wants to roll back to step 2.
    assert run(folder, 0, interval=2).loaded in [(2, "disk"), (2, "memory")]


def test_after_all_checkpoints_were_deleted_a_run_begins_fresh(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4, interval=4, memory_interval=0)
    shutil.rmtree(folder / "step-4")
    assert run(folder, 0).loaded is None


def test_a_start_without_images_of_its_own_can_be_killed_before_its_first_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4)
    assert run(folder, first.ready, async_mode="disabled", memory_interval=0).loaded == (first.ready, "memory")
    again = run(folder, 0).loaded
    assert again is not None
    assert again[0] == first.ready


@pytest.mark.slow
def test_fewer_ranks_can_be_killed_before_their_first_image(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4, ranks=2)
    assert run(folder, 0, memory_interval=0).loaded == (first.ready, "memory")
    assert run(folder, 0).loaded == (first.ready, "memory")


def refuses(*arguments: object) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "refused"])
def test_without_memfds_asynchronous_saves_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    if is_missing:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuses)
    with SmallRun(tmp_path, async_mode="async", interval=2).loaded() as small:
        small.train(4, last=False)
        small.manager.wait()
        assert small.committed() == [2, 4]
