"""A start in a folder that is not what the user takes it for: refused before anything is written, or named."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

Use = Callable[[CheckpointManager], object]
USES: dict[str, Use] = {
    "open": lambda manager: manager.open(),
    "load": lambda manager: manager.load(),
    "save": lambda manager: manager.save(1),
    "dry run": lambda manager: manager.dry_run(),
}


def a_manager(folder: Path, model: nn.Module | None = None, **given: Any) -> CheckpointManager:
    return CheckpointManager.for_loop(
        model=model or nn.Linear(2, 3), folder=folder, interval=1, preemption_signals=(), **given
    )


def saved(folder: Path, steps: int = 2) -> Path:
    """Save `steps` steps of ours into `folder`; return the last one."""
    with a_manager(folder) as manager:
        for step in range(1, steps + 1):
            manager.save(step)
    return folder / f"step-{steps}"


def foreign(folder: Path, *steps: int) -> Path:
    """Save `steps` into `folder` by plain DCP, as torchtitan lays them out."""
    for step in steps:
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save(
                {"model": nn.Linear(2, 3).state_dict()}, checkpoint_id=folder / layout.step_dir(step), no_dist=True
            )
    return folder


def everything_in(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.lstat().st_mtime_ns) for path in (folder, *folder.rglob("*")))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.promise("A start in a checkpoint's own folder is refused and changes nothing there.", section="writer")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("inside", ["", "runs", "../step-1/runs/first"])
@pytest.mark.parametrize("load_only", [False, True])
def test_a_checkpoint_itself_is_no_folder_for_a_run_and_stays_as_it_is(
    use: Use, inside: str, load_only: bool, tmp_path: Path
) -> None:
    saved(tmp_path / "checkpoint")
    before = everything_in(tmp_path)
    with a_manager(tmp_path / "checkpoint" / "step-2" / inside, load_only=load_only) as manager:
        if load_only and use is USES["save"]:
            return  # It saves nothing.
        with pytest.raises(ConfigError, match=r"step-[12].* no run writes into a checkpoint") as refused:
            use(manager)
    assert f"--job.dump_folder={tmp_path} --checkpoint.folder=checkpoint" in str(refused.value)
    assert f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-" in str(refused.value)
    assert everything_in(tmp_path) == before


def test_a_checkpoint_of_another_name_or_of_plain_dcp_is_no_folder_for_a_run(tmp_path: Path) -> None:
    best = Path(shutil.copytree(saved(tmp_path / "checkpoint"), tmp_path / "best"))
    for folder in (best, foreign(tmp_path / "theirs", 4) / "step-4"):
        before = everything_in(folder)
        with a_manager(folder) as manager, pytest.raises(ConfigError, match="is a checkpoint, and no run writes"):
            manager.load()
        assert everything_in(folder) == before


def test_an_export_is_not_written_into_a_checkpoint(tmp_path: Path) -> None:
    step = saved(tmp_path / "checkpoint")
    with (
        a_manager(tmp_path / "new", export_folder=str(step)) as manager,
        pytest.raises(ConfigError, match="step-2 is a checkpoint, and no run writes"),
    ):
        manager.load()
    assert not (tmp_path / "new").exists()


def test_files_of_other_programs_next_to_the_steps_are_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".metadata").mkdir()  # Eclipse's.
    for name in ("manifest.json", "__0_0.distcp"):
        (tmp_path / name).touch()
    saved(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "manifest.json").touch()
    with a_manager(tmp_path / "checkpoint") as manager:
        assert manager.load()
        assert manager.save(3)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("below", [True, False], ids=["in it", "above it"])
def test_a_fresh_start_one_level_off_a_run_names_that_run(
    below: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "a" / "b")
    folder = tmp_path / "a" if below else tmp_path / "a" / "b" / "checkpoint"
    with a_manager(folder) as manager:
        assert manager.dry_run() is None
        assert not manager.load()
    said = f"{folder} has no checkpoint, but {tmp_path / 'a' / 'b'} has, up to step-2. If you mean that run, name its"
    assert [message.startswith(said) for message in warnings_in(caplog)] == [True, True]


def test_other_folders_in_or_around_a_new_run_are_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "new" / "logs").mkdir(parents=True)
    (tmp_path / "new" / "step-5").mkdir()
    saved(tmp_path / "another")
    with a_manager(tmp_path / "new") as manager:
        assert not manager.load()
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("load_only", [False, True])
def test_a_folder_of_another_tools_checkpoints_is_refused_with_the_ways_out(
    use: Use, load_only: bool, tmp_path: Path
) -> None:
    root = foreign(tmp_path / "checkpoint", 2, 4)
    before = everything_in(tmp_path)
    with a_manager(root, load_only=load_only) as manager:
        if load_only and use is USES["save"]:
            return  # It saves nothing.
        with pytest.raises(ConfigError, match=r"checkpoints of another tool \(step-2, step-4, ") as refused:
            use(manager)
    step = root / "step-4"
    for way in (
        f"--checkpoint.initial_load_path={step};",
        f"torchtitan-lite convert {step} NEW/checkpoint/step-4 --layout ours;",
        "move them away",
    ):
        assert way in str(refused.value)
    assert everything_in(tmp_path) == before


def test_each_way_out_of_a_folder_of_another_tool_starts(tmp_path: Path) -> None:
    for given, step in (({"initial_load_path": "step-4"}, -1), ({"load_step": 4}, -1), ({}, 4)):
        root = foreign(tmp_path / f"{given or step}" / "checkpoint", 2, 4)
        if "initial_load_path" in given:
            given = {"initial_load_path": str(root / "step-4")}
        model = nn.Linear(2, 3)
        with a_manager(root, model, exclude_from_loading=["optimizer", "lr_scheduler"], **given) as manager:
            assert manager.load(step)
        assert torch.equal(model.weight, _weight_of(root / "step-4"))
    shutil.move(root, tmp_path / "moved")
    with a_manager(root) as manager:
        assert not manager.load()


def test_steps_of_a_run_that_lost_their_manifests_are_skipped_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoint"
    (saved(root, 1) / "manifest.json").unlink()
    CheckpointStore(root).folder_id(make=True)  # As of a run that keeps checkpoints in memory.
    with a_manager(root) as manager:
        assert not manager.load()
        assert manager.save(1)
    assert "step-1 has no manifest and is skipped" in caplog.text
    assert "step-1 has no intact manifest.json and is in the way of a save; it is now" in caplog.text
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1", "step-1.foreign"]


def _weight_of(step: Path) -> torch.Tensor:
    state = {"model": nn.Linear(2, 3).state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=step, no_dist=True)
    return state["model"]["weight"]


@on_two_ranks
def test_both_ranks_refuse_a_wrong_folder(rank: int, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    torch.manual_seed(0)
    with a_manager(root) as manager:
        manager.save(1)
    for folder, said in ((root / "step-1", "is a checkpoint"), (tmp_path / "theirs", "of another tool")):
        if rank == 0 and folder.name == "theirs":
            shutil.copytree(root, folder, ignore=lambda *_: ["manifest.json", "folder.id", "writer.lock"])
        manager = a_manager(folder)
        with pytest.raises(ConfigError, match=said):
            manager.load()
