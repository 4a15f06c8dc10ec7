"""The process group: ranks, devices, and an orderly end.

Under torchrun the environment gives the rank. Without it there is one process with a process group of its own, so that
all code after this works the same for one rank as for many. At the end all ranks meet before the groups are destroyed,
because a rank that leaves early aborts the others; except after an error, when the others may be gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # not listed as exported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.distributed.environment import Launched, launched, logged_environment, set_default
from torchtitan_lite.distributed.groups import if_overdue
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import register_fake_backend, set_timeout

DESTROY_SECONDS = 20.0
"""How long destroying the groups may take after an error before the process exits regardless."""


@dataclass(frozen=True)
class World:
    """The place of this rank: `rank` of `world_size`, and its `device`."""

    rank: int
    world_size: int
    device: torch.device
    is_simulated: bool = False
    """Whether the other ranks do not exist (`comm.simulated_ranks`)."""


@contextmanager
def process_group(config: Comm, *, deterministic: bool = False) -> Iterator[World]:
    """Open the default process group for the block, and close it after. **Collective**."""
    if deterministic:
        _require_determinism()
    world = _open_world(config)
    logger.info("Environment: %s", logged_environment())
    try:
        yield world
        dist.barrier()
    except BaseException:
        with if_overdue(DESTROY_SECONDS, _exit_at_once):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def close_process_group() -> None:
    """Close the default process group, if there is one, once all ranks are here. **Collective**."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def shorten_timeouts(mesh: DeviceMesh, config: Comm) -> None:
    """Set the time-out of training collectives, on all groups of `mesh`, to `train_timeout_seconds`.

    Call it after the first step. **Collective**.
    """
    # The short time-out must not hit a rank that is still in its first step.
    dist.barrier()
    for group in (None, *mesh.get_all_groups()):
        set_timeout(group, timedelta(seconds=config.train_timeout_seconds))


def _open_world(config: Comm) -> World:
    place = launched()
    if config.simulated_ranks:
        return _open_simulated(config.simulated_ranks, place)
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        set_default("TORCH_FR_BUFFER_SIZE", str(config.trace_buf_size))
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.init_timeout_seconds),
        rank=place.rank,
        world_size=place.world_size,
        store=_meeting_place(place),
    )
    return World(place.rank, place.world_size, device)


def _open_simulated(num_ranks: int, place: Launched) -> World:
    if place.world_size > 1:
        raise ConfigError(
            f"comm.simulated_ranks: expected one process, found {place.world_size}. "
            "Run python train.py without torchrun; the process acts as rank 0."
        )
    init_simulated_ranks(num_ranks)
    return World(0, num_ranks, torch.device("cpu"), is_simulated=True)


def init_simulated_ranks(num_ranks: int) -> None:
    """Open a default process group in which this process is rank 0 of `num_ranks`, for a dry run.

    torch's fake process group carries no data: a mesh over it has all ranks, and modules are sharded over it as they
    would be, but whatever a collective returns is arbitrary. So nothing may depend on a result of one: checkpoint code
    agrees through `Peers` that are alone, and a dry run computes nothing.
    """
    register_fake_backend()
    dist.init_process_group(backend="fake", rank=0, world_size=num_ranks, store=HashStore())


def _meeting_place(place: Launched) -> Store:
    if not place.by_launcher:
        return HashStore()
    store, _, _ = next(iter(rendezvous("env://", place.rank, place.world_size)))
    # torchrun keeps its store when it restarts the workers, with the addresses of the old workers in it. With torch
    # 2.13 the new workers tried to connect to these and gave up.
    return PrefixStore(f"attempt_{place.attempt}", store)


def _require_determinism() -> None:
    # cuBLAS reads this when it creates its first handle, so set it before any work on the device.
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _exit_at_once() -> None:
    logger.error("Could not destroy the process group within %.0f s; exiting", DESTROY_SECONDS)
    os._exit(1)
