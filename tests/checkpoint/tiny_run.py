"""A run that is small enough to be saved hundreds of times: two layers, AdamW, a schedule, a counter.

It is the same run on two ranks (FSDP2) and in one process without a process group: the same initial
parameters, and at each step every rank takes its own part of the same batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.small_run import Lent, Run, job_config, same
from tests.ranks import LASTING
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave, ProcessSaver, Saver, build_saver
from torchtitan_lite.checkpoint.saving.writer import SaveTarget
from torchtitan_lite.checkpoint.schedule.interval import AnyOf, AtStep, SavePolicy
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper, Stateful
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.new_file import NewFileOnDisk
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

TIMEOUT_SECONDS = 120
"""The longest wait for a writer process, a peer or a save; on an idle machine these take no time."""


class TinyRun(Run):
    """Model, optimizer and manager. `checkpoint` are keys of that config section, `seams` keywords of the manager."""

    def __init__(
        self,
        folder: Path,
        *,
        width: int = 7,
        dataloader: Stateful | None = None,
        inner_saver: Saver | None = None,
        seams: Mapping[str, Any] | None = None,
        **checkpoint: Any,
    ) -> None:
        config = job_config(folder, **checkpoint)
        self.folder = folder / config.checkpoint.folder
        self.sharded = dist.is_initialized()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        if self.sharded:
            fully_shard(model, mesh=_mesh())
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.saver = ObservedSaver(inner_saver or _build_saver(config.checkpoint))
        observed = {"saver": self.saver, "on_event": self._on_event}
        super().__init__(model, config, dataloader=dataloader, seams={**observed, **(seams or {})})

    def step(self) -> int:
        """Take one optimizer step. Returns its number."""
        self.take_step(self._loss)
        return self.train_state.step

    def _loss(self) -> Tensor:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.train_state.step))
        mine = batch.chunk(2)[dist.get_rank()] if self.sharded else batch
        loss: Tensor = self.model(mine).square().mean()
        return loss

    def steps(self, last: int, *, force: bool = False) -> list[int]:
        """Train up to step `last` and call the manager's `save` after each step. Returns the saved steps."""
        remaining = range(self.train_state.step, last)
        return [step for _ in remaining if self.manager.save(step := self.step(), force=force and step == last)]

    def disturb(self) -> None:
        """Change every number of the run."""
        with torch.no_grad():
            for value in [*self._model().values(), *self._optimizer().values()]:
                if isinstance(value, Tensor):
                    value.add_(1)

    def contents(self) -> dict[str, Any]:
        """Return everything that a load must restore, as plain copies of whole tensors. **Collective**."""
        return {
            **{f"model.{key}": _whole(value) for key, value in self._model().items()},
            **{f"optimizer.{key}": _whole(value) for key, value in self._optimizer().items()},
            "scheduler": self.scheduler.last_epoch,
            "step": self.train_state.step,
        }

    def happened(self, event: str) -> list[tuple[int, int, dict[str, Any]]]:
        """Return for each such event its step, the step of the run when it occurred, and its figures."""
        return [(step, figures.pop("at"), figures) for name, step, figures in self.events if name == event]

    def checkpoints(self) -> list[str]:
        """Return the names in the folder, except the lease's. **Collective**.

        It waits for all ranks first, because the coordinator does more work at the end of a save.
        """
        if self.sharded:
            dist.barrier()
        return sorted(path.name for path in self.folder.iterdir() if path.name != layout.LOCK)

    def _model(self) -> dict[str, Tensor]:
        return ModelWrapper(self.model).state_dict()

    def _optimizer(self) -> dict[str, Any]:
        return OptimizerWrapper([self.model], [self.optimizer]).state_dict()

    def _on_event(self, event: str, step: int, /, **figures: Any) -> None:
        self.events.append((event, step, figures | {"at": self.train_state.step}))


class ObservedSaver:
    """Wraps `inner`: calls `before_write` before this rank writes its file, and lets a test wait for the last save."""

    def __init__(self, inner: Saver) -> None:
        self.inner = inner
        self.before_write: Callable[[Path], object] = lambda path: None
        self._over = threading.Event()
        self._over.set()

    def wait(self) -> None:
        """Wait until the last save has ended, with everything that the manager does then."""
        assert self._over.wait(TIMEOUT_SECONDS)

    def start(self) -> None:
        self.inner.start()

    def prepare(self, get_state: Callable[[], State]) -> None:
        self.inner.prepare(get_state)

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        self.inner.compare_alongside(get_state)

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self._over.clear()
        durable: Future[Any] = Future()
        watched = _WatchedStore(target.store, self.before_write)
        pending = self.inner.save(state, dataclasses.replace(target, store=watched))
        pending.durable.add_done_callback(lambda inner: self._pass_on(inner, durable))
        return PendingSave(target.step, pending.staged, durable, pending.differs)

    def close(self, timeout_seconds: float) -> None:
        self.wait()
        self.inner.close(timeout_seconds)

    def _pass_on(self, inner: Future[Any], durable: Future[Any]) -> None:
        error = inner.exception()
        if error is None:
            durable.set_result(inner.result())
        else:
            durable.set_exception(error)
        self._over.set()


class _WatchedStore(CheckpointStore):
    """Wraps `store`: calls `before_write` before this rank's file is written."""

    def __init__(self, store: CheckpointStore, before_write: Callable[[Path], object]) -> None:
        super().__init__(store.root, durable=store.durable, look_seconds=store._look_seconds)
        self._before_write: Callable[[Path], object] | None = before_write

    def new_file(self, place: str, name: str) -> NewFileOnDisk:
        new = super().new_file(place, name)
        before_write, self._before_write = self._before_write, None
        if before_write is not None:
            before_write(new.path)
        return new


def run_with(fault: str, rank: int, folder: Path, mode: str, **options: Any) -> TinyRun:
    """Return a run in which `fault` happens; saves are due at steps 1, 2 and 5 unless `options` say otherwise."""
    run = TinyRun(folder, async_mode=mode, **{"seams": {"save_policy": at_steps(1, 2, 5)}, **options})
    faults.install(fault, rank=rank)
    inner: Any = run.saver.inner
    writer = getattr(getattr(inner, "_saver", inner), "process", None)
    if writer is not None:
        writer.close()  # The next one starts with the fault.
    return run


def at_steps(*steps: int) -> SavePolicy:
    """Return a policy that saves at these steps."""
    return AnyOf(tuple(AtStep(step) for step in steps))


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ in the two, bit for bit."""
    return [key for key in found.keys() | expected.keys() if not same(found.get(key), expected.get(key))]


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in `folder`."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def same_everywhere(value: Any) -> bool:
    """Return whether all ranks passed the same plain value. **Collective**."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def _build_saver(config: Checkpoint) -> Saver:
    return _kept_process_saver() if config.async_mode == "async_with_pinned_mem" else build_saver(config, _peers())


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


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value
