"""A run that is small enough to be made many times: a tiny model, AdamW, a schedule, a loader, a manager.

Training is deterministic: the batch is a function of the loader's position, so two runs in the same
state continue alike, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.target import Origin, SaveTarget
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig
from torchtitan_lite.events import Event
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.store import CheckpointStore

ORIGIN = Origin(Lineage("run1"), topology="1 rank", config={})
"""The origin of checkpoints that tests save without a manager."""


class Events:
    """A record of all events of a manager, in order; `now` returns the step in which one occurs."""

    def __init__(self, now: Callable[[], int] = lambda: -1) -> None:
        self.recorded: list[tuple[str, int, dict[str, Any]]] = []
        self._now, self._steps = now, list[int]()

    def __call__(self, event: str, step: int, /, **figures: Any) -> None:
        self._steps.append(self._now())
        self.recorded.append((event, step, figures))

    def emit(self, event: Event) -> None:
        """Record `event`, where a part of a manager is under test."""
        self(event.name, event.step, **event.figures)

    def steps(self, event: str) -> list[int]:
        """Return the steps of all `event`s with this name."""
        return [step for name, step, _ in self.recorded if name == event]

    def happened(self, event: str) -> list[tuple[int, int, dict[str, Any]]]:
        """Return of all `event`s with this name the step, the step of the run when it occurred, and the figures."""
        return [
            (step, now, figures)
            for (name, step, figures), now in zip(self.recorded, self._steps, strict=False)
            if name == event
        ]

    def wait_for(self, event: str) -> None:
        """Return once an `event` with this name is there: one of another process may come late on a busy machine."""
        deadline = time.monotonic() + 90.0
        while not self.steps(event):
            assert time.monotonic() < deadline, f"no {event} yet"
            time.sleep(0.005)

    def figures(self, event: str) -> dict[str, Any]:
        """Return the figures of the last `event` with this name."""
        return next(figures for name, _, figures in reversed(self.recorded) if name == event)


class Tiny(nn.Module):
    """Floating-point parameters, floating-point and integer buffers, and one buffer that is not persistent."""

    counter: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)
        self.register_buffer("counter", torch.tensor([3, 5]))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.norm(self.first(x)) + self.table))
        return y


class Loader:
    """Counts batches; its state is one live object that changes with every batch."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "seen": []}

    def __next__(self) -> Tensor:
        position = self.state["position"]
        self.state["position"] += 1
        self.state["seen"].append(position)
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(position))

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = {"position": state_dict["position"], "seen": list(state_dict["seen"])}


SEAMS = {field.name for field in dataclasses.fields(Seams)}
Loss = Callable[["SmallRun"], Tensor]


def loss_of(run: SmallRun, batch: Tensor | None = None) -> Tensor:
    """Return the loss of `batch`, or of the next one of the loader; it is recorded."""
    loss: Tensor = run.model(next(run.loader) if batch is None else batch).square().mean()
    run.train_state.record_loss(loss.item(), loss.item())
    return loss


class SmallRun:
    """One run, or its part between two restarts: AdamW, a falling rate, counters, and a manager.

    It trains `Tiny` with a `Loader`, unless it gets a `model`; then it has only the `loader` that it gets, and needs a
    `loss`. The manager gets `checkpoint`, the options of this section, and the keywords and seams in `seams`. No time
    passes for it, unless these have a `clock`.
    """

    def __init__(
        self,
        folder: Path,
        /,
        *,
        model: nn.Module | None = None,
        loss: Loss = loss_of,
        loader: Any = None,
        lr: float = 0.1,
        seed: int = 0,
        states: Mapping[str, Any] | None = None,
        seams: Mapping[str, Any] | None = None,
        **checkpoint: Any,
    ) -> None:
        if model is None:
            torch.default_generator.manual_seed(seed)
            model, loader = Tiny(), Loader()
        self.root = folder / "checkpoint"
        self.model, self.loader, self._loss = model, loader, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: 1 / (1 + done))
        self.train_state = state = TrainState()
        self.events = Events(lambda: state.step)
        seams = {"clock": lambda: 1000.0, "on_event": self.events, **(seams or {})}
        self.clock = seams["clock"]
        self.saver: Any = seams.get("saver")
        self.manager = CheckpointManager(
            loader,
            [model],
            [self.optimizer],
            [self.scheduler],
            {"train_state": self.train_state, **(states or {})},
            job_config(folder, **checkpoint),
            seams=Seams(**{name: seam for name, seam in seams.items() if name in SEAMS}),
            **{name: given for name, given in seams.items() if name not in SEAMS},
        )

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)

    def loaded(self) -> SmallRun:
        """Load what is there, if anything, as each start does first; return this run."""
        self.manager.load()
        return self

    def resumed(self) -> SmallRun:
        """Load, and fail unless there was something to resume from; return this run."""
        assert self.manager.load()
        return self

    def take_step(self, of: Loss | None = None) -> float:
        """Take one step of the optimizer and the schedule. Returns the loss."""
        self.train_state.step += 1
        loss = (of or self._loss)(self)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
        self.manager.maybe_wait_for_staging()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def step(self, *, last: bool = False) -> bool:
        """Take one optimizer step, then call the manager's `save`. Returns whether it saved."""
        self.take_step()
        return self.manager.save(self.train_state.step, force=last)

    def train(self, steps: int, *, last: bool = True) -> list[int]:
        """Train until `steps` are done. With `last` the run ends there, so the last step is saved in any case.

        Returns the saved steps.
        """
        remaining = range(self.train_state.step + 1, steps + 1)
        return [step for step in remaining if self.step(last=last and step == steps)]

    def finished(self, steps: int, *, last: bool = True) -> SmallRun:
        """Train until `steps` are done, as `train` does, and close the manager; return this run."""
        with self:
            self.train(steps, last=last)
        return self

    @property
    def losses(self) -> list[float]:
        """The losses of all steps since the first start."""
        return self.train_state.global_avg_losses

    def contents(self) -> dict[str, Any]:
        """Return a copy of everything that a checkpoint must restore. **Collective** if the model is sharded."""
        return {
            "model": {name: _whole(tensor) for name, tensor in self.model.state_dict().items()},
            "moments": [{k: _whole(v) for k, v in s.items()} for s in self.optimizer.state_dict()["state"].values()],
            "lr": self.optimizer.param_groups[0]["lr"],
            "schedule": self.scheduler.state_dict()["last_epoch"],
            "loader": copy.deepcopy(self.loader.state) if isinstance(self.loader, Loader) else None,
            "step": self.train_state.step,
            "losses": list(self.losses),
        }

    def scramble(self) -> None:
        """Change every part of the state."""
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.add_(1)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.add_(1)
        self.optimizer.param_groups[0]["lr"] = 77.0
        if isinstance(self.loader, Loader):
            self.loader.state = {"position": 99, "seen": [99]}
        self.train_state.step = 99

    def committed(self) -> list[int]:
        """Return the steps of the committed checkpoints."""
        return [info.step for info in CheckpointStore(self.root).committed()]

    def names(self) -> list[str]:
        """Return all names in the folder of checkpoints except the lease's. **Collective** if the model is sharded.

        Then it waits for all ranks first, because the coordinator does more work at the end of a save.
        """
        if any(isinstance(each, DTensor) for each in self.model.parameters()):
            dist.barrier()
        return sorted(path.name for path in self.root.iterdir() if path.name != layout.LOCK)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def job_config(folder: Path, /, **checkpoint: Any) -> JobConfig:
    """Return a config with checkpoints in `folder`. It watches no signals, because these belong to the test runner."""
    # What uploads has the lowest priority: next to busy processes it may send nothing for a minute.
    seconds = 600 if checkpoint.get("upload_folder") else 60
    defaults: dict[str, Any] = {"enable_checkpoint": True, "preemption_signals": (), "timeout_seconds": seconds}
    return JobConfig(job=Job(dump_folder=str(folder)), checkpoint=Checkpoint(**defaults | checkpoint))


def same(a: Any, b: Any) -> bool:
    """Return whether two nests of containers, numbers and tensors are equal, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def target(store: CheckpointStore, step: int, kind: CheckpointKind = CheckpointKind.FULL) -> SaveTarget:
    """Return the target of one save into `store`."""
    return SaveTarget(store, step, kind, ORIGIN)


def fqns(names: Sequence[str], prefix: str) -> set[str]:
    """Return those of `names` that begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
