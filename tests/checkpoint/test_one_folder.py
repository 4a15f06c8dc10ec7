"""Ranks that do not see one folder are refused at the start by one error; a view that is late is waited for."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.sharded_run import at_steps, sharded_run
from tests.ranks import Ranks, on_two_ranks
from tests.ranks import four_ranks as four_ranks
from tests.store.filled import without_token
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.open_managers import find_unseen
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.errors import FolderNotShared
from torchtitan_lite.store.lease import FolderLease
from torchtitan_lite.store.store import CheckpointStore

HOST = platform.node()


def a_manager(folder: Path, model: nn.Module | None = None, **given: object) -> CheckpointManager:
    """Return a manager whose start waits two seconds for a view that is late."""
    options = {"interval": 1, "preemption_signals": (), "timeout_seconds": 4} | given
    return CheckpointManager.for_loop(model=model or nn.Linear(2, 3), folder=folder, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.promise("A start whose ranks see different folders is refused on all ranks.", section="writer")
@pytest.mark.slow
@on_two_ranks
def test_folders_that_are_not_shared_are_one_error_at_the_start(rank: int, tmp_path: Path) -> None:
    own = tmp_path / str(rank) / "checkpoint"
    for use in (lambda manager: manager.open(), lambda manager: manager.load(), lambda manager: manager.save(1)):
        with a_manager(own) as manager, pytest.raises(FolderNotShared) as refused:
            use(manager)
        error = refused.value
        assert (error.folder, error.host) == (f"{tmp_path}/0/checkpoint", HOST)
        assert error.blind == (f"rank 1 on {HOST} ({tmp_path}/1/checkpoint, {error.mount})",)
        assert error.mount == mount_of(own)
        assert error.reported_elsewhere == (rank > 0)
    assert names_in(tmp_path / str(rank)) == ([] if rank else ["checkpoint"])


@on_two_ranks
def test_an_export_folder_that_is_not_shared_is_found_too(rank: int, tmp_path: Path) -> None:
    export = str(tmp_path / str(rank))
    with a_manager(tmp_path / "checkpoint", export_folder=export) as manager, pytest.raises(FolderNotShared) as refused:
        manager.load()
    assert refused.value.folder == f"{tmp_path}/0"
    assert refused.value.blind == (f"rank 1 on {HOST} ({tmp_path}/1, {mount_of(tmp_path)})",)


@on_two_ranks
def test_a_lock_of_another_start_in_another_folder_is_not_taken_for_this_one(rank: int, tmp_path: Path) -> None:
    own = tmp_path / str(rank)
    own.mkdir()
    ended = {"token": "a", "run_id": "r", "host": "node9", "space": "elsewhere", "pid": 4, "started": 5, "since": 6}
    (own / "writer.lock").write_text(json.dumps(ended | {"beat": 1, "at": 1}) if rank else "")
    if rank == 0:
        (own / "writer.lock").unlink()
    with a_manager(own) as manager, pytest.raises(FolderNotShared):
        manager.load()


@on_two_ranks
def test_one_folder_under_two_names_is_one_folder_and_nothing_is_left_of_the_look(rank: int, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(exist_ok=True)
    if rank:
        (tmp_path / "link").symlink_to("real")
    torch.manual_seed(0)
    with a_manager(tmp_path / ("link" if rank else "real"), timeout_seconds=60) as manager:
        assert not manager.load()
        assert manager.save(1, force=True)
    assert not {name for name in names_in(tmp_path / "real") if name.startswith((".", "writer"))}


@on_two_ranks
def test_ranks_that_only_load_need_not_share_a_folder_and_write_nothing(rank: int, tmp_path: Path) -> None:
    own = tmp_path / str(rank)
    own.mkdir()
    with a_manager(own, load_only=True) as manager:
        assert not manager.load()
    assert names_in(own) == []


def test_all_ranks_that_see_another_folder_are_named_together(four_ranks: Ranks, tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    messages = four_ranks.run(_message, folder=str(tmp_path))
    assert len({*messages}) == 1
    blind = f"rank 1 on {HOST} ({tmp_path}/1, {mount}), 2 ranks from rank 2 on {HOST} ({tmp_path}/2, {mount})"
    assert f"is not seen by {blind}." in messages[0]


def _message(rank: int, folder: str) -> str:
    with a_manager(Path(folder) / str(min(rank, 2))) as manager, pytest.raises(FolderNotShared) as refused:
        manager.load()
    return str(refused.value)


@pytest.mark.parametrize(("key", "on_disk"), [("upload_folder", False), ("export_folder", False), ("", True)])
def test_a_folder_in_a_store_is_known_as_one(tmp_path: Path, key: str, on_disk: bool) -> None:
    keys = {key: "s3://bucket/run"} if key else {"export_folder": "export"}
    folders = RunFolders(loop_config(tmp_path / "checkpoint", keys), "r")
    assert folders.are_all_on_disk == on_disk


def test_a_view_that_is_late_is_waited_for(tmp_path: Path) -> None:
    here, elsewhere = FolderLease(tmp_path / "here", run_id="r"), FolderLease(tmp_path / "elsewhere", run_id="r")
    here.take()
    seconds = [0.0]

    def sleep(length: float) -> None:
        seconds[0] += length
        if seconds[0] >= 40:
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            (tmp_path / "elsewhere" / "writer.lock").write_bytes((tmp_path / "here" / "writer.lock").read_bytes())

    try:
        for limit, unseen in ((30, [0]), (60, [])):
            found = find_unseen(
                lambda: [] if elsewhere.is_visible(here.token) else [0], limit, sleep, lambda: seconds[0]
            )
            assert found == unseen
    finally:
        here.release()


class Losing(Durable):
    """A disk that loses the file of rank 1 before the commit, as where the ranks' views of the folder come apart."""

    def write_file(self, path: Path, data: bytes) -> None:
        if path.name == ".metadata":
            (path.parent / "__1_0.distcp").unlink()
        super().write_file(path, data)


@on_two_ranks
def test_a_failed_save_says_each_thing_once(rank: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=Losing())
    run = sharded_run(tmp_path, async_mode="disabled", seams={"save_policy": at_steps(1), "store": store})
    with run.manager:
        run.train(2, last=False)
    [(step, _, figures)] = run.events.happened("save_failed")
    assert step == 1
    assert without_token(figures["reason"]) == f"rank 0: {store.root}/step-1.staging/__1_0.distcp is missing"
