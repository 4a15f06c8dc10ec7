"""A disk that takes long: it is said with the file, and no rank gives up on the others."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.slow_disk import SlowDisk
from tests.logged import logged_warnings
from tests.ranks import Ranks
from torchtitan_lite import faults
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.saving import writer

GROUP_SECONDS = 10


class Heard(logging.Handler):
    """Allows the disk to write once it was said to be slow."""

    def __init__(self, may_write: threading.Event) -> None:
        super().__init__()
        self.may_write, self.texts = may_write, []

    def emit(self, record: logging.LogRecord) -> None:
        if "its file system is slow" in record.getMessage():
            self.texts.append(record.getMessage())
            self.may_write.set()


def test_a_write_that_takes_long_is_said_with_its_file_while_it_does(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLOW_SECONDS", 0.01)
    disk = SlowDisk()
    heard = Heard(disk.may_write)
    logging.getLogger("torchtitan_lite").addHandler(heard)
    try:
        run = start_run(interval=1, async_mode="async", seams={"saver": disk.saver})
        run.step()
        run.manager.wait()
    finally:
        logging.getLogger("torchtitan_lite").removeHandler(heard)
    assert run.committed() == [1] and heard.texts
    assert "/step-1.staging-" in heard.texts[0] and "__0_0.distcp takes more than 0.01 s" in heard.texts[0]


def test_a_quick_write_says_nothing(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    start_run(interval=1).train(2)
    assert "is slow" not in caplog.text


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("disabled", marks=pytest.mark.slow),
        pytest.param("async", marks=pytest.mark.exhaustive),
        pytest.param("async_with_pinned_mem", marks=pytest.mark.exhaustive),
    ],
)
def test_a_write_that_takes_longer_than_the_training_group_waits_fails_nothing(
    mode: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(over_a_slow_write, folder=tmp_path, mode=mode)


def over_a_slow_write(rank: int, folder: Path, mode: str) -> None:
    """Train with collectives of the default group, next to a write of rank 1 that takes longer than that waits."""
    _set_pg_timeout(timedelta(seconds=GROUP_SECONDS), dist.group.WORLD)
    faults.install(f"slow@write:rank=1,step=1,seconds={GROUP_SECONDS + 3}", rank=rank)
    model = torch.nn.Linear(4, 4)
    try:
        with (
            logged_warnings() as warned,
            CheckpointManager.for_loop(model=model, folder=folder, interval=1, async_mode=mode) as manager,
        ):
            for step in (1, 2):
                manager.maybe_wait_for_staging()
                dist.all_reduce(torch.ones(1))
                manager.save(step)
            manager.wait()
            assert manager.latest_step() == 2
    finally:
        faults.install("", rank=rank)
        _set_pg_timeout(timedelta(minutes=30), dist.group.WORLD)
    assert [text for text in warned if "The fault of" not in text] == []
