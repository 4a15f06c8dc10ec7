"""Optimizer states of plain DCP whose groups are a list: as get_state_dict returns them, or as the optimizer does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.only_once import load_and_close
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.contents import Contents, StoredObject
from torchtitan_lite.checkpoint.reading.stored_optimizer import ListedGroups, read_listed_groups
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch

SAVED_AT = 4


class Loop:
    """A model whose optimizer has two groups, the second one's parameters first in the model, and a schedule."""

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimize()

    def optimize(self) -> None:
        first, *others = self.model.parameters()
        groups = [{"params": others, "lr": 0.1}, {"params": [first], "weight_decay": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.rand(4, 2, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def manager(self, folder: Path, path: Path, **given: Any) -> CheckpointManager:
        return CheckpointManager.for_loop(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            folder=folder / "ours" / "checkpoint",
            initial_load_path=str(path),
            initial_load_model_only=False,
            preemption_signals=(),
            **given,
        )


def by_names(loop: Loop) -> dict[str, Any]:
    _, optimizer = get_state_dict(loop.model, loop.optimizer)
    return optimizer


def by_numbers(loop: Loop) -> dict[str, Any]:
    return loop.optimizer.state_dict()


BOTH = pytest.mark.parametrize("state_of", [by_names, by_numbers])


def saved(loop: Loop, folder: Path, state_of: Callable[[Loop], dict[str, Any]]) -> Path:
    path = folder / f"step-{SAVED_AT}"
    state = {
        "model": loop.model.state_dict(),
        "optimizer": state_of(loop),
        "lr_scheduler": loop.scheduler.state_dict(),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_save(state, checkpoint_id=path, no_dist=True)
    return path


@BOTH
def test_moments_and_settings_are_loaded_and_the_run_continues_as_the_one_that_saved(
    tmp_path: Path, state_of: Callable[[Loop], dict[str, Any]]
) -> None:
    theirs, ours = Loop(), Loop(seed=1)
    theirs.train(1, SAVED_AT)
    path = saved(theirs, tmp_path, state_of)
    with ours.manager(tmp_path, path) as manager:
        assert manager.load()
        assert manager.loaded_step == SAVED_AT
        rates = [group["lr"] for group in ours.optimizer.param_groups]
        assert rates == [0.1 * 0.5**SAVED_AT, 0.05 * 0.5**SAVED_AT]
        for each in (theirs, ours):
            each.train(SAVED_AT + 1, SAVED_AT + 3)
    assert all(torch.equal(tensor, ours.model.state_dict()[name]) for name, tensor in theirs.model.state_dict().items())


def test_parameters_with_other_names_keep_their_state(tmp_path: Path) -> None:
    theirs, ours = Loop(), Loop(seed=1)
    theirs.train(1, SAVED_AT)
    path = saved(theirs, tmp_path, by_numbers)
    ours.model = nn.Sequential(ours.model)  # every name has the prefix "0."
    with ours.manager(tmp_path, path, load_rename=("^=0.",)) as manager:
        assert manager.load()
        for each in (theirs, ours):
            each.train(SAVED_AT + 1, SAVED_AT + 3)
    expected = [*theirs.model.state_dict().values()]
    assert all(map(torch.equal, expected, ours.model.state_dict().values()))


def test_numbers_that_do_not_fit_the_optimizers_groups_are_refused_with_both(tmp_path: Path) -> None:
    theirs, ours = Loop(), Loop(seed=1)
    theirs.train(1, SAVED_AT)
    path = saved(theirs, tmp_path, by_numbers)
    ours.optimizer = torch.optim.AdamW(ours.model.parameters())
    ours.scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, gamma=0.5)
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    with (
        ours.manager(tmp_path, path) as manager,
        pytest.raises(CheckpointMismatch, match=r"groups of 5 and 1 numbered parameters.*here.*groups of 6"),
    ):
        manager.load()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.model.state_dict().items())


@BOTH
def test_a_state_of_another_shape_is_refused_by_the_name_of_its_parameter(
    tmp_path: Path, state_of: Callable[[Loop], dict[str, Any]]
) -> None:
    theirs, ours = Loop(), Loop(seed=1, width=5)
    theirs.train(1, SAVED_AT)
    path = saved(theirs, tmp_path, state_of)
    with (
        ours.manager(tmp_path, path) as manager,
        pytest.raises(CheckpointMismatch) as refusal,
    ):
        manager.load()
    assert "different (17)" in str(refusal.value)
    assert "missing" not in str(refusal.value)
    assert "unexpected" not in str(refusal.value)


@on_two_ranks
def test_a_sharded_run_loads_it_on_all_ranks(rank: int, tmp_path: Path) -> None:
    theirs, ours = Loop(), Loop(seed=1)
    theirs.train(1, SAVED_AT)
    paths = [tmp_path / name for name in ("names", "numbers")]
    if rank == 0:
        for path, state_of in zip(paths, (by_names, by_numbers), strict=True):
            saved(theirs, path, state_of)
    dist.barrier()
    fully_shard(ours.model, mesh=init_device_mesh("cpu", (2,)))
    ours.optimize()
    theirs.train(SAVED_AT + 1, SAVED_AT + 1)
    for path in paths:
        load_and_close(ours.manager(path, path / f"step-{SAVED_AT}"))
        assert [group["lr"] for group in ours.optimizer.param_groups] == [0.1 * 0.5**SAVED_AT, 0.05 * 0.5**SAVED_AT]
        ours.train(SAVED_AT + 1, SAVED_AT + 1)
        for name, expected in theirs.model.named_parameters():
            found = ours.model.get_parameter(name)
            assert isinstance(found, DTensor)
            assert torch.allclose(found.full_tensor(), expected, rtol=1e-5, atol=1e-6), name


def test_a_run_without_parameters_to_load_reads_no_list() -> None:
    key = "optimizer.param_groups.0.params"
    paths = {key: ("optimizer", "param_groups", 0, "params")}
    contents = Contents("c", {}, {key: StoredObject(["weight"])}, paths)

    def read(keys: Sequence[str]) -> dict[str, Any]:
        raise AssertionError(f"{keys} are read")

    assert read_listed_groups(contents, {}, {}, Peers(timedelta(seconds=60)), read) == ListedGroups()
