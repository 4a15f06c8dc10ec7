"""A loop cannot save over a run that it did not load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from torchtitan_lite.errors import ConfigError, RunNotLoaded


def saved(start_run: StartRun) -> None:
    start_run(interval=1).finished(3)


def test_the_first_save_over_another_runs_steps_is_refused_with_the_way_out(start_run: StartRun) -> None:
    saved(start_run)
    run = start_run(interval=100)
    with pytest.raises(RunNotLoaded, match=r"step 1, 2, 3.*Call manager\.load\(\).*another folder") as refusal:
        run.step()  # No save is due; the refusal comes before more training.
    assert refusal.value.steps == (1, 2, 3)
    assert run.names() == ["step-1", "step-2", "step-3"]


def test_a_loop_that_calls_reset_is_refused_before_it_trains(start_run: StartRun) -> None:
    saved(start_run)
    with pytest.raises(RunNotLoaded):
        start_run().manager.reset()


def test_a_loop_that_loaded_saves(start_run: StartRun) -> None:
    saved(start_run)
    run = start_run(interval=1).loaded()
    run.manager.reset()
    run.train(4)
    assert run.committed() == [1, 2, 3, 4]


def test_a_fresh_folder_needs_no_load(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.manager.reset()
    run.train(2)
    assert run.committed() == [1, 2]


def test_a_start_from_other_weights_is_a_load(start_run: StartRun, tmp_path: Path) -> None:
    saved(start_run)
    path = str(tmp_path / "checkpoint" / "step-3")
    run = start_run(tmp_path / "next", interval=1, initial_load_path=path).loaded()
    run.train(1)
    assert run.committed() == [1]


def test_a_load_that_finds_only_weights_allows_a_fresh_start(start_run: StartRun) -> None:
    start_run(model_weights_only=True, interval=9).train(2)
    run = start_run(interval=1)
    assert not run.manager.load()
    run.train(1, last=False)
    assert 1 in run.committed()


def test_a_seed_checkpoint_is_saved_next_to_other_steps(start_run: StartRun) -> None:
    saved(start_run)
    run = start_run(create_seed_checkpoint=True)
    run.manager.save(0, force=True)
    assert run.names() == ["step-0", "step-1", "step-2", "step-3"]


def test_a_run_that_only_loads_may_reset_without_a_load(start_run: StartRun) -> None:
    saved(start_run)
    run = start_run(load_only=True)
    run.manager.reset()
    assert not run.step()


def test_a_dry_run_neither_trains_nor_saves(start_run: StartRun) -> None:
    saved(start_run)
    run = start_run(dry_run=True)
    for call in (run.manager.load, run.manager.reset, lambda: run.manager.save(1, force=True)):
        with pytest.raises(ConfigError, match=r"checkpoint\.dry_run: .*manager\.dry_run\(\)"):
            call()
    report = run.manager.dry_run()
    assert report is not None and report.step == 3
