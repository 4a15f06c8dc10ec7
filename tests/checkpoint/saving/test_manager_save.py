"""When a run is saved, what is in the folder after that, and what a failing save changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.small_run import Tiny, fqns, job_config, same
from tests.disks import FailingDisk
from tests.store.looks import parsed_from_now_on
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, SaveFailed
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


def keys(folder: Path) -> list[str]:
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_an_interval_of_steps_saves_at_its_multiples_and_the_last_step_whatever_it_is(
    start_run: StartRun, mode: str
) -> None:
    run = start_run(interval=3, async_mode=mode)
    assert not run.manager.load()
    run.train(10)
    assert run.committed() == [3, 6, 9, 10]
    assert run.names() == ["step-10", "step-3", "step-6", "step-9"]
    assert run.events.steps("committed") == [3, 6, 9, 10]


def test_the_first_step_is_saved_when_asked_for(start_run: StartRun) -> None:
    run = start_run(interval=4, enable_first_step_checkpoint=True)
    assert [run.step() for _ in range(5)] == [True, False, False, True, False]
    assert run.committed() == [1, 4]


def test_a_last_step_that_is_due_anyway_is_saved_once(start_run: StartRun) -> None:
    run = start_run(interval=2)
    run.train(4)
    assert run.events.steps("save_started") == [2, 4]


def test_a_run_that_only_loads_never_saves(start_run: StartRun) -> None:
    run = start_run(interval=1, load_only=True).loaded().finished(3)
    assert not run.root.exists()


def test_a_disabled_manager_does_nothing(start_run: StartRun) -> None:
    run = start_run(enable_checkpoint=False, interval=1)
    assert not run.manager.load()
    run.manager.reset()
    assert [run.step(last=last) for last in (False, True)] == [False, False]
    assert run.manager.latest_step() == -1
    run.manager.close()
    assert not run.root.exists()
    assert run.events.recorded == []


def test_making_a_manager_touches_nothing(start_run: StartRun, tmp_path: Path) -> None:
    start_run(async_mode="async_with_pinned_mem")
    assert list(tmp_path.iterdir()) == []


def test_seconds_count_from_the_start_of_the_loop_and_from_each_save_and_are_acted_on_a_step_later(
    start_run: StartRun,
) -> None:
    run = start_run(interval=10, interval_type="seconds").loaded()
    run.clock.seconds += 500
    run.manager.reset()
    saved = []
    for _ in range(12):
        run.clock.seconds += 4
        saved.append(run.step())
    # At the end of step 3 twelve seconds have passed; the ranks learn it at the end of step 4, and save.
    assert [step for step, is_saved in enumerate(saved, start=1) if is_saved] == [4, 8, 12]


def test_every_key_begins_with_the_name_of_its_state(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.step()
    names = keys(run.root / "step-1")
    parameters = {name for name, _ in Tiny().named_parameters()}
    assert fqns(names, "model.") == set(Tiny().state_dict())
    assert fqns(names, "optimizer.state.") == {
        f"{fqn}.{name}" for fqn in parameters for name in ("exp_avg", "exp_avg_sq", "step")
    }
    assert {f"{fqn}.lr" for fqn in parameters} < fqns(names, "optimizer.param_groups.")
    assert "last_epoch" in fqns(names, "lr_scheduler.")
    assert {"step", "n_tokens_seen"} < fqns(names, "train_state.")
    assert fqns(names, "dataloader.") == {"position", "seen"}
    assert not any("table" in name for name in names)


@pytest.mark.parametrize("name", ["model", "optimizer", "lr_scheduler", "dataloader"])
def test_a_state_may_not_have_a_name_of_the_managers_own(start_run: StartRun, name: str) -> None:
    with pytest.raises(ConfigError, match=f"the name '{name}' is the manager's own"):
        start_run(states={name: nn.Linear(1, 1)})


def test_a_name_that_two_model_parts_share_is_refused(tmp_path: Path) -> None:
    parts = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    with pytest.raises(ConfigError, match="two model parts of this rank share the name"):
        CheckpointManager(None, parts, optimizers, [], {}, job_config(tmp_path))


@pytest.mark.parametrize("keep", [1, 2])
def test_purging_leaves_exactly_the_latest_and_never_fewer(start_run: StartRun, mode: str, keep: int) -> None:
    seen: list[int] = []

    def look(event: str, step: int, /, **figures: Any) -> None:
        seen.append(len(CheckpointStore(run.root).committed()))
        run.events(event, step, **figures)

    run = start_run(interval=1, keep_latest_k=keep, async_mode=mode, seams={"on_event": look})
    run.finished(3)
    assert run.names() == [f"step-{step}" for step in range(4 - keep, 4)]
    once_there = seen[next(i for i, count in enumerate(seen) if count >= keep) :]
    assert min(once_there) >= keep
    assert run.events.steps("purged") == list(range(1, 4 - keep))


def test_the_forced_last_save_purges_too(start_run: StartRun) -> None:
    run = start_run(interval=2, keep_latest_k=1)
    run.train(5)
    assert run.committed() == [5]


@pytest.mark.promise(
    "A folder or file with another name is never removed, and is loaded only if you name it.",
    section="kept",
)
def test_foreign_names_are_left_alone(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(interval=1, keep_latest_k=1)
    for name in ("foo", "step-abc", "step-99.tmp", "step-50"):
        (run.root / name).mkdir(parents=True)
    (run.root / "step-99.tmp" / ".metadata").touch()
    (run.root / "step-60").symlink_to(tmp_path / "nowhere")
    assert not run.manager.load()
    run.train(3)
    run.manager.close()
    assert run.names() == ["foo", "step-3", "step-50", "step-60", "step-99.tmp", "step-abc"]
    assert (run.root / "step-60").is_symlink()
    assert start_run(interval=1).manager.load()


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_training_may_change_everything_right_after_a_save_began(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=1, async_mode=mode)
    run.step()
    run.manager.maybe_wait_for_staging()
    saved = run.contents()
    for _ in range(3):
        run.train_state.step += 1
        assert run.manager.save(run.train_state.step)
        run.manager.maybe_wait_for_staging()
        saved = run.contents()
        run.scramble()
        run.train_state.step = saved["step"]
    run.manager.close()
    fresh = start_run(seed=1).resumed()
    assert same(fresh.contents(), saved)


def test_closing_waits_for_the_save_in_flight(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=1, async_mode=mode)
    run.step()
    run.manager.close()
    run.manager.close()
    assert run.events.steps("committed") == [1]


def test_a_seed_checkpoint_is_the_model_at_step_0(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    run = start_run(create_seed_checkpoint=True, async_mode="async")
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        assert run.manager.save(0, force=True)
    assert "Created seed checkpoint" in caplog.messages
    assert run.names() == ["step-0"]
    assert {name.split(".")[0] for name in keys(run.root / "step-0")} == {"model"}


def test_a_failed_save_is_reported_and_training_continues_to_the_next_one(start_run: StartRun, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename", times=1))
    run = start_run(interval=2, seams={"store": store})
    run.train(5, last=False)
    assert run.committed() == [4]
    assert run.events.steps("save_failed") == [2]
    assert "No space left on device" in run.events.figures("save_failed")["reason"]
    assert run.names() == ["step-4"]


def test_too_many_failed_saves_in_a_row_end_the_run(start_run: StartRun, tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename"))
    run = start_run(interval=1, max_failed_saves=2, async_mode=mode, seams={"store": store})
    with pytest.raises(SaveFailed, match="No space left on device"):
        run.train(20, last=False)
    assert len(run.events.steps("save_failed")) == 2
    assert run.names() == []


@pytest.mark.parametrize("max_failed_saves", [1, 3])
def test_a_last_save_that_fails_is_tried_again(start_run: StartRun, tmp_path: Path, max_failed_saves: int) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename", times=1))
    run = start_run(interval=9, max_failed_saves=max_failed_saves, seams={"store": store})
    run.train(2)
    assert run.events.steps("save_failed") == [2]
    assert run.names() == ["step-2"]


def test_a_last_save_that_fails_twice_is_an_error(start_run: StartRun, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename"))
    run = start_run(interval=9, seams={"store": store})
    with pytest.raises(SaveFailed):
        run.train(2)
    assert run.events.steps("save_failed") == [2, 2]
    assert run.names() == []


def test_an_error_of_the_run_is_not_hidden_by_one_of_closing(start_run: StartRun, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename"))
    run = start_run(interval=1, max_failed_saves=1, seams={"store": store})
    with pytest.raises(ZeroDivisionError), run.manager:
        run.step()
        raise ZeroDivisionError
    run.manager.close()


def test_the_last_checkpoint_may_hold_only_the_weights(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(interval=2, model_weights_only=True, export_dtype="bfloat16")
    run.train(3)
    live = run.contents()["model"]
    exported = as_one_file(run.root / "step-3")
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in live.items()}
    assert same(exported, expected)
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())
    kinds = {info.step: info.kind for info in CheckpointStore(run.root).committed()}
    assert kinds == {2: CheckpointKind.FULL, 3: CheckpointKind.WEIGHTS_ONLY}
    plain = Tiny().bfloat16()
    plain.load_state_dict(exported)
    assert plain.first.weight.dtype == torch.bfloat16


class Unprepared(ThreadSaver):
    """Has no memory for a copy."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        raise MemoryError


@pytest.mark.parametrize("seeds", [False, True], ids=["last", "seed"])
def test_nothing_is_allocated_for_a_save_after_the_last(start_run: StartRun, seeds: bool) -> None:
    saver = Unprepared(Peers(timedelta(seconds=60)))
    run = start_run(interval=9, async_mode="async", create_seed_checkpoint=seeds, seams={"saver": saver})
    run.step(last=True)
    assert run.committed() == [1]


def test_an_export_folder_takes_the_weights_and_the_last_full_one_stays(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(interval=2, model_weights_only=True, export_folder="export", keep_latest_k=1)
    run.train(3)
    assert run.names() == ["step-3"]
    assert CheckpointStore(run.root).get(3).kind is CheckpointKind.FULL
    assert CheckpointStore(tmp_path / "export").get(3).kind is CheckpointKind.WEIGHTS_ONLY


def test_an_export_never_replaces_a_full_checkpoint(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    """This happens if the data ends at a step that was saved already."""
    run = start_run(interval=3, model_weights_only=True, keep_latest_k=1, async_mode="async")
    run.train(3, last=False)
    run.manager.save(3, force=True)
    assert CheckpointStore(run.root).get(3).kind is CheckpointKind.FULL
    assert "--checkpoint.export_folder" in caplog.text


def test_the_weights_of_a_branch_replace_the_full_checkpoint_of_the_run_that_it_left(start_run: StartRun) -> None:
    start_run(interval=1).finished(4)
    branch = start_run(interval=9, load_step=1, model_weights_only=True).resumed()
    branch.scramble()
    branch.train_state.step = 2
    branch.finished(3)
    kinds = {info.step: info.kind for info in CheckpointStore(branch.root).committed()}
    assert kinds == {1: CheckpointKind.FULL, 3: CheckpointKind.WEIGHTS_ONLY}
    assert same(as_one_file(branch.root / "step-3"), branch.contents()["model"])


def test_training_on_gives_the_name_of_the_weights_to_the_full_checkpoint(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(interval=2, model_weights_only=True).train(4)
    run = start_run(interval=2)
    assert run.manager.latest_step() == 4
    assert run.manager.load()
    assert run.train_state.step == 2
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        run.train(4, last=False)
    assert CheckpointStore(run.root).get(4).kind is CheckpointKind.FULL
    assert "The weights-only step 4 is now step-4.weights: a full checkpoint takes its name" in caplog.messages


def test_format_utils_reads_a_full_checkpoint(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(interval=1)
    run.step()
    state = as_one_file(run.root / "step-1")
    assert same(state["model"], run.contents()["model"])
    assert state["dataloader"] == {"position": 1, "seen": [0]}


def test_a_closed_manager_releases_the_folder(start_run: StartRun) -> None:
    """Else another process would wait for the complete time-out."""
    run = start_run(interval=2)
    run.train(2)
    assert (run.root / "writer.lock").exists()
    run.manager.close()
    run.manager.close()
    assert not (run.root / "writer.lock").exists()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_saves_and_removals_parse_no_manifest_of_this_process(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    parsed = parsed_from_now_on(monkeypatch)
    run = start_run(interval=1, keep_latest_k=2, async_mode=mode)
    for _ in range(5):
        run.step()
        run.manager.wait()
    run.manager.close()  # Removals may be behind.
    assert run.names() == ["step-4", "step-5"] and not parsed
