"""Rolling back to an older step begins a branch; abandoned steps never come back by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.store.store import CheckpointStore

StartRun = Callable[..., SmallRun]


def test_the_branch_begins_at_its_first_commit_and_until_then_nothing_is_set_aside(start_run: StartRun) -> None:
    _train_to(start_run, 6)
    run = start_run(interval=2, load_step=2).resumed()
    assert _names(run) == ["step-2", "step-4", "step-6"]
    run.step()
    assert _names(run) == ["step-2", "step-4", "step-6"]
    run.step()
    names = _names(run)
    (trunk,) = {name.rpartition("-")[2] for name in names if "abandoned" in name}
    assert names == ["step-2", "step-4", f"step-4.abandoned-{trunk}", f"step-6.abandoned-{trunk}"]


def test_what_was_abandoned_is_kept_byte_for_byte(start_run: StartRun) -> None:
    run = _train_to(start_run, 6)
    before = _contents(run.root / "step-6")
    _roll_back(start_run, 2, steps=2)
    (aside,) = run.root.glob("step-6.abandoned-*")
    assert _contents(aside) == before


def test_an_automatic_resume_never_takes_an_abandoned_step_and_purge_never_counts_one(start_run: StartRun) -> None:
    _train_to(start_run, 8)
    _roll_back(start_run, 2, steps=2)
    run = start_run(interval=2, keep_latest_k=2).loaded()
    assert run.train_state.step == 4
    run.step()
    run.step()
    run.manager.close()
    assert [name for name in _names(run) if "abandoned" not in name] == ["step-4", "step-6"]
    assert len([name for name in _names(run) if "abandoned" in name]) == 3


def test_a_crash_between_the_commit_and_the_renames_brings_no_step_back(start_run: StartRun) -> None:
    run = _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=2)
    (aside,) = run.root.glob("step-6.abandoned-*")
    aside.rename(run.root / "step-6")
    assert [info.step for info in CheckpointStore(run.root).committed()] == [2, 3, 4]
    again = start_run(interval=2).loaded()
    assert again.train_state.step == 4
    assert aside.is_dir() and not (run.root / "step-6").exists()


def test_an_abandoned_step_stays_so_when_the_commit_that_began_the_branch_is_purged(start_run: StartRun) -> None:
    run = _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=2)
    (aside,) = run.root.glob("step-6.abandoned-*")
    aside.rename(run.root / "step-6")
    again = start_run(interval=1, keep_latest_k=1, load_step=2).loaded()
    again.step()
    again.manager.close()
    assert [info.step for info in CheckpointStore(run.root).committed()] == [5]


def test_the_same_command_again_resumes_from_the_latest_step_of_the_branch(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchtitan_lite")
    _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=3)
    run = start_run(interval=1, load_step=2).loaded()
    assert run.train_state.step == 5
    assert "Rolled back to step 2 before: resuming from step 5 of that branch" in caplog.text


def test_the_same_command_continues_a_branch_that_rolled_back_to_a_step_of_its_own(start_run: StartRun) -> None:
    _train_to(start_run, 6)
    run = start_run(interval=1, load_step=2).resumed()
    run.train(6)
    assert run.manager.load(4)
    run.train(5)
    run.manager.close()
    assert [name for name in _names(run) if "abandoned" not in name] == ["step-2", "step-3", "step-4", "step-5"]
    again = start_run(interval=1, load_step=2).resumed()
    assert again.train_state.step == 5
    other = start_run(interval=1, load_step=4).resumed()
    assert other.train_state.step == 4


def test_a_run_that_loads_its_latest_step_by_number_is_a_branch_too(start_run: StartRun) -> None:
    _train_to(start_run, 2)
    _roll_back(start_run, 2, steps=2)
    run = start_run(interval=1, load_step=2).loaded()
    assert run.train_state.step == 4


def test_new_branch_begins_another_one(start_run: StartRun) -> None:
    _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=3)
    run = start_run(interval=1, load_step=2, new_branch=True).loaded()
    assert run.train_state.step == 2
    run.step()
    assert [name for name in _names(run) if "abandoned" not in name] == ["step-2", "step-3"]


def test_the_manifest_says_run_parent_and_branch_point(start_run: StartRun) -> None:
    run = _train_to(start_run, 4)
    _roll_back(start_run, 2, steps=2)
    trunk, first, second = (_lineage(run.root / name) for name in ("step-2", "step-3", "step-4"))
    assert (trunk["parent_step"], trunk["branch_point"]) == (None, None)
    assert (first["parent_step"], first["branch_point"]) == (2, 2)
    assert (second["parent_step"], second["branch_point"]) == (3, 2)
    assert first["run_id"] == second["run_id"] != trunk["run_id"]
    assert first["abandons"] == [[4, trunk["run_id"]]]


def test_to_return_to_an_abandoned_step_a_new_folder_begins_with_it(start_run: StartRun) -> None:
    run = _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=2)
    (aside,) = run.root.glob("step-6.abandoned-*")
    back = start_run(run.root.parent / "again", initial_load_path=str(aside), initial_load_model_only=False).loaded()
    assert back.train_state.step == 6


def test_a_finished_branch_is_finished_and_the_trunk_it_left_does_not_count(start_run: StartRun) -> None:
    _train_to(start_run, 8)
    assert start_run(load_step=2).manager.latest_step() == -1
    _roll_back(start_run, 2, steps=2)
    assert start_run(load_step=2).manager.latest_step() == 4
    assert start_run().manager.latest_step() == 4


def test_if_all_of_the_branch_is_damaged_the_trunk_is_resumed_as_a_new_run(start_run: StartRun) -> None:
    trunk = _train_to(start_run, 6)
    _roll_back(start_run, 2, steps=2)
    ids = {step: _lineage(trunk.root / f"step-{step}")["run_id"] for step in (2, 3, 4)}
    for step in (3, 4):
        data = trunk.root / f"step-{step}" / "__0_0.distcp"
        data.write_bytes(bytes(data.stat().st_size))
    run = start_run(interval=2).resumed()
    assert run.train_state.step == 2
    run.train(4)
    run.manager.close()
    new = _lineage(run.root / "step-4")
    assert new["run_id"] not in ids.values()
    assert (new["parent_step"], new["branch_point"], new["abandons"]) == (2, None, [])
    again = start_run(interval=2).resumed()
    assert again.train_state.step == 4


def _train_to(start_run: StartRun, steps: int) -> SmallRun:
    run = start_run(interval=2).loaded()
    for _ in range(steps):
        run.step()
    run.manager.close()
    return run


def _roll_back(start_run: StartRun, step: int, *, steps: int) -> None:
    run = start_run(interval=1, load_step=step).loaded()
    for _ in range(steps):
        run.step()
    run.manager.close()


def _names(run: SmallRun) -> list[str]:
    return run.names()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _lineage(folder: Path) -> dict[str, object]:
    lineage: dict[str, object] = json.loads((folder / "manifest.json").read_text())["lineage"]
    return lineage
