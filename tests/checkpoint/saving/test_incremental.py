"""What did not change is not written again: incremental saves, from the first one on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load as dcp_load

from tests.checkpoint.frozen_run import CHANGES, STILL, Frozen, FrozenRun
from tests.checkpoint.small_run import SmallRun, same
from torchtitan_lite import faults
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import FORMAT_WITH_STILL
from torchtitan_lite.store.store import CheckpointStore

MODES = ["disabled", "async", "async_with_pinned_mem"]


@pytest.mark.parametrize("mode", MODES)
def test_later_saves_write_only_what_has_changed_and_load_bit_for_bit(tmp_path: Path, mode: str) -> None:
    with FrozenRun(tmp_path, async_mode=mode) as run:
        run.manager.load()
        run.steps(4)
        wanted = run.contents()
        for step in (2, 3, 4):
            info = run.info(step)
            assert run.shares(step - 1, step)
            assert info.nbytes - info.linked_bytes < 0.04 * info.nbytes
            assert run.manifest(step).extra["linked"] == {"step": step - 1, "bytes": info.still[STILL]}
    assert run.events.figures("committed")["linked_bytes"] == run.info(4).linked_bytes
    with FrozenRun(tmp_path, async_mode=mode) as again:
        assert again.manager.load()
        assert same(again.contents(), wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP warns in a single process.
def test_any_step_can_be_removed_and_plain_dcp_reads_the_others(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(3)
        frozen = {name: tensor.clone() for name, tensor in run.model.state_dict().items() if "frozen" in name}
    for step in (1, 3):
        shutil.rmtree(run.root / layout.step_dir(step))
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in frozen.items()}}
    dcp_load(state, checkpoint_id=run.root / layout.step_dir(2), no_dist=True)
    assert same(state["model"], frozen)
    with FrozenRun(tmp_path) as again:
        assert again.manager.load()
        assert again.manager.loaded_step == 2


def test_a_tensor_that_changed_after_all_is_saved_and_moves_to_the_changes(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(2)
        with torch.no_grad():
            run.model.get_buffer("table")[3] += 1
        run.steps(1)
        assert not run.shares(2, 3), "its still file is another"
        with torch.no_grad():
            run.model.get_buffer("table")[5] += 1
        run.steps(2)
        assert run.shares(4, 5)
        table = run.manifest(5).tensors["model.table"]
        assert table["chunks"][0][0] == CHANGES
        wanted = run.contents()
    with FrozenRun(tmp_path) as again:
        again.manager.load()
        assert same(again.contents(), wanted)


def test_a_state_that_no_one_knows_about_moves_to_the_still_file_after_two_equal_saves(tmp_path: Path) -> None:
    reference = {"weights": torch.randn(1 << 19)}
    with FrozenRun(tmp_path, states={"reference": reference}) as run:
        run.manager.load()
        run.steps(4)
        files = [run.manifest(step).tensors["reference.weights"]["chunks"][0][0] for step in (1, 2, 3, 4)]
        assert files == [CHANGES, CHANGES, STILL, STILL]
        assert run.shares(3, 4)


def test_a_reference_model_is_still_from_the_first_save_on(tmp_path: Path) -> None:
    reference = nn.Linear(512, 512)
    reference.requires_grad_(False)
    with FrozenRun(tmp_path, states={"reference": reference}) as run:
        run.manager.load()
        run.steps(1)
        assert run.manifest(1).tensors["reference.weight"]["chunks"][0][0] == STILL


def test_a_layer_that_is_frozen_later_moves_with_its_optimizer_state(tmp_path: Path) -> None:
    model = Frozen(layers=2)
    model.trained = nn.Linear(256, 2048)
    with FrozenRun(tmp_path, model=model) as run:
        run.manager.load()
        run.steps(2)
        key = "optimizer.state.trained.weight.exp_avg"
        assert run.manifest(2).tensors[key]["chunks"][0][0] == CHANGES
        model.trained.requires_grad_(False)
        for step in (3, 4, 5, 6):
            run.train_state.step = step
            run.manager.save(step)
        assert run.manifest(5).tensors[key]["chunks"][0][0] == STILL
        assert run.shares(5, 6)
        assert run.info(6).linked_bytes > 0.95 * run.info(6).nbytes


def test_a_file_is_shared_only_so_often_in_a_row(tmp_path: Path) -> None:
    with FrozenRun(tmp_path, incremental_full_every=2) as run:
        run.manager.load()
        run.steps(7)
        assert [run.shares(step, step + 1) for step in range(1, 7)] == [True, True, False, True, True, False]


class NoLinks(Durable):
    """A file system that refuses links with the error `code`."""

    def __init__(self, code: int) -> None:
        self.code = code

    def link(self, src: Path, dst: Path) -> None:
        raise OSError(self.code, os.strerror(self.code), str(src), None, str(dst))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP])
def test_without_links_saves_are_written_in_full_with_one_warning(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=NoLinks(code))
    with caplog.at_level(logging.WARNING), FrozenRun(tmp_path, seams={"store": store}) as run:
        run.manager.load()
        run.steps(4)
        assert [run.info(step).linked_bytes for step in (1, 2, 3, 4)] == [0, 0, 0, 0]
        assert not run.shares(3, 4)
    assert [os.strerror(code) in record.getMessage() for record in caplog.records] == [True]


def test_a_save_does_not_share_a_file_that_is_not_the_one_that_was_written(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(1)
        path = run.root / layout.step_dir(1) / STILL
        os.truncate(path, 4096)
        run.steps(1)
        assert path.stat().st_size == 4096, "nothing is written into the files of another step"
        assert run.info(2).linked_bytes == 0
        assert (run.root / layout.step_dir(2) / STILL).stat().st_size == run.info(2).still[STILL]


def test_a_link_in_place_of_a_file_is_not_shared(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(1)
        path = run.root / layout.step_dir(1) / STILL
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        run.steps(1)
        assert run.info(2).linked_bytes == 0
        assert not (run.root / layout.step_dir(2) / STILL).is_symlink()


def test_the_first_save_after_a_load_is_full(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(3)
        data = bytearray((run.root / layout.step_dir(3) / CHANGES).read_bytes())
        data[len(data) // 2] ^= 1
        (run.root / layout.step_dir(3) / CHANGES).write_bytes(data)
        run.manager.load()
        assert run.manager.loaded_step == 2
        run.steps(2)
        assert not run.shares(2, 3)
        assert run.shares(3, 4)
    with FrozenRun(tmp_path) as again:
        again.manager.load()
        again.steps(1)
        assert not again.shares(4, 5)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_without_still_tensors_writes_what_it_would_write_without_incremental(tmp_path: Path, mode: str) -> None:
    found = []
    for name, incremental in (("off", False), ("on", True)):
        with SmallRun(tmp_path / name, interval=1, incremental=incremental, async_mode=mode) as run:
            run.manager.load()
            run.train(3)
        folder = run.root / layout.step_dir(3)
        found.append({path.name: path.read_bytes() for path in folder.iterdir() if path.name != layout.MANIFEST})
        manifest = FrozenRun.manifest(run, 3)  # type: ignore[arg-type]  # it has a root
        assert manifest.format_version < FORMAT_WITH_STILL
    assert found[0] == found[1]


def test_a_failed_save_leaves_the_one_before_it_to_share_with(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(1)
        faults.install("EIO@manifest:times=1", rank=0)
        try:
            run.steps(1)
        finally:
            faults.install("", rank=0)
        run.steps(1)
        assert [info.step for info in CheckpointStore(run.root).committed()] == [1, 3]
        assert run.shares(1, 3)


def test_a_writer_process_that_is_killed_at_a_link_costs_one_save(tmp_path: Path) -> None:
    faults.install("kill@link:step=2,process=writer", rank=0)
    try:
        with FrozenRun(tmp_path, async_mode="async_with_pinned_mem") as run:
            run.manager.load()
            for _ in range(3):
                run.steps(1)
            assert [info.step for info in CheckpointStore(run.root).committed()] == [1, 3]
            assert run.shares(1, 3)
    finally:
        faults.install("", rank=0)


def test_a_full_disk_at_a_link_fails_the_save_and_changes_no_other(tmp_path: Path) -> None:
    faults.install("ENOSPC@link:step=2", rank=0)
    try:
        with FrozenRun(tmp_path) as run:
            run.manager.load()
            run.steps(3)
            assert [info.step for info in CheckpointStore(run.root).committed()] == [1, 3]
            assert run.events.figures("save_failed")["reason"].count("No space left on device")
    finally:
        faults.install("", rank=0)


def test_images_in_memory_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.incremental with checkpoint.memory_interval = 1"):
        FrozenRun(tmp_path, memory_interval=1, async_mode="async")


def test_a_job_of_ranks_with_records_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lite.checkpoint.parts.FROM_RANKS", 1)
    with pytest.raises(ConfigError, match=r"checkpoint.incremental: found 1 ranks, expected fewer than 1"):
        FrozenRun(tmp_path)


def test_an_uploaded_step_is_complete_and_shares_nothing(tmp_path: Path) -> None:
    second = tmp_path / "second"
    with FrozenRun(tmp_path / "run", upload_folder=str(second), async_mode="async") as run:
        run.manager.load()
        run.steps(3)
        wanted = run.contents()
    assert all(path.stat().st_nlink == 1 for path in second.rglob("*") if path.is_file())
    shutil.rmtree(tmp_path / "run")
    with FrozenRun(tmp_path / "run", upload_folder=str(second), async_mode="async") as again:
        assert again.manager.load()
        assert (again.manager.loaded_step, same(again.contents(), wanted)) == (3, True)


def test_a_roll_back_begins_a_branch_whose_first_step_is_full(tmp_path: Path) -> None:
    with FrozenRun(tmp_path) as run:
        run.manager.load()
        run.steps(4)
    with FrozenRun(tmp_path, load_step=2) as branch:
        assert branch.manager.load()
        branch.steps(2)
        assert not branch.shares(2, 3)
        assert branch.shares(3, 4)
        names = sorted(path.name.rpartition("-")[0] for path in branch.root.glob("step-*.abandoned-*"))
        assert names == ["step-3.abandoned", "step-4.abandoned"]


def test_retention_keeps_another_copy_while_the_run_trains(tmp_path: Path) -> None:
    with FrozenRun(tmp_path, keep_latest_k=1, incremental_full_every=2) as run:
        run.manager.load()
        run.steps(8)
        assert [info.step for info in CheckpointStore(run.root).committed()] == [6, 8]
