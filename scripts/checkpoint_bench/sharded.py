"""The workload of several ranks: an FSDP2 state that all ranks save and load together; and the bytes of each rank.

Every rank measures its own time from a barrier on; the slowest rank counts.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint_bench import apart, disk
from checkpoint_bench.apart import Job
from checkpoint_bench.contenders import Contender, Dcp, RawDisk
from checkpoint_bench.machine import spending
from checkpoint_bench.ours import Ours
from checkpoint_bench.samples import Samples
from checkpoint_bench.states import BenchState, filled, llama_args
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.store import layout

MESHES: dict[str, tuple[int, int]] = {"fsdp2": (1, 2), "ddp": (2, 1), "hsdp": (2, 2)}
"""(Number of replicas, ranks that share a replica), by name."""


def measure(job: Job, samples: Samples) -> None:
    """Add to `samples` the measurements of the ranks of `job`: of each figure that of the slowest rank."""
    replicate, shard = MESHES[job["mesh"]]
    world = replicate * shard
    with tempfile.TemporaryDirectory(dir=job["folder"]) as folder:
        shared = str(Path(folder, "shared"))
        Path(shared).mkdir()
        jobs = [
            job | {"rank": rank, "world": world, "folder": shared, "answer": str(Path(folder, f"answer{rank}.json"))}
            for rank in range(world)
        ]
        processes = [apart.start(each) for each in jobs]
        try:
            answers = [apart.finish(process, each) for process, each in zip(processes, jobs, strict=True)]
        finally:
            for process in processes:
                process.kill()
    for of_all in zip(*answers, strict=True):
        slowest = max(of_all, key=lambda sample: float(sample["value"]))
        samples.extend([slowest])


def serve(job: Job, samples: Samples) -> None:
    """Measure, in each child process, this rank's times, or on rank 0 the bytes that all ranks wrote."""
    with _group(job):
        state = _state(job["params"], *MESHES[job["mesh"]])
        contenders: list[Contender] = [Ours(), Dcp()]
        if job["kind"] == "bytes":
            for contender in contenders:
                _note_bytes(contender, state, job, samples)
            return
        buffer = disk.Touched(state.num_bytes)
        target = state.like()
        if disk.takes_direct(_own(job)):
            contenders.append(_RawShare(buffer, job["rank"]))
        for number in range(job["rounds"]):
            random.Random(number).shuffle(contenders)
            for contender in contenders:
                _measure_one(contender, state, target, number, job, samples)


class _RawShare(RawDisk):
    """The raw disk, with a file for each rank."""

    def __init__(self, buffer: disk.Touched, rank: int) -> None:
        super().__init__(buffer)
        self._rank = rank

    def save(self, state: BenchState, folder: Path) -> None:
        own = folder / str(self._rank)
        own.mkdir()
        super().save(state, own)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        super().load(target, folder / str(self._rank), warm=warm)


def _measure_one(
    contender: Contender, state: BenchState, target: BenchState, number: int, job: Job, samples: Samples
) -> None:
    def note(figure: str, value: float) -> None:
        samples.add(job["workload"], contender.name, figure, number, value)

    folder = Path(job["folder"], "checkpoint")
    _once(job, folder.mkdir)
    with spending() as spent:
        contender.save(state, folder)
    note("save_seconds", spent.seconds)
    note("save_cpu_seconds", spent.cpu_seconds)
    for kind, make_so in (("cold", disk.make_cold), ("warm", disk.make_warm)):
        target.clear()
        _once(job, partial(make_so, folder))
        with spending() as spent:
            contender.load(target, folder, warm=kind == "warm")
        note(f"{kind}_load_seconds", spent.seconds)
        note(f"{kind}_load_cpu_seconds", spent.cpu_seconds)
        if number == 0 and not isinstance(contender, RawDisk):
            state.assert_equals(target, f"{contender.name}, {kind}, rank {job['rank']}")
    _once(job, partial(disk.remove, folder))


def _note_bytes(contender: Contender, state: BenchState, job: Job, samples: Samples) -> None:
    folder = Path(job["folder"], "checkpoint")
    _once(job, folder.mkdir)
    contender.save(state, folder)
    dist.barrier()
    written = [0] * job["world"]
    for path in disk.files(folder):
        if layout.is_data_file(path.name):
            written[int(path.name.split("_")[2])] += path.stat().st_size
    unique = sum(tensor.numel() * tensor.element_size() for tensor in _whole(state))
    samples.add(job["workload"], contender.name, "written_to_unique_ratio", 0, sum(written) / unique)
    samples.add(job["workload"], contender.name, "max_to_mean_ratio", 0, max(written) * len(written) / sum(written))
    _once(job, partial(disk.remove, folder))


def _whole(state: BenchState) -> Iterator[torch.Tensor]:
    """Return each tensor in its global shape."""
    yield from state.model.values()
    yield from state.optimizer.values()


def _once(job: Job, action: Callable[[], object]) -> None:
    """Run `action` on rank 0, then let all ranks continue. **Collective**."""
    dist.barrier()
    if job["rank"] == 0:
        action()
    dist.barrier()


@contextmanager
def _group(job: Job) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['folder']}/rendezvous",
        rank=job["rank"],
        world_size=job["world"],
        timeout=timedelta(seconds=600),
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _own(job: Job) -> Path:
    folder = Path(job["folder"], f"rank{job['rank']}")
    folder.mkdir(exist_ok=True)
    return folder


def _state(num_params: int, replicate: int, shard: int) -> BenchState:
    """Return a llama and its AdamW state, sharded over all ranks."""
    with torch.device("meta"):
        model = Transformer(llama_args(num_params))
    if shard > 1:
        names = ("replicate", "shard") if replicate > 1 else ("shard",)
        shape = (replicate, shard) if replicate > 1 else (shard,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model.layers.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    parameters: dict[str, Any] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    optimizer = {}
    for name, parameter in parameters.items():
        optimizer[f"state.{name}.step"] = torch.tensor(7.0)
        optimizer[f"state.{name}.exp_avg"] = torch.empty_like(parameter)
        optimizer[f"state.{name}.exp_avg_sq"] = torch.empty_like(parameter)
    # Replicas must be equal, so the coordinates within the sharding are the seed.
    return filled(BenchState(parameters, optimizer), seed=dist.get_rank() % shard)
