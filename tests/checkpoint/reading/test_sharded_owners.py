"""On two ranks: FSDP1, FSDP2 and DDP get their state back in their own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.odd_objects import FusedQkv, OwnForm, ScaledLinear
from tests.checkpoint.state.optimizers_of_torch import state_of
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper
from torchtitan_lite.errors import ConfigError, SaveFailed


class Net(nn.Module):
    """Sizes that two ranks cannot share evenly; one layer has no gradient in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.second = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.second(y) + (self.late(y) if late else 0.0)
        return z


class RowSums(Optimizer):
    """State of another shape than its parameter's: one number for each row, sharded like the rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                sums = self.state[parameter].setdefault("rows", torch.zeros_like(parameter.sum(-1)))
                sums.add_(parameter.grad.sum(-1))


def managed(folder: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> CheckpointManager:
    return CheckpointManager(None, [model], [optimizer], [], {}, job_config(folder, **options))


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int, **forward: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(2, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        model(batch, **forward).square().mean().backward()
        optimizer.step()


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.full_tensor().detach() if isinstance(v, DTensor) else v for key, v in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False])
@on_two_ranks
def test_fsdp1_with_a_mesh_continues_as_if_it_had_never_stopped(rank: int, tmp_path: Path, original: bool) -> None:
    def run() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        model = FullyShardedDataParallel(
            Net(), device_mesh=mesh, use_orig_params=original, device_id=torch.device("cpu")
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = run()
    with managed(tmp_path, model, optimizer, digest_tensors=("save",)) as manager:
        train(model, optimizer, range(1, 4), rank)
        manager.save(3, force=True)
    at_save = whole(ModelWrapper(model).state_dict())
    names = {"first.weight", "first.bias", "late.weight", "late.bias", "second.weight", "second.bias"}
    assert at_save.keys() == names
    train(model, optimizer, range(4, 6), rank, late=True)
    again, other = run()
    train(again, other, range(8, 9), rank)
    load_and_close(managed(tmp_path, again, other, digest_tensors=("load",)))
    assert same(whole(ModelWrapper(again).state_dict()), at_save)
    train(again, other, range(4, 6), rank, late=True)
    assert same(whole(ModelWrapper(again).state_dict()), whole(ModelWrapper(model).state_dict()))
    states = [whole(OptimizerWrapper(*pair).state_dict()) for pair in (([again], [other]), ([model], [optimizer]))]
    assert same(*states)
    plain = Net()
    loaded = torch.optim.AdamW(plain.parameters())
    if rank == 0:
        # A checkpoint of FSDP1 has the names of the plain model.
        names = set(OptimizerWrapper([plain], [loaded]).slots())
        assert {
            key.removeprefix("param_groups.").removesuffix(".lr") for key in states[0] if key.endswith(".lr")
        } == names


@on_two_ranks
def test_fsdp1_without_a_mesh_is_refused_with_the_fix(rank: int, tmp_path: Path) -> None:
    inner = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    for model, which in ((inner, "the model"), (torch.nn.Sequential(torch.nn.Identity(), inner), "1")):
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ConfigError, match=rf"model: {which} is .* without a device mesh.*Pass device_mesh=init"):
            managed(tmp_path, model, optimizer)


def sharded() -> Net:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


@on_two_ranks
def test_a_load_creates_state_sharded_like_its_parameter_and_only_where_the_checkpoint_has_it(
    rank: int, tmp_path: Path
) -> None:
    model = sharded()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    for parameter in (*model.first.parameters(), *model.second.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_and_close(managed(tmp_path, model, optimizer))
    again = sharded()
    other = torch.optim.NAdam(again.parameters(), lr=0.1)
    load_and_close(managed(tmp_path, again, other))
    assert not other.state.get(again.late.weight) and not optimizer.state.get(model.late.weight)
    state = other.state[again.first.weight]
    assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == again.first.weight.placements
    assert not isinstance(state["step"], DTensor) and state["mu_product"].shape == ()
    for mine, saved in zip(state_of(other), state_of(optimizer), strict=True):
        assert same(whole(mine), whole(saved))


@on_two_ranks
def test_state_of_another_shape_than_its_parameter_is_sharded_as_it_was(rank: int, tmp_path: Path) -> None:
    def run() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, RowSums(model.parameters())

    model, optimizer = run()
    for at, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    save_and_close(managed(tmp_path, model, optimizer))
    again, other = run()
    load_and_close(managed(tmp_path, again, other))
    for mine, saved in zip(again.parameters(), model.parameters(), strict=True):
        rows, expected = other.state[mine]["rows"], optimizer.state[saved]["rows"]
        assert isinstance(rows, DTensor) and rows.placements == expected.placements
        assert torch.equal(rows.full_tensor(), expected.full_tensor())


@on_two_ranks
def test_state_of_one_rank_that_is_not_a_dtensor_is_refused_at_the_save_by_name(rank: int, tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.first.weight]["local"] = torch.zeros_like(model.first.weight.to_local())
    with (
        managed(tmp_path, model, optimizer) as manager,
        pytest.raises(
            (SaveFailed, TypeError), match=r"state\.first\.weight\.local is a plain tensor (.|\n)*zeros_like"
        ),
    ):
        manager.save(1, force=True)


@on_two_ranks
def test_under_ddp_hooks_and_extra_state_have_the_plain_names_and_come_back(rank: int, tmp_path: Path) -> None:
    def run(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = DistributedDataParallel(nn.ModuleDict({"qkv": FusedQkv(), "scaled": ScaledLinear("tensor")}))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = run(0)
    model.module["scaled"].scales = torch.ones(4)
    save_and_close(managed(tmp_path, model, optimizer))
    assert "qkv.q.weight" in ModelWrapper(model).state_dict()
    again, other = run(1)
    load_and_close(managed(tmp_path, again, other))
    assert torch.equal(again.module["qkv"].weight, model.module["qkv"].weight)
    assert torch.equal(again.module["scaled"].scales, torch.ones(4))


@on_two_ranks
def test_a_load_hook_that_raises_on_one_rank_raises_on_both(rank: int, tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_and_close(managed(tmp_path, model, optimizer))

    def refuse(*_: Any) -> None:
        if rank == 1:
            raise ValueError("rank 1 does not take it")

    model.register_load_state_dict_pre_hook(refuse)
    with managed(tmp_path, model, optimizer) as manager, pytest.raises(ValueError, match="rank 1 does not take it"):
        manager.load()


@on_two_ranks
def test_partial_sums_are_refused_by_name(rank: int, tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = model.first.weight.device_mesh
    optimizer.state[model.first.weight]["sum"] = DTensor.from_local(torch.ones(7, 5), mesh, [Partial()])
    with managed(tmp_path, model, optimizer) as manager, pytest.raises((SaveFailed, TypeError), match="partial sums"):
        manager.save(1, force=True)


@on_two_ranks
def test_a_state_dict_of_another_form_is_refused_where_each_rank_has_a_stage_of_its_own(
    rank: int, tmp_path: Path
) -> None:
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    optimizer = OwnForm(stage.parameters(), lr=0.1)
    with managed(tmp_path, stage, optimizer) as manager, pytest.raises(ConfigError, match="no rank's state dict would"):
        manager.load()
    whole_model = nn.Linear(2, 2)
    with managed(tmp_path, whole_model, OwnForm(whole_model.parameters(), lr=0.1)) as manager:
        assert manager.save(1, force=True)
        assert manager.load()
