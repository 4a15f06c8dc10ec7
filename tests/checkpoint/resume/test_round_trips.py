"""A load returns what was saved, bit for bit, whether plain DCP or this package saves or loads.

The tensors are of every dtype in every layout; the topologies are all that one mesh can be saved on and
another loaded on, uneven and empty shards among them. How many tensors went round is printed and counted.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.reading.foreign_folders import state_of
from tests.checkpoint.reading.tensor_layouts import bits, every_tensor, random_bits, zeros, zeros_like
from tests.checkpoint.small_run import target
from tests.forked import join_group
from tests.ranks import Ranks
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver, Saver, SyncSaver, ThreadSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

NEWER_DTYPES = [name for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if name in DTYPES]
NUM_TENSORS = 369 + 18 * len(NEWER_DTYPES)
"""20 dtypes, or more where torch has them, in 16 to 23 layouts each."""
PEERS_TIMEOUT = timedelta(seconds=60)


def differing(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in dtype, shape or bits."""
    return [
        name
        for name, tensor in expected.items()
        if (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape) or bits(found[name]) != bits(tensor)
    ]


class RoundTrips:
    """Counts tensors, and records which were not exact."""

    def __init__(self) -> None:
        self.count = 0

    def check(self, found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
        assert differing(found, expected) == []
        self.count += len(expected)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return every_tensor()


def contiguous_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: zeros(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def zeros_alike(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: zeros_like(tensor) for name, tensor in tensors.items()}


def save_with(saver: Saver, folder: Path, state: dict[str, Any]) -> Path:
    """Save a checkpoint with this package into `folder`; return its path. Collective."""
    store = CheckpointStore(folder)
    saver.save(state, target(store, 1)).durable.result()
    return folder / "step-1"


def save_stock(path: Path, state: dict[str, Any]) -> Path:
    dcp_save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(params=["sync", "thread", "process"])
def saver(request: pytest.FixtureRequest, process_saver: ProcessSaver) -> Iterator[Saver]:
    """Yield each kind of saver in turn."""
    if request.param == "process":
        yield process_saver
        return
    own: Saver = (SyncSaver if request.param == "sync" else ThreadSaver)(Peers(PEERS_TIMEOUT))
    yield own
    own.close(60)


def test_ours_is_read_by_plain_dcp(tensors: dict[str, Tensor], saver: Saver, tmp_path: Path) -> None:
    path, trips = save_with(saver, tmp_path, {"model": tensors}), RoundTrips()
    for found in contiguous_zeros(tensors), zeros_alike(tensors):
        dcp_load({"model": found}, storage_reader=FileSystemReader(path), no_dist=True)
        trips.check(found, tensors)
    trips.check(as_one_file(path)["model"], tensors)
    print(f"ours -> plain DCP: {trips.count} tensors equal")
    assert trips.count == 3 * NUM_TENSORS


def test_ours_is_read_by_ours(tensors: dict[str, Tensor], saver: Saver, tmp_path: Path) -> None:
    count = _read_by_ours(save_with(saver, tmp_path, {"model": tensors}), tensors)
    print(f"ours -> ours: {count} tensors equal")
    assert count == 4 * NUM_TENSORS


def test_a_plain_dcp_checkpoint_is_read_by_ours(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    count = _read_by_ours(save_stock(tmp_path / "stock", {"model": tensors}), tensors)
    print(f"plain DCP -> ours: {count} tensors equal")
    assert count == 4 * NUM_TENSORS


def _read_by_ours(path: Path, tensors: dict[str, Tensor]) -> int:
    """Return how many tensors of the checkpoint at `path` were equal, read in both ways into both kinds of memory."""
    trips = RoundTrips()
    for make in contiguous_zeros, zeros_alike:
        found = make(tensors)
        dcp_load({"model": found}, storage_reader=CheckpointReader(path), no_dist=True)
        trips.check(found, tensors)
        found = make(tensors)
        StoredCheckpoint(path, Peers(PEERS_TIMEOUT)).read_model(found)
        trips.check(found, tensors)
    return trips.count


class Bag:
    """A state of only tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensors = state_dict["tensors"]


def test_a_manager_loads_every_tensor_of_a_state_that_it_saved(
    tensors: dict[str, Tensor], start_run: StartRun, mode: str
) -> None:
    trips = RoundTrips()
    start_run(states={"bag": Bag(tensors)}, async_mode=mode).finished(1)
    bag = Bag({})
    start_run(states={"bag": bag}, seed=1).resumed()
    trips.check(bag.tensors, tensors)
    print(f"manager, {mode} -> manager: {trips.count} tensors equal")
    assert trips.count == NUM_TENSORS


def test_a_manager_loads_every_tensor_of_a_step_that_plain_dcp_saved(
    tensors: dict[str, Tensor], start_run: StartRun
) -> None:
    trips = RoundTrips()
    run = start_run(states={"bag": Bag(tensors)})
    run.train(2, last=False)
    run.train_state.step = 7
    save_stock(run.root / "step-7", {**state_of(run), "bag": {"tensors": tensors}})
    bag = Bag({})
    again = start_run(states={"bag": bag}, seed=1, load_step=7).resumed()
    trips.check(bag.tensors, tensors)
    trips.check(again.model.state_dict(), run.model.state_dict())
    print(f"plain DCP -> manager: {trips.count} tensors equal")
    assert trips.count == NUM_TENSORS + len(run.model.state_dict())


class Topology(NamedTuple):
    """A mesh of ranks, and the placement of a tensor on it."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    fsdp: bool = False
    """Return whether FSDP2 can shard a module like this."""

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.mesh).numel()


TOPOLOGIES = {
    "1 rank": Topology((), ()),
    "2 x Shard(0)": Topology((2,), (Shard(0),), fsdp=True),
    "2 x Shard(1)": Topology((2,), (Shard(1),), fsdp=True),
    "2 x Replicate": Topology((2,), (Replicate(),)),
    "4 x Shard(0)": Topology((4,), (Shard(0),), fsdp=True),
    "1 x 4 HSDP": Topology((1, 4), (Replicate(), Shard(0)), fsdp=True),
    "2 x 2 HSDP": Topology((2, 2), (Replicate(), Shard(0)), fsdp=True),
    "2 x 2 Shard(0) x Shard(1)": Topology((2, 2), (Shard(0), Shard(1))),
    "2 x 2 Shard(0) x Shard(0)": Topology((2, 2), (Shard(0), Shard(0))),
}
SHAPES = ((8, 4), (7, 5), (1, 6), (5, 1), (3,), (2, 3, 5), (), (0, 3))
"""Sizes that divide evenly, unevenly, so that some ranks have nothing, and of no elements."""
PAIRS_OF_THE_FAST_RUN = [("2 x Shard(0)", "2 x 2 HSDP"), ("2 x 2 HSDP", "2 x Shard(1)")]
WAYS = ("ours -> plain DCP", "ours -> ours", "ours -> ours, DCP's planner", "plain DCP -> ours")
NUM_SHARDED = len(DTYPES) * len(SHAPES) + 2


@pytest.mark.slow
def test_a_few_topologies_are_loaded_on_others(four_processes: Ranks, tmp_path: Path) -> None:
    _check_pairs(PAIRS_OF_THE_FAST_RUN, four_processes, tmp_path)


@pytest.mark.slow
def test_every_topology_is_loaded_on_another_one(four_processes: Ranks, tmp_path: Path) -> None:
    names = list(TOPOLOGIES)
    pairs = [(saver, names[(at + 1) % len(names)]) for at, saver in enumerate(names)]
    _check_pairs(pairs, four_processes, tmp_path)


@pytest.mark.exhaustive
def test_every_topology_is_loaded_on_every_topology(four_processes: Ranks, tmp_path: Path) -> None:
    _check_pairs(list(itertools.product(TOPOLOGIES, TOPOLOGIES)), four_processes, tmp_path)


def _check_pairs(pairs: Sequence[tuple[str, str]], ranks: Ranks, folder: Path) -> None:
    folders = {saver: folder / str(number) for number, saver in enumerate(dict(pairs))}
    for saver, own in folders.items():
        ranks.run(save_on, folder=own, topology=saver)
    count = 0
    for number, loader in enumerate(dict.fromkeys(loader for _, loader in pairs)):
        saved = [folders[saver] for saver, onto in pairs if onto == loader]
        rendezvous = folder / f"{number}.rendezvous"
        count += ranks.run(load_on, rendezvous=rendezvous, saved=saved, topology=loader)[0]
    print(f"{len(pairs)} pairs of topologies, {len(WAYS)} ways: {count} tensors equal")
    assert count == len(pairs) * len(WAYS) * NUM_SHARDED


def save_on(rank: int, folder: Path, topology: str) -> None:
    """Save the same tensors on `topology`, with this package and with plain DCP."""
    folder.mkdir(exist_ok=True)
    with joined(rank, folder / "rendezvous", topology) as is_in:
        if is_in:
            state = {"model": sharded(TOPOLOGIES[topology], filled=True)}
            save_with(SyncSaver(Peers(PEERS_TIMEOUT)), folder / "ours", state)
            dcp_save(state, checkpoint_id=folder / "stock")


def load_on(rank: int, rendezvous: Path, saved: list[Path], topology: str) -> int:
    """Return how many tensors of the checkpoints in `saved` were equal on `topology`, on each of its ranks."""
    count = 0
    with joined(rank, rendezvous, topology) as is_in:
        if is_in:
            for folder in saved:
                count += sum(_loaded(folder, way, TOPOLOGIES[topology]) for way in WAYS)
    return count


def _loaded(folder: Path, way: str, topology: Topology) -> int:
    found = sharded(topology, filled=False)
    path = folder / "stock" if way.startswith("plain DCP") else folder / "ours" / "step-1"
    if way == "ours -> plain DCP":
        dcp_load({"model": found}, storage_reader=FileSystemReader(path))
    elif way.endswith("DCP's planner"):
        dcp_load({"model": found}, storage_reader=CheckpointReader(path))
    else:
        StoredCheckpoint(path, Peers(PEERS_TIMEOUT)).read_model(found)
    wrong = [
        name for name, full in full_tensors().items() if bits(_local(found[name])) != bits(_part(full, found[name]))
    ]
    assert wrong == [], (way, folder, topology)
    return len(found)


@contextmanager
def joined(rank: int, rendezvous: Path, topology: str) -> Iterator[bool]:
    """Yield whether this rank is one of the topology's; if so, a group of these ranks exists."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    num_ranks = TOPOLOGIES[topology].num_ranks
    if rank >= num_ranks:
        yield False
        return
    join_group(rank, num_ranks, rendezvous)
    try:
        yield True
        dist.barrier()
    finally:
        dist.destroy_process_group()


@cache
def full_tensors() -> dict[str, Tensor]:
    """Return the full tensors, of which each topology has parts; do not change them."""
    tensors = {
        f"{name}.{number}": random_bits(dtype, shape, seed=number)
        for name, dtype in DTYPES.items()
        for number, shape in enumerate(SHAPES)
    }
    module = _module()
    return tensors | {"fsdp.weight": module.weight.detach(), "fsdp.bias": module.bias.detach()}


def sharded(topology: Topology, *, filled: bool) -> dict[str, Tensor]:
    """Return the tensors as they lie on `topology`, with their elements or with zeros. Collective."""
    tensors = full_tensors()
    if not filled:
        tensors = {name: zeros(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if not topology.mesh:
        return tensors
    mesh = init_device_mesh("cpu", topology.mesh, mesh_dim_names=("a", "b")[: len(topology.mesh)])
    found: dict[str, Tensor] = {
        name: _distributed(tensor, mesh, topology.placements) for name, tensor in tensors.items()
    }
    if topology.fsdp:
        module = _module()
        with torch.no_grad():
            module.weight.copy_(tensors["fsdp.weight"])
            module.bias.copy_(tensors["fsdp.bias"])
        across = Shard(1) in topology.placements
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if across and p.dim() > 1 else None)
        found |= {"fsdp.weight": module.weight, "fsdp.bias": module.bias}
    return found


def _module() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 5)


def _distributed(full: Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    possible = [_possible(placement, full.dim()) for placement in placements]
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, possible)
    local = _cut(full, offset, shape).clone()
    return DTensor.from_local(local, mesh, possible, run_check=False, shape=full.shape, stride=full.stride())


def _possible(placement: Placement, num_dims: int) -> Placement:
    if not isinstance(placement, Shard) or placement.dim < num_dims:
        return placement
    return Shard(0) if num_dims else Replicate()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part(full: Tensor, tensor: Tensor) -> Tensor:
    """Return the part of `full` that this rank has in `tensor`."""
    if not isinstance(tensor, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(full.shape, tensor.device_mesh, tensor.placements)
    return _cut(full, offset, shape)


def _cut(full: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (begin, size) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, min(begin, full.size(dim)), size)
    return full
