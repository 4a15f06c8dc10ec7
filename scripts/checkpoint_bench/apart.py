"""Measurements that need a process of their own: memory, and saves in the background from the first one on.

The bench starts itself again with `--child`, passes a job as JSON and gets samples back. For asynchronous saves a
process makes a first save, a second one, and one during a small training loop, each after the one before is durable.
Contenders with a target save `SAVES_DURING` times during training. Ours also makes synchronous saves, so that the times
to durable are compared within one process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint_bench import disk, states
from checkpoint_bench.contenders import (
    AsyncContender,
    Contender,
    Dcp,
    DcpAsync,
    Pending,
    Safetensors,
    TorchSave,
)
from checkpoint_bench.in_turn import MEMCPY, memcpy
from checkpoint_bench.machine import PeakMemory, spending
from checkpoint_bench.ours import Ours, OursAsync, OursManaged
from checkpoint_bench.peers import ASYNC_PEERS, PEERS
from checkpoint_bench.raw_copied import RawCopied
from checkpoint_bench.samples import Samples
from checkpoint_bench.states import BenchState

DEADLINE_SECONDS = 1800.0
MIN_STEPS = 5
SAVES_DURING = 3

SYNC = "sync save"

Job = dict[str, Any]
Steps = tuple[list[float], list[float]]
"""Seconds of each step without a save, and during a save."""

CONTENDERS: dict[str, Callable[[], Any]] = {
    "ours": Ours,
    "ours, no digests": lambda: Ours(digests=False),
    "dcp": Dcp,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    **PEERS,
}
"""Contenders that save while the caller waits, by name."""

ASYNC_CONTENDERS: dict[str, Callable[[Job], Any]] = {
    "raw copied": lambda job: RawCopied(),
    "ours thread": lambda job: OursAsync("thread"),
    "ours process": lambda job: OursAsync("process"),
    "ours manager": lambda job: OursManaged(job["state"]["params"], Path(job["folder"], "managed")),
    "dcp thread": lambda job: DcpAsync(AsyncCheckpointerType.THREAD),
    "dcp process": lambda job: DcpAsync(AsyncCheckpointerType.PROCESS),
    "dcp process, shared memory": lambda job: DcpAsync(AsyncCheckpointerType.PROCESS, shared=True),
    **ASYNC_PEERS,
}
"""Contenders that save in the background, by name."""


class ChildFailed(RuntimeError):
    """A process of the bench failed or did not end in time."""


def is_of_a_target(name: str) -> bool:
    """Return whether a target uses the contender `name`: ours and the raw disk."""
    return name.startswith(("ours", "raw"))


def start(job: Job) -> subprocess.Popen[str]:
    """Start a process that runs `job`."""
    command = [sys.executable, str(Path(__file__).parents[1] / "bench_checkpoint.py"), "--child", json.dumps(job)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen[str], job: Job) -> list[dict[str, Any]]:
    """Wait for the process of `job` and return its samples. Raise ChildFailed; the process has ended in any case."""
    try:
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{job['contender']}: did not end within {DEADLINE_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ChildFailed(f"{job['contender']}: {_last_line(errors)}")
    answer: list[dict[str, Any]] = json.loads(Path(job["answer"]).read_text(encoding="utf-8"))
    return answer


def run(job: Job) -> list[dict[str, Any]]:
    """Run `job` in a process of its own. Return its samples."""
    with tempfile.TemporaryDirectory(dir=job["folder"]) as folder:
        whole = job | {"folder": folder, "answer": str(Path(folder, "answer.json"))}
        return finish(start(whole), whole)


def serve_memory(job: Job, samples: Samples) -> None:
    """Measure, in the child process, the memory that a save and a load need in addition to the state."""
    contender: Contender = CONTENDERS[job["contender"]]()
    folder = Path(job["folder"])
    # The first save and load import modules and allocate things once; the second ones are measured.
    _save_and_load(contender, states.make({"kind": "llama", "params": 1}), folder / "first", None, job, samples)
    _save_and_load(contender, states.make(job["state"]), folder / "second", PeakMemory, job, samples)
    contender.close()


def serve_async(job: Job, samples: Samples) -> None:
    """Measure, in the child process, stalls and times to durable of several saves in a row."""
    contender: AsyncContender = ASYNC_CONTENDERS[job["contender"]](job)
    state, folder = states.make(job["state"]), Path(job["folder"], "checkpoint")
    buffer = disk.Touched(state.num_bytes)
    training = Training(job["train_dim"])

    def note(figure: str, value: float, contender: str = job["contender"]) -> None:
        samples.add(job["workload"], contender, figure, job["round"], value)

    memcpy(state, buffer)
    for _ in range(3):
        with spending() as spent:
            memcpy(state, buffer)
        note("memcpy_seconds", spent.seconds, f"{MEMCPY} with {job['contender']}")
    del buffer
    if job["contender"].startswith("ours"):
        seconds = _sync_save(state, folder)
        note("sync_save_seconds", seconds, f"{SYNC} with {job['contender']}")
    contender.prepare(state)
    training.steps_of(job["train_seconds"])
    for prefix in ("first_", ""):
        stall, durable, cpu = _save(contender, state, folder)
        note(f"{prefix}stall_seconds", stall)
        note(f"{prefix}durable_seconds", durable)
        note(f"{prefix}save_cpu_seconds", cpu)
        if job["round"] == 0:
            _verify(job["contender"], state, folder)
        disk.remove(folder)
    count = SAVES_DURING if is_of_a_target(job["contender"]) else 1
    pairs = [_train_during_a_save(contender, state, folder, training, job["train_seconds"]) for _ in range(count)]
    pairs = [pair for pair in pairs if len(pair[1]) >= MIN_STEPS]
    if pairs:
        for figure, of in (("steps_ratio", statistics.median), ("mean_steps_ratio", statistics.mean)):
            note(figure, statistics.median(of(during) / of(alone) for alone, during in pairs))
        note("steps_during_count", min(len(during) for _, during in pairs))
    contender.close()


class Training:
    """A small model that trains during a save."""

    def __init__(self, dim: int) -> None:
        self._model = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, dim)

    def step(self) -> float:
        """Train one step. Return its seconds."""
        began = time.perf_counter()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began

    def steps_of(self, seconds: float) -> list[float]:
        """Train for `seconds`. Return the seconds of each step."""
        steps, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            steps.append(self.step())
        return steps


def _save(contender: AsyncContender, state: BenchState, folder: Path) -> tuple[float, float, float]:
    """Save once. Return seconds that training was blocked, seconds until durable, and CPU seconds."""
    folder.mkdir()
    with spending() as spent:
        began = time.perf_counter()
        pending = contender.save(state, folder)
        pending.wait_until_staged()
        stall = time.perf_counter() - began
        pending.durable.result()
    contender.settle()
    return stall, spent.seconds, spent.cpu_seconds


def _train_during_a_save(
    contender: AsyncContender, state: BenchState, folder: Path, training: Training, seconds_alone: float
) -> Steps:
    """Return seconds of steps before and after a save, for `seconds_alone` each, and of steps during its write."""
    folder.mkdir()
    # Before and after, because the speed of processors drifts within seconds.
    alone = training.steps_of(seconds_alone)
    pending: Pending = contender.save(state, folder)
    pending.wait_until_staged()
    during = []
    while not pending.durable.done():
        seconds = training.step()
        if not pending.durable.done():
            during.append(seconds)
    pending.durable.result()
    contender.settle()
    alone += training.steps_of(seconds_alone)
    disk.remove(folder)
    return alone, during


def _sync_save(state: BenchState, folder: Path) -> float:
    """Return the seconds of a save by our synchronous saver, after a first save that allocates."""
    ours = Ours()
    for _ in range(2):
        folder.mkdir()
        with spending() as spent:
            ours.save(state, folder)
        disk.remove(folder)
    ours.close()
    return spent.seconds


def _verify(name: str, state: BenchState, folder: Path) -> None:
    """Raise unless the new checkpoint has the bits of `state`. Plain DCP reads it, also for ours."""
    if name in ASYNC_PEERS or name == RawCopied.name:
        return
    target = state.like()
    target.counters = {}
    Dcp().load(target, _latest(folder.parent) if name.startswith("ours") else folder, warm=True)
    state.assert_equals(target, name)


def _latest(folder: Path) -> Path:
    """Return the checkpoint of the highest step under `folder`; a manager may be removing the ones before it."""
    return max(folder.glob("**/step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))


def _save_and_load(
    contender: Contender, state: BenchState, folder: Path, peak: type[PeakMemory] | None, job: Job, samples: Samples
) -> None:
    folder.mkdir()
    target = state.like()
    memory = peak() if peak else None
    contender.save(state, folder)
    if memory is not None:
        samples.add(job["workload"], job["contender"], "save_extra_bytes", job["round"], memory.extra_bytes())
    disk.make_cold(folder)
    memory = peak() if peak else None
    contender.load(target, folder, warm=False)
    if memory is not None:
        samples.add(job["workload"], job["contender"], "load_extra_bytes", job["round"], memory.extra_bytes())
    state.assert_equals(target, contender.name)
    disk.remove(folder)


def _last_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed no error"
