"""Two ranks with a sharded model: what is saved, when, and what is kept."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.savers import TIMEOUT_SECONDS
from tests.checkpoint.sharded_run import at_steps, same_everywhere, sharded_run
from tests.checkpoint.small_run import same
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore


class CountingDurable(Durable):
    """Counts the committed checkpoints of `folder` after each operation that could remove one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: list[int] = []

    def rename(self, src: Path, dst: Path) -> None:
        super().rename(src, dst)
        self._count()

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        self._count()

    def _count(self) -> None:
        self.counts.append(len(CheckpointStore(self.folder).committed()))


@pytest.mark.promise(
    "A checkpoint holds the state as it was when `save` returned, whatever training changes afterwards.",
    section="state",
)
@on_two_ranks
def test_what_is_saved_is_what_was_there_when_save_returned(rank: int, tmp_path: Path, mode: str) -> None:
    run = sharded_run(tmp_path, interval=2, async_mode=mode)
    may_write = threading.Event()
    if mode == "disabled":
        may_write.set()
    run.saver.before_write = lambda path: may_write.wait()
    with run.manager:
        run.train(2, last=False)
        saved = run.contents()
        run.scramble()
        may_write.set()
        run.saver.wait()
        assert run.manager.load()
        assert run.manager.loaded_step == 2
        assert same(run.contents(), saved)


@on_two_ranks
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(rank: int, tmp_path: Path, mode: str) -> None:
    straight = sharded_run(tmp_path / "straight", load_only=True)
    straight.train(7, last=False)
    straight.manager.close()
    for last in (3, 5, 7):
        with (run := sharded_run(tmp_path / "stopped", interval=2, async_mode=mode)).manager:
            assert run.manager.load() == (last > 3)
            run.manager.reset()
            run.train(last)
    assert same(run.contents(), straight.contents())


@on_two_ranks
def test_ranks_whose_clocks_differ_save_the_same_steps(rank: int, tmp_path: Path) -> None:
    seconds = [0.0]
    run = sharded_run(
        tmp_path, interval_type="seconds", interval=5, seams={"clock": lambda: 1000.0 * rank + seconds[0]}
    )
    with run.manager:
        run.manager.reset()
        saved = []
        for step in range(1, 13):
            seconds[0] += (1.0, 3.0)[rank] if step <= 6 else (3.0, 1.0)[rank]
            saved += run.train(step, last=False)
    # The faster clock reaches 5 s in its second step; one step later all ranks know it, and save.
    assert saved == [3, 6, 9, 12]
    assert same_everywhere(saved)
    assert run.names() == ["step-12", "step-3", "step-6", "step-9"]


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_two_ranks
def test_retention_never_leaves_fewer_than_it_keeps(rank: int, tmp_path: Path, mode: str, keep: int) -> None:
    disk = CountingDurable(tmp_path / "checkpoint")
    store = CheckpointStore(tmp_path / "checkpoint", durable=disk)
    with (
        run := sharded_run(tmp_path, interval=1, keep_latest_k=keep, async_mode=mode, seams={"store": store})
    ).manager:
        run.train(5)
    assert run.names() == ["step-4", "step-5"][-keep:]
    if rank == 0:
        assert min(disk.counts[disk.counts.index(keep) :]) == keep
        assert [step for step, _, _ in run.events.happened("purged")] == list(range(1, 6 - keep))
    else:
        assert disk.counts == [], "only the coordinator deletes"


@on_two_ranks
def test_a_signal_on_one_rank_makes_all_save_the_same_step_and_leave(rank: int, tmp_path: Path) -> None:
    class Watch:
        received = 0
        left = False

        def start(self) -> None: ...

        def leave(self) -> None:
            self.left = True

        def seconds_left(self) -> float:
            return 60.0

        def close(self) -> None: ...

    watch = Watch()
    run = sharded_run(tmp_path, interval=100, async_mode="async", seams={"preemption": watch})
    with run.manager:
        run.train(2, last=False)
        watch.received = 15 if rank == 1 else 0
        saved = run.train(3, last=False)
        while not run.manager.preempted_by:
            saved += run.train(run.train_state.step + 1, last=False)
        assert saved == [4]
        assert run.names() == ["step-4"], "durable before close"
        assert run.manager.preempted_by == 15
        assert watch.left
    assert same_everywhere(saved)


@on_two_ranks
def test_a_dead_writer_process_is_replaced_by_the_next_save(rank: int, tmp_path: Path) -> None:
    saver = ProcessSaver(Peers(timedelta(seconds=TIMEOUT_SECONDS)), timeout_seconds=TIMEOUT_SECONDS)
    process = saver.process
    run = sharded_run(tmp_path, saver=saver, seams={"save_policy": at_steps(1, 2, 5)})

    def kill(path: Path) -> None:
        if rank == 1 and process.pid is not None and layout.parse_staging(path.parent.name) == 2:
            os.kill(process.pid, signal.SIGKILL)

    run.saver.before_write = kill
    with run.manager:
        run.train(1, last=False)
        first = process.pid
        run.train(2, last=False)
        run.saver.wait()
        run.train(5, last=False)
        run.saver.wait()
        assert (process.pid != first) == (rank == 1)
    [(step, noticed, figures)] = run.events.happened("save_failed")
    assert (step, noticed) == (2, 4)
    assert f"rank 1: WriterProcessDied: writer process {first}" in figures["reason"] or rank == 0
    assert same_everywhere(figures["reason"])
    assert run.names() == ["step-1", "step-5"]
