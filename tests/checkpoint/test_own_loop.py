"""What a training loop of one's own says in one call, and what it can ask for in addition to the interval."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.small_run import Events, Loader
from tests.ranks import on_two_ranks
from tests.store.filled import flip
from torchtitan_lite.checkpoint import CheckpointManager, TrainState, load_model
from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
)

MODES = ["disabled", "async", "async_with_pinned_mem"]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.rand(4, 2, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def a_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def saved_run(folder: Path, steps: int = 4, **given: Any) -> nn.Sequential:
    """Train `steps` steps, saving each; return the trained model."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=folder, interval=1, preemption_signals=(), **given
    ) as manager:
        for step in range(1, steps + 1):
            train(model, optimizer, step)
            manager.save(step)
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_one_call_with_keywords_saves_by_default(tmp_path: Path) -> None:
    model = a_model()
    with CheckpointManager.for_loop(model=model, folder=tmp_path / "runs" / "mine", preemption_signals=()) as manager:
        assert not manager.load()
        assert not manager.save(1)
        assert manager.save(500)
    assert steps_in(tmp_path / "runs" / "mine") == ["step-500"]


def test_everything_that_was_given_resumes(tmp_path: Path) -> None:
    def objects() -> dict[str, Any]:
        model = a_model(seed=len(steps_in(tmp_path)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        states = {"train_state": TrainState()}
        return {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": scheduler,
            "dataloader": Loader(),
            "states": states,
        }

    events = Events()
    first, second = objects(), objects()
    with CheckpointManager.for_loop(**first, folder=tmp_path, on_event=events, preemption_signals=()) as manager:
        train(first["model"], first["optimizer"], 1)
        first["lr_scheduler"].step()
        first["states"]["train_state"].step = 7
        manager.save(7, force=True)
    assert events.steps("committed") == [7]
    with CheckpointManager.for_loop(**second, folder=str(tmp_path), preemption_signals=()) as manager:
        assert manager.load()
        assert manager.loaded_step == 7
    assert equal(first["model"], second["model"])
    assert second["lr_scheduler"].get_last_lr() == first["lr_scheduler"].get_last_lr()
    assert second["states"]["train_state"].step == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"intervall": 3}, r"intervall is not a key of \[checkpoint\]\. The nearest is interval; docs/config\.md"),
        ({"interval": "5"}, r"checkpoint\.interval: expected a whole number, found the string '5'"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer: expected an optimizer, found a Linear"),
        ({"folder": ""}, r"folder: expected the path of a folder for checkpoints, found ''"),
        ({"folder": "hf://org/run"}, r"found the address 'hf:/"),
        ({"checkpoint_folder": "x"}, r"checkpoint_folder is not a key"),
        ({"enable": False, "create_seed_checkpoint": True}, r"create_seed_checkpoint: nothing would be saved"),
    ],
)
def test_a_wrong_keyword_is_refused_when_the_manager_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager.for_loop(**{"model": a_model(), **given})


def test_a_manager_that_is_switched_off_does_nothing(tmp_path: Path) -> None:
    with CheckpointManager.for_loop(model=a_model(), folder=tmp_path / "off", enable_checkpoint=False) as manager:
        assert not manager.load()
        manager.reset()
        assert not manager.save(500, force=True)
        assert not manager.save(500, now=True)
        assert manager.wait() == manager.latest_step() == -1
    assert not (tmp_path / "off").exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_the_loop_wants_now_is_made_whatever_the_interval(tmp_path: Path, mode: str) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=tmp_path, interval=100, async_mode=mode, preemption_signals=()
    ) as manager:
        assert manager.wait() == -1
        for step in range(1, 4):
            train(model, optimizer, step)
            assert manager.save(step, now=step == 2) is (step == 2)
        assert manager.wait() == 2
        assert manager.latest_step() == 2
    assert steps_in(tmp_path) == ["step-2"]


def test_a_save_wanted_now_is_not_skipped_while_another_is_under_way(tmp_path: Path) -> None:
    model = a_model()
    with CheckpointManager.for_loop(
        model=model, folder=tmp_path, interval=1, async_mode="async", when_busy="skip", preemption_signals=()
    ) as manager:
        manager.save(1)
        assert manager.save(2, now=True)
    assert "step-2" in steps_in(tmp_path)


def test_the_weights_of_the_latest_step_are_loaded_for_evaluation(tmp_path: Path) -> None:
    trained, model = saved_run(tmp_path), a_model(seed=1)
    assert load_model(model, tmp_path) == 4
    assert equal(model, trained)


def test_the_weights_of_a_step_by_number_or_by_folder(tmp_path: Path) -> None:
    saved_run(tmp_path)
    by_number, by_folder = a_model(seed=1), a_model(seed=2)
    assert load_model(by_number, tmp_path, 2) == 2
    assert load_model(by_folder, tmp_path / "step-2") == 2
    assert equal(by_number, by_folder)
    with pytest.raises(CheckpointNotFound, match=r"step 9 is not in .* \(it has 1, 2, 3, 4\)"):
        load_model(by_number, tmp_path, 9)


def test_an_evaluation_during_a_run_that_trains_needs_no_lease_and_changes_nothing(tmp_path: Path) -> None:
    model = a_model()
    with CheckpointManager.for_loop(model=model, folder=tmp_path, interval=1, preemption_signals=()) as manager:
        manager.save(1)
        before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "writer.lock")
        assert load_model(a_model(seed=1), tmp_path) == 1
        after = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "writer.lock")
        assert after == before
        manager.save(2)


def test_exported_weights_are_loaded_into_a_model_of_another_precision(tmp_path: Path) -> None:
    trained = a_model()
    with CheckpointManager.for_loop(
        model=trained, folder=tmp_path, model_weights_only=True, export_dtype="bfloat16", preemption_signals=()
    ) as manager:
        manager.save(3, force=True)
    model = a_model(seed=1)
    assert load_model(model, tmp_path) == 3
    assert torch.equal(model[0].weight, trained[0].weight.bfloat16().float())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_plain_dcp_are_loaded(tmp_path: Path) -> None:
    trained, model = a_model(), a_model(seed=1)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=tmp_path / "step-12")
    assert load_model(model, tmp_path, 12) == 12
    assert equal(model, trained)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=tmp_path / "weights")
    assert load_model(model, tmp_path / "weights") == 0


def test_a_damaged_latest_step_is_skipped_and_left_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path, steps=3)
    flip(tmp_path / "step-3" / "__0_0.distcp")
    with caplog.at_level(logging.WARNING):
        assert load_model(a_model(seed=1), tmp_path) == 2
    assert "Step 3 is damaged" in caplog.text
    assert steps_in(tmp_path) == ["step-1", "step-2", "step-3"]
    with pytest.raises(CheckpointDamaged):
        load_model(a_model(seed=1), tmp_path, 3)


def test_a_step_that_the_training_job_removes_during_the_load_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path, steps=3)
    model = a_model(seed=1)
    # The load asks the model for its state when it has chosen, and before it reads.
    model.register_state_dict_pre_hook(lambda *_: shutil.rmtree(tmp_path / "step-3", ignore_errors=True))
    with caplog.at_level(logging.WARNING):
        assert load_model(model, tmp_path) == 2
    assert "Step 3 was removed during the load" in caplog.text
    assert "damaged" not in caplog.text


def test_where_all_are_damaged_the_error_names_each(tmp_path: Path) -> None:
    saved_run(tmp_path, steps=2)
    flip(tmp_path / "step-1" / "__0_0.distcp")
    (tmp_path / "step-2" / "manifest.json").write_text("{")
    with pytest.raises(AllCheckpointsDamaged, match=r"(?s)step 2: .*step 1: "):
        load_model(a_model(seed=1), tmp_path)


def test_a_model_of_another_shape_and_a_folder_without_checkpoints_are_refused(tmp_path: Path) -> None:
    saved_run(tmp_path / "checkpoint", steps=1)
    with pytest.raises(CheckpointMismatch, match=r"shape \[3, 2\] in the checkpoint, \[5, 2\] expected"):
        load_model(nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1)), tmp_path / "checkpoint")
    with pytest.raises(CheckpointNotFound, match="it is the dump folder of a run"):
        load_model(a_model(), tmp_path)
    with pytest.raises(ConfigError, match="expected a module"):
        load_model(torch.optim.SGD(a_model().parameters()), tmp_path)  # type: ignore[arg-type]


class WithBuffer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64)
        self.adapter = nn.Linear(64, 4)
        self.register_buffer("seen", torch.tensor(seed))
        self.base.requires_grad_(False)


def adapter_run(folder: Path, model: WithBuffer, **given: Any) -> CheckpointManager:
    optimizer = torch.optim.AdamW(model.adapter.parameters())
    return CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=folder, interval=1, preemption_signals=(), **given
    )


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_trained_is_saved_and_resumed(tmp_path: Path, mode: str) -> None:
    first, second = WithBuffer(1), WithBuffer(2)
    with adapter_run(tmp_path, first, save_trained_only=True, async_mode=mode) as manager:
        manager.save(1)
    keys = dcp.FileSystemReader(tmp_path / "step-1").read_metadata().state_dict_metadata
    assert {key for key in keys if key.startswith("model.")} == {
        "model.adapter.weight",
        "model.adapter.bias",
        "model.seen",
    }
    base = second.base.weight.clone()
    load_and_close(adapter_run(tmp_path, second, save_trained_only=True))
    assert torch.equal(second.adapter.weight, first.adapter.weight)
    assert torch.equal(second.base.weight, base)
    assert int(second.seen) == 1
    third = WithBuffer(3)
    assert load_model(third, tmp_path, save_trained_only=True) == 1
    assert torch.equal(third.adapter.weight, first.adapter.weight)


def test_a_checkpoint_of_what_is_trained_does_not_pass_for_a_complete_one(tmp_path: Path) -> None:
    with adapter_run(tmp_path / "part", WithBuffer(1), save_trained_only=True) as manager:
        manager.save(1)
    fix = r"(?s)missing.*base\.weight.*They are frozen parameters: .*--checkpoint\.save_trained_only"
    with adapter_run(tmp_path / "part", WithBuffer(1)) as manager, pytest.raises(CheckpointMismatch, match=fix):
        manager.load()


def test_a_complete_checkpoint_is_loaded_and_saved_completely_where_only_what_is_trained_is_saved(
    tmp_path: Path,
) -> None:
    first, second, third = WithBuffer(1), WithBuffer(2), WithBuffer(3)
    with adapter_run(tmp_path, first) as manager:
        manager.save(1)
    for model, step in ((second, 1), (third, 2)):
        with adapter_run(tmp_path, model, save_trained_only=True) as manager:
            assert manager.load(step)
            manager.save(step + 1)
        assert torch.equal(model.base.weight, first.base.weight)


@on_two_ranks
def test_frozen_parameters_under_fsdp1_are_refused_by_name(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = FullyShardedDataParallel(
        WithBuffer(1), device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(ConfigError, match=r"checkpoint\.save_trained_only: .*FSDP1.*fully_shard"):
        CheckpointManager.for_loop(model=model, folder=tmp_path, save_trained_only=True)


@on_two_ranks
def test_a_sharded_model_is_saved_when_wanted_and_loaded_for_evaluation_by_all_ranks(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    trained, model = WithBuffer(1), WithBuffer(2)
    for each in (trained, model):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.adapter.parameters())
    with CheckpointManager.for_loop(
        model=trained, optimizer=optimizer, folder=tmp_path, interval=50, async_mode="async", save_trained_only=True
    ) as manager:
        assert not manager.save(1)
        assert manager.save(2, now=True)
        assert manager.wait() == 2
    assert load_model(model, tmp_path, save_trained_only=True) == 2
    for name, parameter in model.adapter.named_parameters():
        assert torch.equal(parameter.to_local(), trained.adapter.get_parameter(name).to_local())
    assert not torch.equal(model.base.weight.to_local(), trained.base.weight.to_local())


def test_load_model_of_a_file_says_what_it_is_and_what_makes_a_checkpoint_of_it(tmp_path: Path) -> None:
    model = a_model()
    torch.save({"model": model.state_dict(), "optimizer": {}, "epoch": 4}, tmp_path / "last.pt")
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint: it is a file of weights\. .*import"):
        load_model(model, tmp_path / "last.pt")
    with pytest.raises(CheckpointNotFound, match="no such file or folder"):
        load_model(model, tmp_path / "nowhere")
