"""Jobs of two ranks that are killed: a small model under FSDP2 and a real manager, in processes that are forked.

A start is either under a real elastic agent, as torchrun runs it (`KilledJob`, a second a start), or rank by rank
without one (`BareStart`). The kills are signals at random moments, or a fault (docs/proof.md). Each rank appends every
action to a file of its own when it happens, across all starts: the records are complete up to the moment of a kill.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.small_run import SmallRun
from tests.forked import Forked, join_group
from tests.keepers import keepers_in
from tests.processes import DEADLINE_SECONDS, children, command_line, read_lines, send, wait_until
from torchtitan_lite import faults, log
from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.process_group import process_group

RANKS = 2
"""Unless a test says otherwise."""
STEPS = 200
"""More than a job trains between its first start and its last kill."""
DISK_INTERVAL = 7
RESTARTS = 1000
"""Of one agent: no limit."""
MOST_STEPS = 12
"""A start trains at most this many steps before the moment of its kill."""
LONGEST_SECONDS = 0.06
"""The moment of a kill is at most this long after a step; a step takes less."""
GRACE_SECONDS = 3.0
"""From the death of one rank to SIGKILL for the others, which got SIGTERM."""


@dataclass(frozen=True)
class Order:
    """A job: its folder, and its keys of [checkpoint]."""

    folder: Path
    keys: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    ranks: int = RANKS
    width: int = 1024
    """Of the model: it has 1024 parameters for each."""
    memory_group: Path | None = None
    """The control group of cgroup v1's memory controller in which all processes of the job run."""
    runtime: Path | None = None
    """The folder of the keeper's socket, if the job has a memory tier."""
    dropout: float = 0.1
    load: int = -1
    """What `load` of the manager gets."""
    has_digests: bool = False
    """Whether the record has a digest of the state after the load and after each step."""
    fault: str = ""
    """What fails on the ranks (docs/proof.md), and in the writer processes that they start."""
    saves_again: int | None = None
    """After the save of this step the parameters change and the step is saved again; the trainers' faults are installed
    between the two saves."""

    def record(self, rank: int) -> Path:
        """Return the file in which `rank` records its actions."""
        return self.folder / f"rank{rank}.jsonl"

    @property
    def request(self) -> Path:
        """The file whose existence makes the last rank raise, once."""
        return self.folder / "raise"

    @property
    def log(self) -> Path:
        """The output of all processes."""
        return self.folder / "output.log"

    def tail(self) -> str:
        """Return the end of the output, for the message of a failed test."""
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""


class Records:
    """What the ranks of one start have recorded, up to now."""

    def __init__(self, order: Order, start: str) -> None:
        self.order, self.start = order, start

    @property
    def all_ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.order.ranks)

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what `rank` recorded, in order."""
        return [line for line in read_lines(self.order.record(rank)) if line["start"] == self.start]

    def of_event(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return what `rank` recorded of `event`."""
        return [line for line in self.lines(rank) if line["event"] == event]

    def steps(self, event: str) -> set[int]:
        """Return the steps for which every rank recorded `event`."""
        return set.intersection(*({line["step"] for line in self.of_event(event, rank)} for rank in self.all_ranks))

    def losses(self, rank: int) -> dict[int, str]:
        """Return the exact loss of each step that `rank` trained."""
        return {line["step"]: line["loss"] for line in self.of_event("trained", rank)}

    @property
    def resumed(self) -> int | None:
        """The step that it resumed, 0 for a fresh start; None if it did not get there on every rank."""
        return max(self.steps("resumed"), default=None)

    @property
    def is_from_memory(self) -> bool:
        """Whether what it resumed was in memory."""
        return any(line["origin"] == "memory" for line in self.of_event("loaded"))

    def trained(self, of_ranks: Callable[[Sequence[int]], int] = min) -> int:
        """Return the last step that all ranks have trained, or with `max` that any of them has; 0 for none."""
        return of_ranks([max(self.losses(rank), default=0) for rank in self.all_ranks])


class KilledJob:
    """A job that is started again after each kill."""

    def __init__(self, order: Order, seed: int) -> None:
        self.order = order
        self._random = random.Random(seed)
        self._agent: Forked | None = None
        self._launches = 0
        order.folder.mkdir(parents=True, exist_ok=True)

    def launch(self) -> None:
        """Start an agent, which starts the ranks."""
        self._launches += 1
        self._agent = Forked(_agent, self.order, self._launches)

    def starts(self) -> list[Records]:
        """Return the records of all starts that rank 0 has begun, in order."""
        return [
            Records(self.order, start)
            for start in dict.fromkeys(line["start"] for line in read_lines(self.order.record(0)))
        ]

    def steps(self, event: str) -> set[int]:
        """Return the steps for which every rank recorded `event` in the same start."""
        return set().union(*(start.steps(event) for start in self.starts()))

    def acknowledged(self) -> int:
        """Return the latest step that rank 0 reported as committed."""
        return max((line["step"] for start in self.starts() for line in start.of_event("committed")), default=0)

    def wait_for_training(self, after: int) -> int:
        """Return once start number `after` + 1 has trained a step on every rank; return the step that it resumed."""
        self.wait_until(lambda: any(start.trained() for start in self.starts()[after : after + 1]))
        resumed = self.starts()[after].resumed
        assert resumed is not None
        return resumed

    def pids(self) -> list[int]:
        """Return the pid of each rank of the current start."""
        current = [read_lines(self.order.record(rank))[-1]["start"] for rank in range(self.order.ranks)]
        return [Records(self.order, start).lines(rank)[0]["pid"] for rank, start in enumerate(current)]

    def wait_a_moment(self) -> None:
        """Wait for a random number of steps and a random part of one: the ranks train, stage, digest and save."""
        step = self.starts()[-1].trained() + self._random.randint(0, MOST_STEPS)
        self.wait_until(lambda: self.starts()[-1].trained() >= step or not all(map(_is_running, self.pids())))
        # Waits for nothing: the moment of a kill is what the test draws.
        time.sleep(self._random.uniform(0.0, LONGEST_SECONDS))

    def kill_rank(self) -> None:
        """Kill one rank; the agent ends the other one and starts both again."""
        send(self._random.choice(self.pids()), signal.SIGKILL)

    def kill_ranks(self) -> None:
        """Kill all ranks at once; the agent starts them again."""
        for pid in self.pids():
            send(pid, signal.SIGKILL)

    def kill_writer(self) -> None:
        """Kill the writer process of one rank, and later all ranks."""
        for pid in children(self._random.choice(self.pids())):
            if "writer_process" in command_line(pid):
                send(pid, signal.SIGKILL)
        self.wait_a_moment()
        self.kill_ranks()

    def kill_keeper(self) -> None:
        """Kill the keeper, and later all ranks."""
        assert self.order.runtime is not None
        keepers = keepers_in(self.order.runtime)
        assert len(keepers) == 1, f"expected one keeper, found {len(keepers)}:\n{self.order.tail()}"
        send(keepers[0], signal.SIGKILL)
        self.wait_a_moment()
        self.kill_ranks()

    def kill_raising(self) -> None:
        """Make rank 1 raise; the agent ends the other one and starts both again."""
        self.order.request.touch()

    def kill_torchrun(self) -> None:
        """Kill the agent, then the ranks, and launch another agent."""
        self.end()
        self.launch()

    def end(self) -> None:
        """Kill all processes of the job."""
        assert self._agent is not None
        ranks = children(self._agent.pid)
        self._agent.kill()
        for pid in ranks:
            send(pid, signal.SIGKILL)
        self._agent.wait(DEADLINE_SECONDS)
        self.wait_until(lambda: not any(_is_running(pid) for pid in ranks), is_running=False)

    def wait_until(self, condition: Callable[[], bool], *, is_running: bool = True) -> None:
        """Return as soon as `condition` holds. Fail if the job ends before, or at a deadline."""
        has_ended = lambda: is_running and self._agent is not None and self._agent.poll() is not None  # noqa: E731
        assert wait_until(condition, self.order.tail, has_ended), f"the job ended:\n{self.order.tail()}"


@contextmanager
def killed_job(order: Order, seed: int) -> Iterator[KilledJob]:
    """Launch a job, which is killed at the end of the block."""
    job = KilledJob(order, seed)
    job.launch()
    try:
        yield job
    finally:
        job.end()


def losses(order: Order) -> dict[int, set[str]]:
    """Return the exact losses of each step, of all starts and ranks, each with its rank."""
    found: dict[int, set[str]] = {}
    for rank in range(order.ranks):
        for line in read_lines(order.record(rank)):
            if line["event"] == "trained":
                found.setdefault(line["step"], set()).add(f"rank {rank}: {line['loss']}")
    return found


def run_straight(order: Order) -> dict[int, set[str]]:
    """Train all steps of `order` in one start. Return its losses."""
    order.folder.mkdir(parents=True)
    agent = Forked(_agent, order, 1)
    assert agent.wait(DEADLINE_SECONDS) == 0, order.tail()
    return losses(order)


class BareStart(Records):
    """Start number `number` of the job of `order`, rank by rank and without an agent: it takes half a second."""

    def __init__(self, order: Order, number: int) -> None:
        super().__init__(order, f"{number}.0")
        order.folder.mkdir(parents=True, exist_ok=True)
        self.number = number
        self.codes: list[int | None] = []
        """The exit codes, once it has ended; None for a rank that had to be killed."""
        self._ranks = [Forked(run_rank, order, number, rank) for rank in range(order.ranks)]

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds; return whether it does: False if a rank has ended before."""
        return wait_until(condition, self.tail, lambda: any(rank.poll() is not None for rank in self._ranks))

    def kill_one(self, rank: int) -> None:
        """Kill `rank`; the others get SIGTERM, and later SIGKILL, as from torchrun."""
        self._ranks[rank].kill()
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all ranks at once."""
        for rank in self._ranks:
            rank.kill()
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that live."""
        for rank in self._ranks:
            if rank.poll() is None:
                send(rank.pid, number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> list[int | None]:
        """Wait until all ranks have ended, at most `seconds`, then kill those that live. Return all exit codes."""
        deadline = time.monotonic() + seconds
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        for rank in self._ranks:
            rank.kill()
            rank.wait(DEADLINE_SECONDS)
        return [rank.returncode for rank in self._ranks]

    def wait_for_end(self, *, is_power_cut: bool = False) -> BareStart:
        """Wait until all ranks have ended, and note their exit codes.

        Once a rank has failed, the others may take `GRACE_SECONDS` to end by themselves. With `is_power_cut` they are
        killed as soon as one was.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while None in (codes := [rank.poll() for rank in self._ranks]) and time.monotonic() < deadline:
            if is_power_cut and -signal.SIGKILL in codes:
                break
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.002)
        self.kill()
        self.codes = codes
        return self

    def tail(self) -> str:
        """Return the end of the output of all starts."""
        return self.order.tail()


class Tally(Counter[str]):
    """How often each outcome came, of the cases of `title`; the `kinds` are in the line even if they did not."""

    def __init__(self, title: str, *kinds: str) -> None:
        super().__init__(dict.fromkeys(kinds, 0))
        self.title = title

    def __str__(self) -> str:
        return f"{self.title}: {', '.join(f'{number} {what}' for what, number in self.items())}"


@contextmanager
def printed(request: pytest.FixtureRequest, tally: Tally) -> Iterator[Tally]:
    """Yield `tally`, and print it once all cases are over."""
    yield tally
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\n{tally}")


def _agent(order: Order, number: int) -> None:
    """Run an elastic agent, as torchrun does, until the ranks have ended or failed too often."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if order.memory_group is not None:
        (order.memory_group / "cgroup.procs").write_text(str(os.getpid()))
    _look_like_a_job(order)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order.ranks,
        run_id=str(number),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=RESTARTS,
        monitor_interval=0.02,
        start_method="fork",
    )
    code = 1
    try:
        elastic_launch(config, _rank)(order, number)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_rank(order: Order, number: int, rank: int) -> None:
    """Run one rank of start `number` without an agent: the ranks meet at a file, because a port may be taken."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order.ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    _look_like_a_job(order)
    _rank(order, number, _meet_at(order.folder / f"rendezvous{number}", rank, order.ranks))
    os._exit(0)  # Skips the shutdown of an interpreter with torch, which takes a second.


@contextmanager
def _meet_at(rendezvous: Path, rank: int, ranks: int) -> Iterator[None]:
    join_group(rank, ranks, rendezvous)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _look_like_a_job(order: Order) -> None:
    if order.runtime is not None:
        os.environ.pop("TORCHTITAN_LITE_MEMORY", None)
        os.environ["XDG_RUNTIME_DIR"] = str(order.runtime)
    output = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _rank(order: Order, number: int, group: AbstractContextManager[object] | None = None) -> None:
    """Run one rank of one start, from its fork to its exit; without `group` in the one of the agent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # As train.py does: a collection would copy every page of the server that this process shares.
    torch.set_num_threads(1)
    log.setup(0)
    rank, start = int(os.environ["RANK"]), f"{number}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    record = os.open(order.record(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event: str, step: int, /, **more: Any) -> None:
        line = {"start": start, "event": event, "step": step, **more}
        os.write(record, (json.dumps(line, default=str) + "\n").encode())

    write("begun", 0, pid=os.getpid())
    try:
        if order.saves_again is None:
            faults.install(order.fault, rank=rank)
        with group or process_group(Comm(init_timeout_seconds=60)):
            _train(order, rank, write)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _train(order: Order, rank: int, write: Callable[..., None]) -> None:
    run = _run_of(order, rank, write)
    state = run.train_state

    def digest() -> dict[str, str]:
        return {"state": _digest(run, DTensor.full_tensor)} if order.has_digests else {}

    with run.manager:
        run.manager.load(order.load)
        write("resumed", state.step, **digest())
        while state.step < order.steps and not run.manager.preempted_by:
            if rank == dist.get_world_size() - 1 and order.request.exists():
                order.request.unlink()
                raise RuntimeError("the test wanted an error here")
            loss = run.take_step()
            write("trained", state.step, loss=loss.hex(), **digest())
            faults.point("step", step=state.step)
            run.manager.save(state.step, force=state.step == order.steps)
            if state.step == order.saves_again:
                run.manager.latest_step()  # Returns after the first save has ended: the faults are for the second.
                run.manager.maybe_wait_for_staging()
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.mul_(0.5)
                faults.install(order.fault, rank=rank)
                run.manager.save(state.step)
    write("end", state.step, digest=_digest(run, DTensor.to_local, torch.get_rng_state()))
    faults.point("exit")


def _run_of(order: Order, rank: int, on_event: Callable[..., None]) -> SmallRun:
    """Return the run of one rank. Its losses depend on its complete state, and with dropout on the generators."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, order.width), nn.Dropout(order.dropout), nn.Tanh(), nn.Linear(order.width, 512)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    seams = {"clock": time.monotonic, "peers": Peers(timedelta(seconds=60)), "on_event": on_event}
    keys = {"interval": DISK_INTERVAL, "keep_latest_k": 2, **order.keys, "preemption_signals": ("SIGTERM",)}
    run = SmallRun(order.folder, model=model, loss=_loss, lr=0.001, seams=seams, **keys)
    torch.manual_seed(rank)
    return run


def _loss(run: SmallRun) -> torch.Tensor:
    batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(run.train_state.step))
    loss: torch.Tensor = (run.model(batch.chunk(dist.get_world_size())[dist.get_rank()]) - 1).square().mean()
    return loss


def _digest(run: SmallRun, of: Callable[[DTensor], torch.Tensor], *more: torch.Tensor) -> str:
    """Return a digest of the state: with `full_tensor` of all ranks, the same in every topology, and **collective**."""
    digest = xxhash.xxh3_128(f"{run.train_state.step} {run.scheduler.last_epoch}".encode())
    moments = (state[name] for state in run.optimizer.state.values() for name in sorted(state))
    for tensor in [*run.model.parameters(), *moments, *more]:
        digest.update((of(tensor) if isinstance(tensor, DTensor) else tensor).detach().contiguous().numpy())
    return digest.hexdigest()


def _is_running(pid: int) -> bool:
    """Return whether process `pid` still runs."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
