"""A second manager on the folder of one that is open in the same process: a cell of a notebook that is run again."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.savers import ObservedSaver
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun, same
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, RunNotLoaded
from torchtitan_lite.log import logger
from torchtitan_lite.store.store import CheckpointStore


@contextmanager
def when_logged(text: str, event: threading.Event) -> Iterator[None]:
    """Set `event` as soon as a log line has `text` in it."""

    class Setter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                event.set()

    handler = Setter()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def slow_saver(may_continue: threading.Event) -> ObservedSaver:
    """Return a saver whose second save is not written before `may_continue`."""
    saver, folders = ObservedSaver(ThreadSaver(Peers(timedelta(seconds=60)))), []

    def before_write(path: Path) -> None:
        folders.append(path)
        if len(folders) == 2:
            may_continue.wait(60)

    saver.before_write = before_write
    return saver


@pytest.mark.parametrize("is_handed_in", [False, True])
def test_a_second_manager_waits_for_the_save_of_the_first_and_resumes_from_it(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_handed_in: bool
) -> None:
    """Also where both are handed the same store: each checks its own lease."""
    may_continue = threading.Event()
    same_store = {"store": CheckpointStore(tmp_path / "checkpoint")} if is_handed_in else {}
    first = start_run(interval=1, async_mode="async", seams={"saver": slow_saver(may_continue), **same_store})
    first.train(2, last=False)
    second = start_run(seed=1, seams=same_store)
    with when_logged("Closing the manager that this process opened earlier", may_continue):
        assert second.manager.load()
    assert second.manager.loaded_step == 2
    assert same(second.contents(), first.contents())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [line for line in caplog.messages if "another one opens" in line]


def test_a_save_in_flight_of_a_manager_that_was_dropped_is_awaited_too(start_run: StartRun, tmp_path: Path) -> None:
    may_continue = threading.Event()
    run = SmallRun(tmp_path, interval=1, async_mode="async", seams={"saver": slow_saver(may_continue)})
    run.train(2, last=False)
    dropped = weakref.ref(run.manager)
    del run
    gc.collect()
    assert dropped() is None
    second = start_run(interval=1)
    with when_logged("Closing the manager that this process opened earlier", may_continue):
        assert second.manager.load()
    assert second.manager.loaded_step == 2
    second.train(3)
    assert second.committed() == [1, 2, 3]


def test_a_manager_that_was_replaced_says_so_and_saves_nothing_over_the_other(start_run: StartRun) -> None:
    first = start_run(interval=1)
    first.train(2, last=False)
    second = start_run(interval=1, seed=1).resumed()
    for call in (lambda: first.step(), first.manager.wait, first.manager.reset, lambda: first.manager.finish(3)):
        with pytest.raises(ConfigError, match=r"another manager of this process opened .*call its load\(\)"):
            call()
    first.manager.close()
    second.train(4, last=False)
    assert second.committed() == [1, 2, 3, 4]


def test_a_load_makes_a_manager_that_was_replaced_the_one_of_the_folder_again(start_run: StartRun) -> None:
    first = start_run(interval=1)
    first.train(2, last=False)
    second = start_run(interval=1, seed=1).loaded()
    second.train(3, last=False)
    assert first.manager.load()
    assert first.manager.loaded_step == 3
    first.train(4)
    with pytest.raises(ConfigError, match="another manager of this process"):
        second.step()
    assert first.committed() == [1, 2, 3, 4]


def test_managers_of_other_folders_and_those_that_only_load_close_no_manager(
    start_run: StartRun, tmp_path: Path
) -> None:
    first = start_run(interval=1)
    first.train(2, last=False)
    elsewhere = start_run(tmp_path / "other", interval=1)
    elsewhere.train(1, last=False)
    evaluating = start_run(load_only=True).resumed()
    first.train(3, last=False)
    evaluating.manager.close()
    first.train(4, last=False)
    assert (first.committed(), elsewhere.committed()) == ([1, 2, 3, 4], [1])


def test_one_folder_of_exports_is_a_folder_of_one_manager_too(start_run: StartRun, tmp_path: Path) -> None:
    first = start_run(interval=1, export_folder="export")
    first.train(1, last=False)
    second = start_run(interval=1, folder=tmp_path, export_folder="export").loaded()
    with pytest.raises(ConfigError, match="another manager of this process"):
        first.train(2)
    second.train(2)
    assert [info.step for info in CheckpointStore(tmp_path / "export").committed()] == [2]


def test_a_manager_that_was_closed_is_in_no_ones_way(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    first = start_run(interval=1).finished(1)
    start_run(interval=1).loaded().finished(2)
    assert first.manager.load()
    first.train(3)
    assert "another one" not in caplog.text


@on_two_ranks
def test_all_ranks_hand_a_folder_over(rank: int, tmp_path: Path) -> None:
    first = sharded_run(tmp_path, interval=1, async_mode="async")
    first.train(2, last=False)
    second = sharded_run(tmp_path, interval=1)
    assert second.manager.load()
    assert second.train_state.step == 2
    second.train(3, last=False)
    with pytest.raises(ConfigError, match="another manager of this process"):
        first.train(3, last=False)
    second.manager.close()
    dist.barrier()
    assert second.names() == ["step-1", "step-2", "step-3"]


def test_a_manager_that_is_used_again_after_another_job_trained_on_has_to_load_first(start_run: StartRun) -> None:
    first = start_run(interval=1).finished(2)
    start_run(interval=1, seed=1).loaded().finished(5)
    for call in (lambda: first.step(), first.manager.reset):
        with pytest.raises(RunNotLoaded, match=r"step 3, 4, 5.*Call manager\.load\(\)"):
            call()
    assert first.manager.load()
    first.train(6)
    assert first.committed() == [1, 2, 3, 4, 5, 6]


def test_a_step_that_another_job_saved_again_counts_as_its_own(start_run: StartRun) -> None:
    first = start_run(interval=1).finished(2)
    other = start_run(interval=1, seed=1)
    other.manager.load(1)
    other.train(2)
    other.manager.close()
    with pytest.raises(RunNotLoaded, match="step 2"):
        first.step()


def test_a_manager_that_is_used_again_continues_where_no_other_job_was(start_run: StartRun) -> None:
    run = start_run(interval=1, keep_latest_k=2)
    for steps in (2, 4, 6):
        run.train(steps)
        run.manager.close()
    assert run.committed() == [5, 6]
