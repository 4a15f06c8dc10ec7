"""Small runs that are saved hundreds of times: two layers, which are sharded (FSDP2) where there is a group of ranks.

It is the same run on two ranks and in one process without a process group: the same initial parameters, and at each
step every rank takes its own part of the same batch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.savers import TIMEOUT_SECONDS, Lent, ObservedSaver
from tests.checkpoint.small_run import SmallRun, job_config
from tests.ranks import LASTING
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver, Saver, build_saver
from torchtitan_lite.checkpoint.schedule.interval import AnyOf, AtStep, SavePolicy
from torchtitan_lite.distributed.peers import Peers


def sharded_run(
    folder: Path,
    *,
    width: int = 7,
    saver: Saver | None = None,
    seams: Mapping[str, Any] | None = None,
    **options: Any,
) -> SmallRun:
    """Return a run whose `saver` is observed, with the real clock; `options` as of `SmallRun`."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    if dist.is_initialized():
        fully_shard(model, mesh=_mesh())
    observed = ObservedSaver(saver or _saver(options.get("async_mode", "disabled")))
    seams = {"clock": time.monotonic, "saver": observed, **(seams or {})}
    return SmallRun(folder, model=model, loss=_loss_of_ranks, seams=seams, **options)


def run_with(fault: str, rank: int, folder: Path, mode: str, **options: Any) -> SmallRun:
    """Return a run in which `fault` happens; saves are due at steps 1, 2 and 5 unless `options` say otherwise."""
    run = sharded_run(folder, async_mode=mode, **{"seams": {"save_policy": at_steps(1, 2, 5)}, **options})
    faults.install(fault, rank=rank)
    inner: Any = run.saver.inner
    writer = getattr(getattr(inner, "_saver", inner), "process", None)
    if writer is not None:
        writer.close()  # The next one starts with the fault.
    return run


def train_over_a_failure(run: SmallRun) -> None:
    """Train to step 6, with a failure of step 2: it leaves nothing behind and does not touch step 1."""
    with run.manager:
        run.train(1, last=False)
        run.saver.wait()
        before = digests(run.root / "step-1")
        run.train(2, last=False)
        run.saver.wait()
        run.train(4, last=False)
        assert run.names() == ["step-1"], "no staging is left"
        run.train(6, last=False)
        assert digests(run.root / "step-1") == before


def assert_one_failure(run: SmallRun, *reasons: str) -> None:
    """Assert that step 2 failed for `reasons`, that both ranks noticed in the same step, and that step 5 was saved."""
    [(step, noticed, figures)] = run.events.happened("save_failed")
    assert step == 2
    assert noticed in (3, 4)
    assert all(reason in figures["reason"] for reason in reasons), (reasons, figures["reason"])
    assert same_everywhere([noticed, figures["reason"]])
    assert run.names() == ["step-1", "step-5"]


def at_steps(*steps: int) -> SavePolicy:
    """Return a policy that saves at these steps."""
    return AnyOf(tuple(AtStep(step) for step in steps))


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in `folder`."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def same_everywhere(value: Any) -> bool:
    """Return whether all ranks passed the same plain value. **Collective**."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def _loss_of_ranks(run: SmallRun) -> Tensor:
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(run.train_state.step))
    mine = batch.chunk(2)[dist.get_rank()] if dist.is_initialized() else batch
    loss: Tensor = run.model(mine).square().mean()
    return loss


def _saver(mode: str) -> Saver:
    if mode == "async_with_pinned_mem":
        return _kept_process_saver()
    return build_saver(job_config(Path(), async_mode=mode).checkpoint, _peers())


@cache
def _kept_process_saver() -> Saver:
    # A writer process takes seconds to start, so the cases share one.
    peers = _peers()
    LASTING.append(peers)
    return Lent(ProcessSaver(peers, TIMEOUT_SECONDS))


def _peers() -> Peers:
    return Peers(timedelta(seconds=TIMEOUT_SECONDS))


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))
