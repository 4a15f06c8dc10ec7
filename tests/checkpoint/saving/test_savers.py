"""The three ways to save keep one contract."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.savers import Lent
from tests.checkpoint.small_run import target
from tests.disks import FailingDisk
from tests.forked import run_code
from torchtitan_lite.checkpoint.saving.savers import (
    PendingSave,
    ProcessSaver,
    Saver,
    SyncSaver,
    ThreadSaver,
    build_saver,
)
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.stager import Copying, Stager
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))
DEADLINE_SECONDS = 60.0


@pytest.fixture
def saver(mode: str, process_saver: ProcessSaver) -> Iterator[Saver]:
    makers: dict[str, Callable[[], Saver]] = {
        "disabled": lambda: SyncSaver(PEERS),
        "async": lambda: ThreadSaver(PEERS),
        "async_with_pinned_mem": lambda: Lent(process_saver),
    }
    saver = makers[mode]()
    saver.start()
    yield saver
    saver.close(DEADLINE_SECONDS)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoint")


def begin(saver: Saver, store: CheckpointStore, state: dict[str, Any], step: int = 1) -> PendingSave:
    return saver.save(state, target(store, step))


def saved_weight(store: CheckpointStore, step: int = 1) -> list[float]:
    found = {"weight": torch.zeros(3)}
    dcp_load(found, checkpoint_id=store.get(step).path, no_dist=True)
    return found["weight"].tolist()


def test_a_save_is_staged_then_durable_and_holds_the_state_as_it_was(saver: Saver, store: CheckpointStore) -> None:
    state: dict[str, Any] = {"weight": torch.ones(3), "note": {"n": 1}}
    pending = begin(saver, store, state)
    pending.staged.result(DEADLINE_SECONDS)
    state["weight"].fill_(9)
    pending.durable.result(DEADLINE_SECONDS)
    assert pending.step == 1
    assert saved_weight(store) == [1, 1, 1]


def test_one_save_follows_another(saver: Saver, store: CheckpointStore) -> None:
    for step, size in ((1, 3), (2, 3)):
        state = {"weight": torch.full((size,), float(step)), "more": torch.zeros(5000 * step)}
        begin(saver, store, state, step).durable.result(DEADLINE_SECONDS)
    assert (saved_weight(store, 1), saved_weight(store, 2)) == ([1] * 3, [2] * 3)


def test_a_failure_is_the_result_of_the_save_and_the_next_one_succeeds(
    saver: Saver, store: CheckpointStore, tmp_path: Path
) -> None:
    full = CheckpointStore(store.root, durable=FailingDisk("rename"))
    failed = begin(saver, full, {"weight": torch.ones(3)})
    failed.staged.result(DEADLINE_SECONDS)
    failure = failed.durable.exception(DEADLINE_SECONDS)
    assert isinstance(failure, SaveFailed)
    assert (failure.step, "No space left on device" in failure.cause) == (1, True)
    begin(saver, store, {"weight": torch.ones(3)}).durable.result(DEADLINE_SECONDS)
    assert saved_weight(store) == [1, 1, 1]


def test_a_state_that_cannot_be_saved_is_a_failed_save_too(saver: Saver, store: CheckpointStore) -> None:
    failed = begin(saver, store, {"bad": {"lambda": lambda: None}})
    assert isinstance(failed.durable.exception(DEADLINE_SECONDS), SaveFailed)
    begin(saver, store, {"weight": torch.ones(3)}).durable.result(DEADLINE_SECONDS)


def test_closing_waits_for_the_save_under_way(store: CheckpointStore) -> None:
    saver = ThreadSaver(PEERS)
    pending = begin(saver, store, {"weight": torch.ones(3)})
    saver.close(DEADLINE_SECONDS)
    saver.close(DEADLINE_SECONDS)
    assert pending.durable.done()
    assert saved_weight(store) == [1, 1, 1]


def test_closing_says_nothing_of_a_save_that_is_over(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    saver = ThreadSaver(PEERS)
    begin(saver, store, {"weight": torch.ones(3)}).durable.result(DEADLINE_SECONDS)
    saver.close(DEADLINE_SECONDS)
    assert [record.message for record in caplog.records if "still being written" in record.message] == []


class StuckDisk(Durable):
    """Renames only after `let_go` is set."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def rename(self, src: Path, dst: Path) -> None:
        assert self.let_go.wait(DEADLINE_SECONDS)
        super().rename(src, dst)


@pytest.mark.slow
def test_a_prepared_arena_has_room_for_the_objects_too(store: CheckpointStore) -> None:
    stager = Stager(HostCopier())
    saver = ThreadSaver(PEERS, copying=Copying(stager))
    state = {"weight": torch.ones(3), "settings": {f"group {n}": [n] * 40 for n in range(8000)}}
    saver.prepare(lambda: state)
    stager.finish_preparation()
    prepared = stager.pool.slots[0].arena
    assert prepared is not None
    begin(saver, store, state).durable.result(DEADLINE_SECONDS)
    assert store.get(1).nbytes > 4 << 20, "more than the room that every arena has"
    assert stager.pool.slots[0].arena is prepared
    saver.close(DEADLINE_SECONDS)


def test_a_failure_that_is_noted_late_does_not_hide_the_save_that_began_since(store: CheckpointStore) -> None:
    disk = StuckDisk()
    saver, failed = ThreadSaver(PEERS), Future[Any]()
    failed.set_exception(SaveFailed(1, "of the disk"))
    pending = begin(saver, CheckpointStore(store.root, durable=disk), {"weight": torch.ones(3)})
    saver._note_over(failed)
    next_one = begin(saver, store, {"weight": torch.zeros(3)}, step=2)
    disk.let_go.set()
    assert pending.durable.result(DEADLINE_SECONDS) is not None
    with pytest.raises(SaveFailed, match="the previous save is still being written"):
        next_one.durable.result(DEADLINE_SECONDS)
    saver.close(DEADLINE_SECONDS)


def test_a_save_that_is_still_written_after_its_time_out_keeps_its_copy(store: CheckpointStore) -> None:
    disk = StuckDisk()
    saver = ThreadSaver(PEERS)
    stuck = begin(saver, CheckpointStore(store.root, durable=disk), {"weight": torch.ones(3)})
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint"), "none keeps us here"
    next_one = begin(saver, store, {"weight": torch.zeros(3)}, step=2)
    assert next_one.staged.done()
    disk.let_go.set()
    stuck.durable.result(DEADLINE_SECONDS)
    with pytest.raises(SaveFailed, match="the previous save is still being written"):
        next_one.durable.result(DEADLINE_SECONDS)
    assert saved_weight(store) == [1, 1, 1]
    begin(saver, store, {"weight": torch.zeros(3)}, step=2).durable.result(DEADLINE_SECONDS)
    saver.close(DEADLINE_SECONDS)


def test_a_tensor_that_only_the_state_holds_is_freed_once_it_is_staged(store: CheckpointStore) -> None:
    """As the copies in a state dict of FSDP1: the write must not keep them as well as the staged ones."""
    disk, memory = StuckDisk(), np.ones(3, dtype=np.float32)
    freed = weakref.ref(memory)
    saver, state = ThreadSaver(PEERS), {"weight": torch.from_numpy(memory)}
    del memory
    pending = begin(saver, CheckpointStore(store.root, durable=disk), state)
    pending.staged.result(DEADLINE_SECONDS)
    state.clear()
    gc.collect()
    assert freed() is None and not pending.durable.done()
    disk.let_go.set()
    pending.durable.result(DEADLINE_SECONDS)
    assert saved_weight(store) == [1, 1, 1]
    saver.close(DEADLINE_SECONDS)


def test_a_writer_process_that_dies_fails_one_save_at_most(process_saver: ProcessSaver, store: CheckpointStore) -> None:
    begin(process_saver, store, {"weight": torch.ones(3)}).durable.result(DEADLINE_SECONDS)
    pid = process_saver.process.pid or 0
    assert pid

    class Killing(Durable):
        """Kills the writer when the save makes its folder: after the check that it runs, before it writes."""

        def make_dir(self, path: Path) -> None:
            if not path.exists():
                os.kill(pid, signal.SIGKILL)
            super().make_dir(path)

    failed = begin(process_saver, CheckpointStore(store.root, durable=Killing()), {"weight": torch.ones(3)}, step=2)
    failure = failed.durable.exception(DEADLINE_SECONDS)
    assert isinstance(failure, SaveFailed)
    assert f"WriterProcessDied: writer process {pid} ended" in failure.cause
    begin(process_saver, store, {"weight": torch.full((3,), 3.0)}, step=3).durable.result(DEADLINE_SECONDS)
    assert process_saver.process.pid != pid
    assert saved_weight(store, 3) == [3, 3, 3]


@pytest.mark.parametrize(
    ("mode", "kind"), [("disabled", SyncSaver), ("async", ThreadSaver), ("async_with_pinned_mem", ProcessSaver)]
)
def test_the_config_selects_the_saver(mode: Any, kind: type) -> None:
    saver = build_saver(Checkpoint(async_mode=mode), PEERS)
    assert type(saver) is kind
    saver.close(DEADLINE_SECONDS)


def test_making_and_closing_a_saver_starts_nothing() -> None:
    before = threading.active_count()
    modes: tuple[Any, ...] = ("disabled", "async", "async_with_pinned_mem")
    for mode in modes:
        saver = build_saver(Checkpoint(async_mode=mode), PEERS)
        assert threading.active_count() == before
        saver.close(DEADLINE_SECONDS)


GROWING = """
import threading
from datetime import timedelta
from pathlib import Path
import torch
from tests.checkpoint.small_run import target
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.stager import Copying, Stager
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store.store import CheckpointStore

class Held(Durable):
    def __init__(self):
        self.let_go = threading.Event()
    def make_dir(self, path):
        assert self.let_go.wait(60)
        super().make_dir(path)

disk = Held()
stager = Stager(HostCopier())
saver = ThreadSaver(Peers(timedelta(seconds=60)), copying=Copying(stager))
pending = saver.save({"weight": torch.ones(4 << 20)}, target(CheckpointStore(Path("checkpoint"), durable=disk), 1))
saver.prepare(lambda: {"weight": torch.ones(16 << 20)})
stager.take(FileData(FileLayout([]), []))  # Waits until the prepared arena is there.
disk.let_go.set()
print(pending.durable.result(60).nbytes >> 20)
saver.close(60)
"""


def test_a_state_that_grew_during_the_first_save_leaves_the_copy_of_that_save_alone(tmp_path: Path) -> None:
    log = tmp_path / "printed.log"
    process = run_code(GROWING, log, dict(os.environ), tmp_path)
    assert (process.wait(DEADLINE_SECONDS), log.read_text()) == (0, "16\n")
