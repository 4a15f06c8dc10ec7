"""`convert`: ours to plain DCP and torchtitan's layout, and theirs to ours; every tensor keeps its bits."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.reading.foreign_folders import TOKENS_OF_RANK, of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun, same
from tests.cli.conftest import Said
from tests.store.filled import flip
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.state.stateful import OptimizerWrapper
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.store import CheckpointStore

GOLDEN = Path(__file__).parents[1] / "golden" / "format-7"
COMMAND = "convert"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """Return a run after three steps, which has saved the last one."""
    run = SmallRun(tmp_path / "run").loaded().finished(3)
    return run


def zeroed(value: Any) -> Any:
    """Return `value` with zeros in its tensors, to load into."""
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def optimizer_of(run: SmallRun) -> dict[str, Any]:
    return dict(OptimizerWrapper([run.model], [run.optimizer]).state_dict())


def in_two_groups() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model, and an optimizer whose groups differ in a number and in a tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [
        {"params": [model[1].weight, model[0].bias], "lr": torch.tensor(0.25)},
        {"params": [model[0].weight, model[1].bias], "weight_decay": 0.5},
    ]
    return model, torch.optim.AdamW(groups, lr=0.5)


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_loader_that_does_not_flatten_the_optimizer_reads_the_nested_form(tmp_path: Path, call: Said) -> None:
    model, optimizer = in_two_groups()
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=tmp_path / "run", preemption_signals=()
    ) as manager:
        manager.load()
        train_one_step(model, optimizer)
        manager.save(1, force=True)
    code, _, err = call(tmp_path / "run", tmp_path / "out", "--layout", "dcp", "--optimizer", "nested")
    assert (code, err) == (0, "")
    other, its = in_two_groups()
    of_model, of_optimizer = get_state_dict(other, its)
    of_optimizer["param_groups"][1]["weight_decay"] = 0.0
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp_load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert same(its.state_dict()["state"], optimizer.state_dict()["state"])
    assert [group["weight_decay"] for group in its.param_groups] == [1e-2, 0.5]
    assert [float(group["lr"]) for group in its.param_groups] == [0.25, 0.5]
    train_one_step(model, optimizer)
    train_one_step(other, its)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_the_nested_form_becomes_the_same_checkpoint_of_ours_again(run: SmallRun, tmp_path: Path, call: Said) -> None:
    assert call(run.root, tmp_path / "nested", "--layout", "dcp", "--optimizer", "nested")[0] == 0
    assert call(tmp_path / "nested", tmp_path / "step-3", "--layout", "ours")[0] == 0
    before, after = (open_checkpoint(path).contents for path in (run.root / "step-3", tmp_path / "step-3"))
    assert {*before.tensors} == {*after.tensors} and {*before.objects} == {*after.objects}
    assert all(after.objects[key].value == each.value for key, each in before.objects.items() if each.item is None)


def test_a_nested_optimizer_is_of_dcp_alone_and_needs_an_optimizer(run: SmallRun, tmp_path: Path, call: Said) -> None:
    code, _, err = call(run.root, tmp_path / "out", "--layout", "torchtitan", "--optimizer", "nested")
    assert (code, err) == (2, "error: --optimizer nested: expected --layout dcp\n")
    with CheckpointManager.for_loop(
        model=torch.nn.Linear(2, 2), folder=tmp_path / "model", preemption_signals=()
    ) as manager:
        manager.load()
        manager.save(1, force=True)
    code, _, err = call(tmp_path / "model", tmp_path / "out", "--optimizer", "nested")
    assert code == 2 and err.endswith("step-1 has no optimizer with names of parameters\n")


def test_ours_becomes_a_folder_that_stock_dcp_loads(run: SmallRun, tmp_path: Path, call: Said) -> None:
    code, out, err = call(run.root, tmp_path / "out", "--layout", "dcp")
    assert (code, err) == (0, "")
    assert out.startswith(f"Converted {run.root / 'step-3'}\nto {tmp_path / 'out'}: ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp"}
    expected = {"model": dict(run.model.state_dict()), "optimizer": optimizer_of(run)}
    state = zeroed(expected)
    dcp_load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state, expected)
    assert open_checkpoint(tmp_path / "out").contents.paths == {
        key: tuple(map(str, path)) for key, path in open_checkpoint(run.root / "step-3").contents.paths.items()
    }


def test_ours_becomes_what_torchtitan_loads(run: SmallRun, tmp_path: Path, call: Said) -> None:
    run.train_state.n_tokens_seen = 0
    code, out, _ = call(run.root, tmp_path / "step-3", "--layout", "torchtitan", "--dp-ranks", 2, "--json")
    assert code == 0
    expected = {
        **run.model.state_dict(),
        "optimizer": optimizer_of(run),
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": 3, "ntokens_seen": 0},
        "dataloader": {"world_size": 2, "dp_rank_0": pickle.dumps({}), "dp_rank_1": pickle.dumps({})},
    }
    state = zeroed(expected) | {"lr_scheduler": {"last_epoch": 0}, "train_state": {"step": 0, "ntokens_seen": 9}}
    dcp_load(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert same(state, expected)
    left_out = json.loads(out)["left_out"]
    assert "rng" in left_out
    assert "train_state.global_avg_losses" in left_out
    assert not {"train_state.step", "lr_scheduler.last_epoch"} & {*left_out}


@pytest.mark.parametrize(("ranks", "kept"), [(0, 2), (2, 2), (1, 0), (4, 0)])
def test_positions_of_torchtitans_data_stay_unless_its_job_has_other_ranks(
    ranks: int, kept: int, run: SmallRun, tmp_path: Path, call: Said
) -> None:
    of_0_3(run, tmp_path / "titan" / "step-3")
    assert call(tmp_path / "titan" / "step-3", tmp_path / "step-3", "--layout", "ours")[0] == 0
    back = tmp_path / "back" / "step-3"
    assert call(tmp_path / "step-3", back, "--layout", "torchtitan", "--dp-ranks", ranks)[0] == 0
    names = [f"dp_rank_{rank}" for rank in range(kept or ranks)]
    state: dict[str, Any] = {"dataloader": {"world_size": 0, **dict.fromkeys(names, b"")}}
    dcp_load(state, checkpoint_id=back, no_dist=True)
    assert [pickle.loads(state["dataloader"][name]) for name in names] == [{"at": 24} if kept else {}] * len(names)
    assert state["dataloader"]["world_size"] == len(names)


def test_what_has_no_place_in_a_layout_is_named(run: SmallRun, tmp_path: Path, call: Said) -> None:
    _, out, _ = call(run.root, tmp_path / "out", "--layout", "torchtitan")
    [line] = [line for line in out.splitlines() if line.startswith("Left out")]
    assert "rng" in line
    assert "train_state (" in line


def test_weights_only_stay_weights_only(tmp_path: Path, call: Said) -> None:
    step = GOLDEN / "two-ranks" / "export" / "step-7"
    assert call(step, tmp_path / "titan", "--layout", "torchtitan")[0] == 0
    assert call(tmp_path / "titan", tmp_path / "step-7", "--layout", "ours")[0] == 0
    opened = open_checkpoint(tmp_path / "step-7")
    assert (opened.kind, opened.step) == (CheckpointKind.WEIGHTS_ONLY, 7)
    assert opened.contents.tensors.keys() == open_checkpoint(step).contents.tensors.keys()


@pytest.mark.parametrize("make", [of_0_3, of_2024])
def test_torchtitans_becomes_ours_and_a_run_takes_it_over(
    make: Callable[[SmallRun, Path], Path], run: SmallRun, tmp_path: Path, call: Said
) -> None:
    make(run, tmp_path / "titan" / "step-3")
    out = tmp_path / "new" / "checkpoint" / "step-3"
    assert call(tmp_path / "titan" / "step-3", out, "--layout", "ours")[0] == 0
    manifest = Manifest.of_folder(out)
    assert manifest is not None
    assert (manifest.step, manifest.kind, manifest.lineage.run_id) == (3, CheckpointKind.FULL, "unknown")
    assert manifest.extra == {"converted_from": "torchtitan"}
    assert all(record.blocks for record in manifest.files.values())
    assert [info.step for info in CheckpointStore(out.parent).committed()] == [3]
    with SmallRun(
        tmp_path / "other", seed=5, initial_load_path=str(out), initial_load_model_only=False
    ).resumed() as resumed:
        assert same(dict(resumed.model.state_dict()), dict(run.model.state_dict()))
        assert same(optimizer_of(resumed), optimizer_of(run))
        assert (resumed.train_state.step, resumed.scheduler.last_epoch) == (3, 3)
        if make is of_0_3:
            assert resumed.train_state.n_tokens_seen == 2 * TOKENS_OF_RANK


@pytest.mark.parametrize("form", ["nested", "flat"])
@pytest.mark.parametrize("outer", ["", "app"])
def test_plain_dcp_with_either_form_of_the_optimizer_becomes_ours_and_torchtitans(
    outer: str, form: str, run: SmallRun, tmp_path: Path, call: Said
) -> None:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer) if form == "nested" else optimizer_of(run)
    state = {"model": run.model.state_dict(), "optimizer": optimizer, "train_state": {"step": 3}}
    save_plain({outer: state} if outer else state, tmp_path / "plain")
    assert call(tmp_path / "plain", tmp_path / "step-3", "--layout", "ours")[0] == 0
    opened = open_checkpoint(tmp_path / "step-3")
    assert (opened.kind, opened.step) == (CheckpointKind.FULL, 3)
    wanted = {f"optimizer.{key}" for key in optimizer_of(run)} | {f"model.{name}" for name in run.model.state_dict()}
    assert wanted <= {*opened.contents}
    assert not [key for key in opened.contents if key.startswith("optimizer.param_groups.0.")]
    assert call(tmp_path / "plain", tmp_path / "titan", "--layout", "torchtitan")[0] == 0
    expected = {**run.model.state_dict(), "optimizer": optimizer_of(run), "train_state": {"step": 3}}
    found = zeroed(expected)
    dcp_load(found, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert same(found, expected)


def test_a_round_trip_keeps_all_tensors(run: SmallRun, tmp_path: Path, call: Said) -> None:
    assert call(run.root, tmp_path / "plain", "--layout", "dcp")[0] == 0
    assert call(tmp_path / "plain", tmp_path / "b" / "checkpoint" / "step-3", "--layout", "ours")[0] == 0
    with SmallRun(tmp_path / "b", seed=9).resumed() as resumed:
        found, expected = resumed.contents(), run.contents()
    assert same(found["model"], expected["model"])
    for key in ("lr", "schedule", "loader", "step", "losses"):
        assert found[key] == expected[key], key


def test_no_file_of_the_checkpoint_is_shared_with_the_result(run: SmallRun, tmp_path: Path, call: Said) -> None:
    assert call(run.root, tmp_path / "out")[0] == 0
    inodes = [{path.stat().st_ino for path in folder.iterdir()} for folder in (run.root / "step-3", tmp_path / "out")]
    assert not inodes[0] & inodes[1]


def test_refusals_are_one_sentence_and_leave_nothing(run: SmallRun, tmp_path: Path, call: Said) -> None:
    step = run.root / "step-3"
    damaged, newer = tmp_path / "damaged", tmp_path / "half"
    shutil.copytree(step, damaged)
    flip(damaged / "__0_0.distcp", 600)
    shutil.copytree(step, newer)
    for name in ("manifest.json", ".metadata"):
        (newer / name).unlink()
    save_plain({"model": dict(run.model.state_dict()), "optimizer": {"x": torch.zeros(2)}}, tmp_path / "plain")
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "out"
    for arguments, expected, text in (
        ((step, out, "--layout", "ours"), 2, "has this layout already: copy it, or use reshard"),
        ((tmp_path / "plain", out, "--layout", "dcp"), 2, "has this layout already"),
        ((step, out, "--layout", "dcp", "--dp-ranks", 2), 2, "--dp-ranks 2: expected at least 1, with --layout "),
        ((step, out, "--layout", "flax"), 2, "--layout"),
        ((step, damaged), 2, "damaged: expected a new folder, found a checkpoint"),
        ((damaged, out), 3, "is damaged: bytes 0 to "),
        ((newer, out), 1, "there are files of tensors in it, but no .metadata"),
        ((tmp_path / "plain", out, "--layout", "torchtitan"), 1, "no optimizer whose state has names of parameters"),
        ((tmp_path / "none", out), 1, "does not exist"),
        ((step, "s3://bucket/out"), 2, "expected a folder on disk, found an address"),
    ):
        code, printed, err = call(*arguments)
        assert (code, printed, err.count("\n")) == (expected, "", 1), (arguments, err)
        assert text in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
