"""Exports of what is trained, from a loop of one's own: what is in them, and what takes them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.only_once import load_and_close
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager, load_model


class Adapted(nn.Module):
    """A frozen base with a trained adapter and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.adapter(x)
        return out


def trained(folder: Path, model: Adapted, **settings: Any) -> Adapted:
    """Train `model` for a step and save it as the last one."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    manager = CheckpointManager.for_loop(
        model=model,
        optimizer=optimizer,
        folder=folder,
        save_trained_only=True,
        export_dtype="bfloat16",
        preemption_signals=(),
        **settings,
    )
    with manager:
        manager.load()
        manager.reset()
        model(torch.ones(1, 8)).sum().backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        manager.save(1, force=True)
    return model


def names_in(checkpoint: Path) -> set[str]:
    return set(dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.mark.parametrize(
    ("settings", "exported"),
    [
        ({"export_folder": "export"}, "export"),
        ({"model_weights_only": True}, "checkpoint"),
        ({"model_weights_only": True, "export_folder": "export", "async_mode": "async"}, "export"),
    ],
    ids=["export", "weights", "both"],
)
def test_an_export_has_what_is_trained_and_is_taken_back(
    tmp_path: Path, settings: dict[str, Any], exported: str
) -> None:
    model = trained(tmp_path / "checkpoint", Adapted(1), **settings)
    assert names_in(tmp_path / exported / "step-1") == {"adapter.weight", "seen"}
    for_evaluation = Adapted(2)
    assert load_model(for_evaluation, tmp_path / exported, save_trained_only=True) == 1
    _has_the_adapter_of(model, for_evaluation)
    start = {"initial_load_path": str(tmp_path / exported / "step-1")}
    continued = Adapted(3)
    manager = CheckpointManager.for_loop(
        model=continued, folder=tmp_path / "next", save_trained_only=True, preemption_signals=(), **start
    )
    load_and_close(manager)
    _has_the_adapter_of(model, continued)


@on_two_ranks
def test_an_export_of_what_two_ranks_train_is_that_of_one(rank: int, tmp_path: Path) -> None:
    model = Adapted(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    trained(tmp_path / "checkpoint", model, export_folder="export")
    assert names_in(tmp_path / "export" / "step-1") == {"adapter.weight", "seen"}
    other = Adapted(2)
    assert load_model(other, tmp_path / "export", save_trained_only=True) == 1
    assert torch.equal(other.adapter.weight.bfloat16(), model.adapter.weight.full_tensor().bfloat16())


def _has_the_adapter_of(model: Adapted, other: Adapted) -> None:
    assert torch.equal(other.adapter.weight, model.adapter.weight.bfloat16().float())
    assert int(other.seen) == int(model.seen)
    assert not torch.equal(other.base.weight, model.base.weight)


def test_what_is_frozen_after_it_was_trained_stays_in_the_checkpoints(tmp_path: Path) -> None:
    """As with layers that are trained in turn: its value is nowhere else."""
    model = Adapted(0)
    optimizer = torch.optim.AdamW(model.adapter.parameters())
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=tmp_path, save_trained_only=True, preemption_signals=()
    ) as manager:
        manager.load()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        model.adapter.requires_grad_(False)
        manager.save(1, force=True)
    again = Adapted(1)
    with CheckpointManager.for_loop(
        model=again,
        optimizer=torch.optim.AdamW(again.adapter.parameters()),
        folder=tmp_path,
        save_trained_only=True,
        preemption_signals=(),
    ) as manager:
        assert manager.load()
    assert "model.adapter.weight" in names_in(tmp_path / "step-1")
    assert "model.base.weight" not in names_in(tmp_path / "step-1")
    assert torch.equal(again.adapter.weight, model.adapter.weight)
