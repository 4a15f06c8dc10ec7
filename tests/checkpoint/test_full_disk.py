"""A disk that is full, for real: training goes on, and later saves work once there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.disks import fill, small_disk


@pytest.fixture(name="small_disk")
def make_small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_training_goes_on_over_a_full_disk_and_saves_when_there_is_room(
    start_run: StartRun, small_disk: Path, mode: str
) -> None:
    run = start_run(small_disk, interval=2, async_mode=mode, max_failed_saves=9, keep_latest_k=2)
    filler = fill(small_disk, leave_bytes=64 << 10)
    for _ in range(5):
        run.step()
    assert run.manager.newest_step() == -1
    assert run.events.steps("save_failed") == [2, 4]
    assert "No space left on device" in run.events.figures("save_failed")["reason"]
    assert run.names() == []
    filler.unlink()
    run.train(10)
    assert run.committed() == [8, 10]
    again = start_run(small_disk, interval=2, async_mode=mode)
    assert again.manager.load()
    assert again.losses == run.losses


def test_a_save_after_which_the_disk_fills_up_stays(start_run: StartRun, small_disk: Path) -> None:
    run = start_run(small_disk, interval=1, max_failed_saves=9)
    run.step()
    nbytes = sum(path.stat().st_size for path in (run.root / "step-1").iterdir())
    fill(small_disk, leave_bytes=2 * nbytes)
    for _ in range(3):
        run.step()
    assert run.committed()[0] == 1
    assert run.events.steps("save_failed")
    again = start_run(small_disk, load_only=True)
    assert again.manager.load()
