"""Jobs that are killed hundreds of times: two ranks, forked from a server that has torch loaded already.

A job trains a tiny sharded model with a real manager. Each rank records every action when it happens, so that the
record is complete up to the moment of the kill. `start` runs one start of a job until all its processes have ended;
another start in the same folder is a restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.e2e.jobs import read_lines
from tests.e2e.sharded_run import RANKS, ShardedRun
from tests.forked import server
from tests.ranks import join_group
from torchtitan_lite import faults, log
from torchtitan_lite.distributed.environment import fault_spec

STEPS = 12
INTERVAL = 3
KEPT = 2
DEADLINE_SECONDS = 90.0
"""For one start, which takes one or two seconds."""
GRACE_SECONDS = 5.0
"""Time for the other ranks, which may wait for one that failed, to end by themselves."""
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Order:
    """The configuration of start number `number` of the job in `folder`."""

    folder: Path
    number: int
    mode: str = "disabled"
    fault: str = ""
    saves_again: int | None = None
    """After the save of this step the parameters change and the step is saved again; the trainers' faults are installed
    between the two saves."""
    power_cut: bool = False
    """Whether all processes are killed as soon as one rank was."""

    def record(self, rank: int) -> Path:
        """Return the file in which `rank` records its actions."""
        return self.folder / f"start{self.number}-rank{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """Return the file with the output of `rank`."""
        return self.record(rank).with_suffix(".log")


@dataclass(frozen=True)
class Started:
    """How a start ended: each rank's exit code, None if it had to be killed, and its record."""

    order: Order
    codes: list[int | None]

    @cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        return [read_lines(self.order.record(rank)) for rank in range(RANKS)]

    @property
    def killed(self) -> set[int]:
        """The ranks that ended by the SIGKILL of their own fault."""
        return {rank for rank, code in enumerate(self.codes) if code == -signal.SIGKILL}

    @property
    def resumed(self) -> int:
        """The step from which it resumed; 0 for a fresh start."""
        return max(self.steps("resumed"), default=0)

    def steps(self, event: str) -> list[int]:
        """Return the steps for which rank 0 recorded `event`."""
        return [line["step"] for line in self.records[0] if line["event"] == event]

    def losses(self, rank: int) -> dict[int, str]:
        """Return the exact loss of each step; of a step trained twice, the second one."""
        return {line["step"]: line["loss"] for line in self.records[rank] if line["event"] == "trained"}

    def end(self, rank: int) -> str:
        """Return the digest of the state of `rank` at the end; empty if it did not get there."""
        return next((line["digest"] for line in self.records[rank] if line["event"] == "end"), "")

    def tail(self) -> str:
        """Return the end of each rank's output, for the message of a failed test."""
        logs = (self.order.log(rank) for rank in range(RANKS))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists())


def start(order: Order) -> Started:
    """Run `order` until all its processes have ended."""
    order.folder.mkdir(exist_ok=True)
    processes = [server().Process(target=_serve, args=(order, rank), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    codes: list[int | None] = [None] * RANKS
    deadline = time.monotonic() + DEADLINE_SECONDS
    while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            rank = running.pop(sentinel)
            processes[rank].join()
            codes[rank] = processes[rank].exitcode
            if order.power_cut and codes[rank] == -signal.SIGKILL:
                deadline = 0.0
            elif codes[rank] != 0:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in running.values():
        processes[rank].kill()
        processes[rank].join()
    return Started(order, codes)


class KilledRun(ShardedRun):
    """The run of one rank, which changes its parameters between two saves where the order says so."""

    def train(self) -> str:
        """Train one step. Return its exact loss."""
        loss = super().train()
        self.train_state.record_loss(float.fromhex(loss), float.fromhex(loss))
        return loss

    def change(self) -> None:
        """Change the parameters without another step."""
        self.manager.maybe_wait_for_staging()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def digest(self) -> str:
        """Return a digest of this rank's whole state."""
        digest = hashlib.sha256()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(f"{self.train_state.step} {self.scheduler.state_dict()['last_epoch']}".encode())
        return digest.hexdigest()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        for state in self.optimizer.state.values():
            yield from (state[name].reshape(-1) for name in sorted(state))
        yield torch.get_rng_state()


class _Record:
    """The actions of a rank, one a line. Each line is written to the kernel at once, so a SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_event(self, event: str, step: int, /, **figures: Any) -> None:
        self.write(event, step)

    def write(self, event: str, step: int, **more: str) -> None:
        os.write(self._fd, (json.dumps({"event": event, "step": step, **more}) + "\n").encode())


def _serve(order: Order, rank: int) -> None:
    """Run one rank, from its fork to its exit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(order.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Set as a launcher would set them: the writer process reads them.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "TORCHTITAN_LITE_FAULT": order.fault}
    log.setup(0)
    torch.set_num_threads(1)
    code = 1
    try:
        if order.saves_again is None:
            faults.install(fault_spec(), rank=rank)
        join_group(rank, RANKS, order.folder / f"rendezvous{order.number}")
        _train(order, rank, _Record(order.record(rank)))
        faults.point("exit")
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # Skips the shutdown of an interpreter with torch, which takes a second.


def _train(order: Order, rank: int, record: _Record) -> None:
    keys = {"interval": INTERVAL, "keep_latest_k": KEPT, "async_mode": order.mode, "timeout_seconds": TIMEOUT_SECONDS}
    run = KilledRun(order.folder, rank, record.on_event, lr=0.01, **keys)
    with run.manager:
        if run.manager.load():
            record.write("resumed", run.train_state.step)
        while run.train_state.step < STEPS:
            loss = run.train()
            record.write("trained", run.train_state.step, loss=loss)
            faults.point("step", step=run.train_state.step)
            run.manager.save(run.train_state.step, force=run.train_state.step == STEPS)
            if run.train_state.step == order.saves_again:
                run.manager.latest_step()  # Returns after the first save has ended: the faults are for the second.
                run.change()
                faults.install(fault_spec(), rank=rank)
                run.manager.save(run.train_state.step)
    record.write("end", run.train_state.step, digest=run.digest())
