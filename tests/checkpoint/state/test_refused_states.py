"""States that would come back as those of another run are refused, by name, before anything is written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.small_run import job_config, same
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed


class Held:
    """A state that is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_sparse_buffer_is_called_sparse(convert: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its second layout a beta.
        model.register_buffer("graph", convert(torch.eye(3)))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with (
        managed(tmp_path, model, optimizer) as manager,
        pytest.raises(SaveFailed, match=r"graph has the layout .*sparse"),
    ):
        manager.save(1, force=True)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def sharded(**options: Any) -> tuple[nn.Module, Optimizer]:
    """Return layers that two ranks share evenly, and their optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters())


def managed(folder: Path, model: nn.Module, optimizer: Optimizer, **states: Any) -> CheckpointManager:
    return CheckpointManager(None, model, optimizer, None, states, job_config(folder, max_failed_saves=1))


def train(model: nn.Module, optimizer: Optimizer, width: int = 4) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()


@on_two_ranks
def test_sharded_tensors_in_a_tuple_are_refused(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded()
    average = Held((1, [parameter.detach().clone() for parameter in model.parameters()]))
    refused = r"average\.value is a tuple with DTensors in it(.|\n)*Return a list or a dict of them"
    with managed(tmp_path, model, optimizer, average=average) as manager, pytest.raises(SaveFailed, match=refused):
        manager.save(1, force=True)


@on_two_ranks
def test_partial_sums_are_refused_in_any_state(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded()
    sums = Held(DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()]))
    with (
        managed(tmp_path, model, optimizer, sums=sums) as manager,
        pytest.raises(SaveFailed, match=r"sums\.value is a DTensor of partial sums"),
    ):
        manager.save(1, force=True)


@on_two_ranks
def test_statistics_of_the_rows_of_one_rank_are_refused(rank: int, tmp_path: Path) -> None:
    for shape in ((2,), (3, 2, 4)):
        model, optimizer = sharded()
        optimizer.state[next(model.parameters())]["rows"] = torch.full(shape, float(rank))
        with (
            managed(tmp_path, model, optimizer) as manager,
            pytest.raises(SaveFailed, match=r"state\.0\.weight\.rows is a plain tensor of shape"),
        ):
            manager.save(1, force=True)


@on_two_ranks
def test_a_model_that_holds_whole_parameters_since_a_forward_pass_is_saved_and_loaded(
    rank: int, tmp_path: Path
) -> None:
    model, optimizer = sharded(reshard_after_forward=False)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
    save_and_close(managed(tmp_path, model, optimizer))
    again, other = sharded(reshard_after_forward=False)
    again.unshard()
    load_and_close(managed(tmp_path, again, other))
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(same(ours.to_local(), theirs.to_local()) for ours, theirs in pairs)
    train(again, other)


@on_two_ranks
def test_an_optimizer_whose_ranks_have_other_states_each_is_refused_at_construction(rank: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():  # torch's own module uses what torch has deprecated.
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(ConfigError, match=r"optimizer\[0\]: a ZeroRedundancyOptimizer .* Use fully_shard"):
        managed(tmp_path, model, optimizer)


def test_a_parameter_of_a_state_may_not_be_called_as_one_of_the_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "loss": Scaled()})
    loss = Scaled()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    refused = "states: 'loss' has the parameter 'scale', and the model has one that is called 'loss.scale'"
    with pytest.raises(ConfigError, match=refused):
        managed(tmp_path, model, optimizer, loss=loss)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_part_of_the_model_or_its_average_may_be_a_state_of_its_name(tmp_path: Path, is_copy: bool) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "loss": Scaled()})
    optimizer = torch.optim.AdamW(model.parameters())
    with managed(tmp_path, model, optimizer, loss=Scaled() if is_copy else model["loss"]) as manager:
        assert manager.save(1, force=True)
        assert manager.load()


@pytest.mark.parametrize("name", ["optimizer.state", "model.x", "rng.rank0"])
def test_a_name_that_begins_with_one_of_the_managers_own_is_refused(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=f"the name '{name}' is the manager's own, or begins with such a name"):
        managed(tmp_path, model, torch.optim.AdamW(model.parameters()), **{name: Held(1)})


def test_a_scaler_that_is_off_resumes_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    save_and_close(managed(tmp_path, model, optimizer, scaler=scaler))
    caplog.clear()
    load_and_close(managed(tmp_path, model, optimizer, scaler=scaler))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Quantized(torch.Tensor):
    """A tensor that means its elements times a scale."""

    scale = 1.0


def quantized() -> torch.Tensor:
    made = torch.ones(3).as_subclass(Quantized)
    made.scale = 0.5
    return made


def test_a_tensor_of_a_class_of_its_own_is_refused_in_a_state_and_in_an_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    refused = r"which would come back from a checkpoint as a plain tensor, without its class and attributes"
    with (
        managed(tmp_path, model, optimizer, held=Held([quantized()])) as manager,
        pytest.raises(SaveFailed, match=rf"held\.value\.0 is a \S*Quantized, {refused}"),
    ):
        manager.save(1, force=True)
    train(model, optimizer, width=2)
    optimizer.state[model.weight]["exp_avg"] = quantized()
    with (
        managed(tmp_path, model, optimizer) as manager,
        pytest.raises(SaveFailed, match=rf"optimizer\.state\.weight\.exp_avg is a \S*Quantized, {refused}"),
    ):
        manager.save(1, force=True)


def test_a_buffer_of_a_class_of_its_own_is_loaded_into_the_live_one(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("table", quantized())
        return model

    model, again = build(), build()
    model.table.fill_(7)
    save_and_close(managed(tmp_path, model, torch.optim.SGD(model.parameters())))
    load_and_close(managed(tmp_path, again, torch.optim.SGD(again.parameters())))
    assert type(again.table) is Quantized
    assert again.table.scale == 0.5
    assert again.table.tolist() == [7, 7, 7]


@pytest.mark.parametrize("within", [lambda value: value, lambda value: (value, 1)])
def test_nested_tensors_are_refused_by_name(tmp_path: Path, within: Any) -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():  # torch warns that nested tensors may change.
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with (
        managed(tmp_path, model, torch.optim.SGD(model.parameters()), held=Held(within(nested))) as manager,
        pytest.raises(SaveFailed, match=r"held\.value (is a nested tensor|holds an object that could not be loaded)"),
    ):
        manager.save(1, force=True)


def test_tensors_whose_elements_are_no_whole_bytes_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    held = Held(torch.zeros(2, dtype=torch.uint8).view(torch.uint4))
    with (
        managed(tmp_path, model, torch.optim.SGD(model.parameters()), held=held) as manager,
        pytest.raises(SaveFailed, match=r"held\.value is a tensor of torch\.uint4, which a checkpoint cannot hold"),
    ):
        manager.save(1, force=True)


def piece() -> torch.Tensor:
    """Return a plain tensor that describes itself as rows of a larger one, as a CheckpointableTensor of torch does."""
    tensor: Any = torch.ones(2, 2)
    tensor.global_shape, tensor.global_offsets = (4, 2), ((2, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((2, 2),)
    found: torch.Tensor = tensor
    return found


PIECES = r"CheckpointableTensor, the pieces at \[\(2, 0\)\] of a tensor of shape \[4, 2\](.|\n)*DTensor\.from_local"


@pytest.mark.skipif(not hasattr(torch.distributed.checkpoint, "CheckpointableTensor"), reason="torch 2.14 and later")
def test_torch_knows_a_piece_as_its_own() -> None:
    assert isinstance(piece(), torch.distributed.checkpoint.CheckpointableTensor)


def test_a_parameter_that_is_a_piece_of_a_larger_one_is_refused_at_construction(tmp_path: Path) -> None:
    """A state dict leaves out what describes it, so a save would take it for all of the tensor."""
    model: Any = nn.Linear(2, 2)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(model.weight, name, getattr(piece(), name))
    with pytest.raises(ConfigError, match=r"model: weight is a " + PIECES):
        managed(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_state_that_is_a_piece_of_a_larger_tensor_is_refused_at_the_first_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        managed(tmp_path, model, optimizer, held=Held(piece())) as manager,
        pytest.raises(SaveFailed, match=r"held\.value is a " + PIECES),
    ):
        manager.save(1, force=True)


def test_a_state_that_became_a_piece_of_a_larger_tensor_is_refused_at_the_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_and_close(managed(tmp_path, model, optimizer, held=Held(torch.ones(2, 2))))
    with (
        managed(tmp_path, model, optimizer, held=Held(piece())) as manager,
        pytest.raises(CheckpointMismatch, match=r"held\.value is a " + PIECES),
    ):
        manager.load()
