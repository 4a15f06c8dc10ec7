"""A run that rolls back by itself: to the latest good checkpoint, without the batch, bounded, and on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import MODES
from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.resume.rolling_back import StartRun, record, straight, train
from tests.checkpoint.small_run import SmallRun, same
from tests.cli.command import command
from tests.examples import mostly_slow
from torchtitan_lite import faults
from torchtitan_lite.errors import CheckpointError, ConfigError, RunNotLoaded, TrainingDiverged
from torchtitan_lite.store import layout


@pytest.mark.parametrize("mode", mostly_slow(MODES, kept=["async_with_pinned_mem"]))
@pytest.mark.parametrize(
    ("poisoned", "left_out"), [({8}, {8}), ({5, 11}, {5, 11}), ({8, 9}, {7, 8, 9})], ids=["one", "two", "in a row"]
)
def test_the_run_finishes_as_one_that_was_never_given_the_batches(
    start_run: StartRun, mode: str, poisoned: set[int], left_out: set[int]
) -> None:
    run = start_run(interval=3, async_mode=mode).loaded()
    train(run, poisoned=poisoned)
    run.manager.close()
    assert same(run.contents(), straight(start_run, without=left_out) | {"loader": run.contents()["loader"]})
    again = start_run(interval=3).resumed()
    assert same(again.contents(), run.contents())


def test_a_step_that_is_bad_again_also_loses_the_batch_before_and_rolls_back_before_that(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=7)
    assert run.manager.roll_back(8, "loss is nan") == 7
    assert [run.manager.batches_to_skip(step) for step in (7, 8)] == [0, 1]
    assert run.manager.roll_back(8, "loss is nan") == 6
    assert [run.manager.batches_to_skip(step) for step in (7, 8)] == [2, 0]
    train(run, poisoned=())
    assert same(run.contents(), straight(start_run, without={7, 8}) | {"loader": run.contents()["loader"]})


def test_what_comes_after_is_set_aside_by_the_first_save_of_the_branch(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=6)
    run.manager.roll_back(6, "loss is nan")
    assert run.train_state.step == 5 and run.committed() == [1, 2, 3, 4, 5, 6]
    train(run, poisoned=(), steps=6)
    run.manager.close()
    assert run.committed() == [1, 2, 3, 4, 5, 6]
    (aside,) = run.root.glob("step-6.abandoned-*")
    lineage = json.loads((run.root / "step-6" / "manifest.json").read_text())["lineage"]
    assert lineage["ancestors"] == [[5, aside.name.rpartition("-")[2]]] and lineage["branch_point"] is None


def test_a_step_that_an_earlier_rollback_has_left_is_no_place_to_go(start_run: StartRun) -> None:
    run = start_run(interval_type="none", at_steps=(2, 5)).loaded()
    train(run, poisoned=(), steps=6, ends=False)
    for expected in (5, 5, 2):
        assert run.manager.roll_back(7, "loss is nan") == expected
    # The branch from step 2 has saved nothing.
    assert run.committed() == [2, 5]
    assert run.manager.roll_back(8, "loss is nan", max_rollbacks=4) == 2


def test_a_checkpoint_with_nan_is_skipped(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=3)
    with torch.no_grad():
        run.model.first.weight.fill_(float("nan"))
    train(run, poisoned=(), steps=5)
    assert run.manager.roll_back(6, "loss is nan") == 3


def test_a_checkpoint_with_infinity_which_no_save_looks_for_is_skipped(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=3)
    with torch.no_grad():
        run.model.first.bias[0] = float("inf")
    run.train_state.step = 4
    run.manager.save(4)
    assert run.manager.roll_back(5, "loss is inf") == 3
    assert "Step 4 has values that are not finite" in caplog.text
    assert record(run)[0]["target"] == 3


def test_a_frozen_mask_of_infinity_and_floats_of_eight_bits_are_no_finding(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.model.mask = torch.nn.Parameter(torch.full((4,), float("-inf")), requires_grad=False)
    run.model.scale = torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    run.manager.load()
    train(run, poisoned=(), steps=3)
    run.model.scale.requires_grad_()
    assert run.manager.roll_back(4, "loss is nan") == 3


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no floats of 4 bits")
def test_floats_of_four_bits_are_rolled_back_to_and_exported_as_they_are(start_run: StartRun, tmp_path: Path) -> None:
    def begun(folder: Path, **options: Any) -> SmallRun:
        run = start_run(folder, interval=1, **options)
        packed = torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        run.model.packed = torch.nn.Parameter(packed, requires_grad=False)
        return run.loaded()

    run = begun(tmp_path)
    train(run, poisoned=(), steps=2)
    run.model.packed.requires_grad_()
    assert run.manager.roll_back(3, "loss is nan") == 2
    exported = begun(tmp_path / "export", model_weights_only=True, export_dtype="bfloat16").finished(1)
    weights = as_one_file(exported.root / "step-1")
    assert weights["first.weight"].dtype == torch.bfloat16
    assert weights["packed"].view(torch.uint8).tolist() == list(range(16))


def test_a_damaged_checkpoint_is_skipped(start_run: StartRun) -> None:
    run = start_run(interval=1, verify_on_load="off").loaded()
    train(run, poisoned=(), steps=3)
    data = run.root / "step-3" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert run.manager.roll_back(4, "loss is nan") == 2


def test_after_too_many_rollbacks_the_error_lists_them_and_nothing_changes(start_run: StartRun) -> None:
    run = start_run(interval=2).loaded()
    with pytest.raises(TrainingDiverged) as caught:
        train(run, poisoned={5, 6, 7, 8}, max_rollbacks=3)
    assert str(caught.value) == (
        "step 4: loss is nan; stopped before it was applied. The run does not roll back again: at most 3 "
        "in 1,000 steps are allowed. It rolled back 3 times: from step 5 (loss is nan) to step 4, without batch 5; "
        "from step 5 (loss is nan) to step 2, without batch 4; from step 4 (loss is nan) to step 2, without batch 6. "
        "Roll back with --checkpoint.load_step, and lower optimizer.lr or training.max_norm."
    )
    assert run.events.steps("diverged") == [5, 5, 4, 4]
    assert len(record(run)) == 3


def test_only_rollbacks_from_the_last_steps_count(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned={3, 6, 9}, max_rollbacks=1, within_steps=2)
    assert [each["step"] for each in record(run)] == [3, 5, 7]


def test_without_a_checkpoint_before_the_step_the_run_stops(start_run: StartRun) -> None:
    run = start_run(interval=5).loaded()
    with pytest.raises(TrainingDiverged, match=r"does not roll back: there is no checkpoint of step 2 or before"):
        train(run, poisoned={3})
    assert not (run.root / layout.ROLLBACKS).exists()


@pytest.mark.parametrize("point", ["load", "rolled_back"])
def test_a_start_after_a_kill_rolls_back_too_although_later_steps_are_there(start_run: StartRun, point: str) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=7)
    run.manager.roll_back(8, "loss is nan")
    faults.install(f"EIO@{point}", rank=0)
    with pytest.raises(OSError):
        run.manager.roll_back(8, "loss is nan")
    run.manager.close()
    faults.install("", rank=0)
    again = start_run(interval=1).resumed()
    assert (again.train_state.step, again.committed()[-1]) == (6, 7)
    assert [each["target"] for each in record(again)] == [7, 6]
    train(again, poisoned=())
    again.manager.close()
    assert same(again.contents(), straight(start_run, without={7, 8}) | {"loader": again.contents()["loader"]})


def test_what_was_left_and_is_brought_back_is_resumed_from_with_all_of_its_batches(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=7)
    assert run.manager.roll_back(5, "loss is nan") == 4
    train(run, poisoned=(), steps=5)
    run.manager.close()
    (aside,) = run.root.glob("step-7.abandoned-*")
    ended = command("bring-back", str(run.root), aside.name, "--leave-branch")
    assert ended.code == 0 and "the next start resumes from it" in ended.out
    again = start_run(interval=1).resumed()
    assert (again.train_state.step, again.manager.batches_to_skip(5)) == (7, 0)
    assert again.manager.roll_back(8, "loss is nan") == 7
    assert [(each["skipped"], each["is_left"]) for each in record(again)] == [(5, True), (8, False)]
    train(again, poisoned=())
    again.manager.close()
    assert same(again.contents(), straight(start_run, without={8}) | {"loader": again.contents()["loader"]})


def test_the_batches_are_left_out_by_every_later_start(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=5)
    run.manager.roll_back(6, "loss is nan")
    run.manager.close()
    for steps in (5, 7, 9):
        again = start_run(interval=1).loaded()
        train(again, poisoned=(), steps=steps)
        again.manager.close()
    assert again.loader.state["position"] == 10


def test_a_branch_of_the_run_leaves_them_out_and_a_new_run_does_not(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned={6}, steps=8)
    run.manager.close()
    branch = start_run(interval=1, load_step=3).loaded()
    assert branch.manager.batches_to_skip(6) == 1
    branch.manager.close()
    for step in run.root.glob("step-*"):
        step.rename(tmp_path / step.name)
    fresh = start_run(interval=1)
    assert not fresh.manager.load()
    assert fresh.manager.batches_to_skip(6) == 0


def test_the_load_step_of_a_branch_continues_it_after_it_rolled_back_and_all_it_has_stays(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=8)
    run.manager.close()
    branch = start_run(interval=1, load_step=3).loaded()
    train(branch, poisoned={6}, steps=7)
    branch.manager.close()
    again = start_run(interval=1, load_step=3).loaded()
    assert again.train_state.step == 7
    train(again, poisoned=(), steps=8)
    again.manager.close()
    assert again.committed() == [*range(1, 9)]


def test_a_run_that_cannot_roll_back_is_refused(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=2)
    run.manager.close()
    for options in ({"load_only": True}, {"enable_checkpoint": False}):
        with pytest.raises(ConfigError, match=r"roll_back\(2\): expected a run that saves"):
            start_run(**options).manager.roll_back(2, "loss is nan")
    with pytest.raises(RunNotLoaded):
        start_run(interval=1).manager.roll_back(3, "loss is nan")


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        ({"reason": 3.5}, "reason: expected a text, such as 'loss is nan', found 3.5"),
        ({"max_rollbacks": 0}, "max_rollbacks: expected a whole number from 1, found 0"),
        ({"within_steps": True}, "within_steps: expected a whole number from 1, found True"),
        ({"step": 0}, "expected a step, a whole number from 1, found 0"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_changes(
    start_run: StartRun, arguments: dict[str, Any], finding: str
) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=2)
    with pytest.raises(ConfigError, match=finding):
        run.manager.roll_back(**{"step": 3, "reason": "loss is nan"} | arguments)
    assert run.train_state.step == 2 and not (run.root / layout.ROLLBACKS).exists()


def test_what_was_uploaded_of_the_steps_that_were_left_is_not_taken(start_run: StartRun, tmp_path: Path) -> None:
    uploads = {"interval": 1, "upload_folder": str(tmp_path / "uploaded")}
    run = start_run(**uploads).loaded()
    train(run, poisoned=(), steps=7)
    run.manager.close()
    assert (tmp_path / "uploaded" / "step-7").is_dir()
    again = start_run(**uploads).loaded()
    assert [again.manager.roll_back(8, "loss is nan") for _ in range(2)] == [7, 6]
    again.manager.close()
    for start in range(2):  # Before the branch has a checkpoint, and after.
        third = start_run(**uploads).loaded()
        assert third.train_state.step == 6 + start
        train(third, poisoned=(), steps=7)
        third.manager.close()


def test_a_start_that_only_loads_takes_the_same_and_writes_nothing(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=4)
    run.manager.roll_back(4, "loss is nan")
    run.manager.close()
    before = (run.root / layout.ROLLBACKS).read_bytes()
    (run.root / layout.ROLLBACKS).write_bytes(before.replace(b'"target": 3', b'"target": -1'))
    names = run.names()
    reader = start_run(load_only=True).resumed()
    assert reader.train_state.step == 3
    assert (reader.names(), record(run)[0]["target"]) == (names, -1)


def test_a_record_that_leads_nowhere_is_one_error(start_run: StartRun) -> None:
    run = start_run(interval=1).loaded()
    train(run, poisoned=(), steps=3)
    run.manager.roll_back(3, "loss is nan")
    run.manager.close()
    document = json.loads((run.root / layout.ROLLBACKS).read_bytes())
    document["rollbacks"][0]["last"] = 0
    (run.root / layout.ROLLBACKS).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 0 or before .* move rollbacks.json"):
        start_run(interval=1).manager.load()
