"""Saving and loading take a fixed amount of memory on top of the state, and it does not grow from save to save."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.reading.memory import MIB, peak_above_before, status_bytes
from tests.checkpoint.savers import Lent
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun, target
from tests.descriptors import opened
from tests.examples import mostly_exhaustive
from tests.processes import wait_until
from tests.ranks import Ranks
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver, Saver, SyncSaver, ThreadSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

STATE_BYTES = 1000 * MIB
EXTRA_BYTES = 64 * MIB
"""Limit of the memory on top of the state, or of the state and its one copy."""
GROWTH_BYTES = 32 * MIB
"""Limit of the growth from the first save to the fifth: what the allocators of threads keep varies."""


def large_state() -> dict[str, Any]:
    """Return `STATE_BYTES` in tensors, some of them not contiguous, and a few objects."""
    model: dict[str, Tensor] = {f"w{i}": torch.full((5000, 5000), float(i)) for i in range(8)}
    model["transposed"] = torch.full((10_000, 2500), 8.0).t()
    model["strided"] = torch.full((2500, 10_000), 9.0)[:, ::2]
    model["of a row"] = torch.full((12_500_000,), 10.0)
    num_bytes = sum(tensor.numel() * 4 for tensor in model.values())
    model["rest"] = torch.ones(STATE_BYTES - num_bytes, dtype=torch.uint8)
    return {"model": model, "step": 1, "losses": [0.5] * 1000}


def small_state() -> dict[str, Any]:
    """Return a state whose save imports the modules and starts the threads that every save needs."""
    return {"model": {"w": torch.ones(100, 100), "transposed": torch.ones(30, 20).t()}, "step": 1}


def save(saver: Saver, folder: Path, state: dict[str, Any], step: int = 1) -> None:
    saver.save(state, target(CheckpointStore(folder), step)).durable.result()


def load(folder: Path, state: dict[str, Any]) -> None:
    stored = StoredCheckpoint(folder / "step-1", peers())
    stored.verify_rest()
    stored.read_model(state["model"])


def peers() -> Peers:
    return Peers(timedelta(seconds=60))


def peaks_of_sync_save_and_load(rank: int, folder: Path) -> tuple[int, int]:
    saver = SyncSaver(peers())
    save(saver, folder / "small", small_state())
    load(folder / "small", small_state())
    state = large_state()
    saving = peak_above_before(lambda: save(saver, folder, state))
    expected = {name: tensor[(0,) * tensor.dim()].item() for name, tensor in state["model"].items()}
    for tensor in state["model"].values():
        tensor.zero_()
    loading = peak_above_before(lambda: load(folder, state))
    assert all(bool((tensor == expected[name]).all()) for name, tensor in state["model"].items())
    return saving, loading


@pytest.mark.slow
def test_a_sync_save_and_a_load_take_bounded_memory_on_top_of_the_state(alone: Ranks, tmp_path: Path) -> None:
    [(saving, loading)] = alone.run(peaks_of_sync_save_and_load, folder=tmp_path)
    print(f"extra at its peak: save {saving / MIB:.1f} MiB, load {loading / MIB:.1f} MiB")
    assert saving <= EXTRA_BYTES
    assert loading <= EXTRA_BYTES


def peaks_of_async_saves(rank: int, folder: Path, mode: str) -> tuple[list[int], int]:
    """Return the peak so far after each of five saves, and the anonymous memory of the writer process."""
    saver: Any = ThreadSaver(peers()) if mode == "thread" else ProcessSaver(peers(), 60)
    small: Saver = ThreadSaver(peers())
    save(small, folder / "small", small_state())
    small.close(60)
    saver.start()
    state = large_state()
    peaks: list[int] = []

    def save_five_times() -> None:
        before = status_bytes("VmRSS")
        for step in range(1, 6):
            save(saver, folder, state, step)
            CheckpointStore(folder).durable.remove_tree(folder / f"step-{step}")
            peaks.append(status_bytes("VmHWM") - before)

    peak_above_before(save_five_times)
    of_writer = 0
    if mode == "process":
        of_writer = status_bytes("RssAnon", Path(f"/proc/{saver.process.pid}/status"))
    saver.close(60)
    return peaks, of_writer


@pytest.mark.slow
@pytest.mark.parametrize("mode", mostly_exhaustive(["thread", "process"], kept=["process"]))
def test_async_saves_take_one_copy_of_the_state_however_many_they_are(alone: Ranks, tmp_path: Path, mode: str) -> None:
    [(peaks, of_writer)] = alone.run(peaks_of_async_saves, folder=tmp_path, mode=mode)
    extra = [(peak - STATE_BYTES) / MIB for peak in peaks]
    print(f"on top of one copy: {extra} MiB; the writer process for itself: {of_writer / MIB:.1f} MiB")
    assert STATE_BYTES < max(peaks) <= STATE_BYTES + EXTRA_BYTES
    assert of_writer <= EXTRA_BYTES
    assert peaks[-1] - peaks[0] <= GROWTH_BYTES


def test_a_range_of_a_transposed_tensor_is_copied_in_little_memory_however_long_it_is() -> None:
    tensor = torch.ones(1000, 16 * MIB // 1000).t()
    image = FileData(FileLayout([(tensor.dtype, tuple(tensor.shape))]), [tensor])
    buffer = memoryview(bytearray(b"\xee" * image.num_bytes))
    assert peak_above_before(lambda: image.fill(buffer, 0, image.num_bytes)) <= 16 * MIB


def test_twenty_saves_leave_no_more_descriptors_and_threads_than_five(
    tmp_path: Path, process_saver: ProcessSaver, mode: str
) -> None:
    lent = Lent(process_saver) if mode == "async_with_pinned_mem" else None
    run = sharded_run(tmp_path, interval=1, keep_latest_k=2, async_mode=mode, saver=lent)
    with run.manager:
        run.train(5, last=False)
        before = descriptors_and_threads(run)
        run.train(20, last=False)
        after = descriptors_and_threads(run)
    (files, threads), (files_before, threads_before) = after, before
    assert threads == threads_before
    assert not Counter(files) - Counter(files_before)
    closed = Counter(files_before) - Counter(files)
    assert all(name.startswith("socket:") for name in closed), "only those of a test before may be closed meanwhile"
    assert run.names() == ["step-19", "step-20"]


def descriptors_and_threads(run: SmallRun) -> tuple[list[str], list[str]]:
    """Return the files that this process has open and its threads, after the save in flight has ended."""
    run.saver.wait()
    assert run.manager._housekeeping.wait(60)
    for thread in threading.enumerate():
        if thread.name in ("checkpoint", "housekeeping"):
            thread.join(60)
    lock, files = str(run.root / "writer.lock"), list[str]()

    def has_been_renewed() -> bool:
        files[:] = opened()
        return lock not in files

    wait_until(has_been_renewed)  # A renewal of the lease has its file open for a moment.
    return sorted(files), sorted(thread.name for thread in threading.enumerate())
