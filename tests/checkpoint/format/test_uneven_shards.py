"""Tensor parallelism and FSDP2 over sizes that do not divide: every topology loads what 3 x 2 ranks saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.small_run import job_config
from tests.examples import mostly_exhaustive
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.resume.restore import verify
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch, SaveFailed

SIZES = (7, 9, 13, 17, 33, 97, 105, 1)
Mesh = tuple[tuple[int, ...], tuple[str, ...]]
MESHES: dict[str, Mesh] = {
    "FSDP 3 x TP 2": ((3, 2), ("dp", "tp")),
    "TP 2 x FSDP 3": ((2, 3), ("tp", "dp")),
    "FSDP 2 x TP 3": ((2, 3), ("dp", "tp")),
    "FSDP 6": ((6,), ("dp",)),
    "TP 6": ((6,), ("tp",)),
}


class Uneven(nn.Module):
    """A table for each size, and one more that tensor parallelism cuts by columns."""

    def __init__(self) -> None:
        super().__init__()
        for size in SIZES:
            self.register_parameter(f"of_{size}", nn.Parameter(torch.zeros(size, 2)))
        self.columns = nn.Parameter(torch.zeros(13, 7))


def values(name: str, shape: Sequence[int], of: int) -> Tensor:
    """Return the whole tensor `name`; `of` is 0 for the parameter, 1 and 2 for its moments."""
    numel = torch.Size(shape).numel()
    return torch.arange(1.0, numel + 1).view(*shape) + 1000.0 * of + len(name)


def on_mesh(mesh: Mesh | None) -> DeviceMesh | None:
    return mesh and init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1])


def tp_dim(name: str) -> int:
    return 1 if name == "columns" else 0


def shard(model: Uneven, devices: DeviceMesh) -> None:
    """Shard `model` as parallelize_module and fully_shard do. **Collective**."""
    axes = devices.mesh_dim_names or ()
    for name, parameter in list(model.named_parameters()) if "tp" in axes else []:
        cut = distribute_tensor(parameter.detach(), devices["tp"], [Shard(tp_dim(name))])
        setattr(model, name, nn.Parameter(cut))
    if "dp" in axes:
        fully_shard(model, mesh=devices["dp"])


def mine(name: str, whole: Tensor, devices: DeviceMesh | None) -> Tensor:
    """Return this rank's shard of `whole`, cut by torch.chunk: tensor parallelism first, then FSDP."""
    axes = (devices.mesh_dim_names or ()) if devices else ()
    for axis, dim in (("tp", tp_dim(name)), ("dp", 0)):
        if devices is not None and axis in axes:
            chunks, index = whole.chunk(devices[axis].size(), dim), devices[axis].get_local_rank()
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Run:
    """The model on `mesh` with AdamW, and its manager."""

    def __init__(self, folder: Path, mesh: Mesh | None, **checkpoint: Any) -> None:
        self.devices = on_mesh(mesh)
        self.model = Uneven()
        if self.devices is not None:
            shard(self.model, self.devices)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        states = {"train_state": TrainState()}
        config = job_config(folder, **checkpoint)
        self.manager = CheckpointManager(None, [self.model], [self.optimizer], [], states, config)

    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the memory of each tensor and the values that belong there."""
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            for of, tensor in enumerate((parameter, state["exp_avg"], state["exp_avg_sq"])):
                whole = values(name, parameter.shape, of)
                yield local(tensor.detach()), mine(name, whole, self.devices)

    def fill(self) -> None:
        for memory, expected in self.tensors():
            memory.copy_(expected)

    def is_filled(self) -> bool:
        return all(torch.equal(memory, expected) for memory, expected in self.tensors())


def save_case(rank: int, folder: Path, mesh: str, mode: str) -> None:
    run = Run(folder, MESHES[mesh], digest_tensors=("save",), async_mode=mode, interval=1)
    with run.manager:
        run.manager.load()
        run.fill()
        assert run.manager.save(1, force=mode == "disabled")
    assert run.is_filled()


def load_case(rank: int, folder: Path, mesh: str) -> bool:
    """Load on `mesh`, and return whether every tensor has its values afterwards."""
    run = Run(folder, MESHES[mesh], digest_tensors=("load",), load_only=True)
    assert not run.is_filled()
    load_and_close(run.manager)
    return run.is_filled()


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[Ranks]:
    ranks = Ranks(6, deadline_seconds=240)
    yield ranks
    ranks.close()


@pytest.mark.slow  # Six processes on a machine with two cores take a minute to start and to load everything.
@pytest.mark.parametrize(
    "saver", mostly_exhaustive(["FSDP 3 x TP 2", "TP 2 x FSDP 3", "FSDP 2 x TP 3"], kept=("FSDP 2 x TP 3",))
)
def test_what_uneven_shards_save_every_topology_loads(six_ranks: Ranks, tmp_path: Path, saver: str) -> None:
    six_ranks.run(save_case, folder=tmp_path, mesh=saver, mode="disabled")
    model = Uneven()
    path = tmp_path / "checkpoint" / "step-1"
    StoredCheckpoint(path, Peers(timedelta(seconds=60))).read_model(model.state_dict())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values(name, parameter.shape, 0)), name
    alone = Run(tmp_path, None, digest_tensors=("load",), load_only=True)
    load_and_close(alone.manager)
    assert alone.is_filled()
    for loader in MESHES:
        assert six_ranks.run(load_case, folder=tmp_path, mesh=loader) == [True] * 6, loader


@pytest.mark.slow  # As above.
@pytest.mark.parametrize("mode", mostly_exhaustive(["async", "async_with_pinned_mem"], kept=["async"]))
def test_uneven_shards_are_staged_completely(six_ranks: Ranks, tmp_path: Path, mode: str) -> None:
    six_ranks.run(save_case, folder=tmp_path, mesh="FSDP 3 x TP 2", mode=mode)
    assert six_ranks.run(load_case, folder=tmp_path, mesh="FSDP 3 x TP 2") == [True] * 6


def misplaced(rank: int, rows: int = 2) -> DTensor:
    """Return a tensor of six rows on two ranks; the second rank has `rows` of them in memory."""
    mesh = init_device_mesh("cpu", (2,))
    memory = torch.ones(rows if rank else 3, 2)
    return DTensor.from_local(memory, mesh, [Shard(0)], run_check=False, shape=(6, 2), stride=(2, 1))


class OneTensor(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def manager_of(model: nn.Module, folder: Path, **checkpoint: Any) -> CheckpointManager:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CheckpointManager(
        None, [model], [optimizer], [], {"train_state": TrainState()}, job_config(folder, **checkpoint)
    )


@on_two_ranks
def test_a_tensor_that_is_not_what_its_placement_says_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    found = r"model\.weight: the rank at \[1\].* has \[2, 2\] in memory"
    with manager_of(OneTensor(misplaced(rank)), tmp_path) as manager, pytest.raises(SaveFailed, match=found):
        manager.save(1, force=True)
    good = OneTensor(distribute_tensor(torch.ones(6, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))
    with manager_of(good, tmp_path) as manager:
        assert manager.save(1, force=True)
    for strictness in ("error", "ignore"):
        bad = OneTensor(misplaced(rank))
        with (
            manager_of(bad, tmp_path, load_strictness=strictness) as manager,
            pytest.raises(CheckpointMismatch, match=r"weight: the rank at \[1\].* has \[2, 2\] in memory"),
        ):
            manager.load()
        path = tmp_path / "checkpoint" / "step-1"
        with pytest.raises(CheckpointMismatch, match="weight: the rank at"):
            StoredCheckpoint(path, Peers(timedelta(seconds=30))).read_model({"weight": bad.weight.detach()})
        assert bool((local(bad.weight) == 1).all()), "no rank read anything"


@on_two_ranks
def test_what_fully_shard_makes_of_a_mesh_whose_ranks_do_not_ascend_is_refused_on_every_rank(
    rank: int, tmp_path: Path
) -> None:
    good, bad = (OneTensor(torch.arange(12.0).view(6, 2)) for _ in range(2))
    fully_shard(good, mesh=DeviceMesh("cpu", [0, 1]))
    fully_shard(bad, mesh=DeviceMesh("cpu", [1, 0]))  # Rank 0 has the first rows, and the mesh says the last.
    assert local(bad.weight.detach())[0, 0] == 6 * rank
    found = "weight: this rank is number [01] of dimension 0 of its device mesh"
    with manager_of(bad, tmp_path) as manager, pytest.raises(SaveFailed, match=found):
        manager.save(1, force=True)
    with manager_of(good, tmp_path) as manager:
        assert manager.save(1, force=True)
    with manager_of(bad, tmp_path) as manager, pytest.raises(CheckpointMismatch, match=found):
        manager.load()
    assert local(bad.weight.detach())[0, 0] == 6 * rank, "no rank read anything"


@on_two_ranks
def test_a_check_after_loading_that_fails_on_one_rank_fails_on_both(rank: int, tmp_path: Path) -> None:
    peers = Peers(timedelta(seconds=30))
    with pytest.raises(ValueError, match=r"model\.weight: the rank at \[1\].* has \[4, 2\] in memory"):
        verify("step-1", lambda: {"model": {"weight": misplaced(rank, 4)}}, {"model.weight": "0" * 32}, peers)
    assert dist.get_rank() == rank
