"""A call that rank 0 makes alone, as in `if rank == 0: manager.save(...)`, says in the log whom it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.sharded_run import sharded_run
from tests.ranks import on_two_ranks
from torchtitan_lite.distributed import groups
from torchtitan_lite.log import logger


def rank_0_first(rank: int, noticed: Path, call: Callable[[], object]) -> str:
    """Make `call` on rank 0, and on rank 1 after a warning of rank 0, which is returned."""

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING and not noticed.exists():
                partial = noticed.with_suffix(".partial")
                partial.write_text(record.getMessage())
                partial.rename(noticed)

    handler = Notice()
    if rank == 0:
        logger.addHandler(handler)
    else:
        while not noticed.exists():
            time.sleep(0.01)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return noticed.read_text()


@on_two_ranks
def test_a_save_of_one_rank_alone_names_itself_while_it_waits(rank: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run = sharded_run(tmp_path, interval=100)
        patch.setattr(groups, "NOTICE_SECONDS", 0.05)
        seen = rank_0_first(rank, tmp_path / "open", run.manager.load)
        assert seen.startswith("In the first call of the checkpoint manager for 0 s")
        run.take_step()
        seen = rank_0_first(rank, tmp_path / "first", lambda: run.manager.save(1))
        assert seen.startswith("In the first save() of the checkpoint manager for 0 s")
        run.take_step()
        seen = rank_0_first(rank, tmp_path / "later", lambda: run.manager.save(2, now=True))
        assert seen.startswith("In save(2) for 0 s, probably waiting for other ranks. Every rank has to make this call")
        run.manager.close()
