"""Measure stalls of saves, first saves and loads of a model on a GPU, next to bare limits and to other ways.

    python scripts/bench_accelerator.py --gigabytes 4 --rounds 5 --json gpu.json

Each round measures everything once, in a new order and each in a process of its own; a figure is a median; below it are
the distances of the lowest and the highest value. "by hand" is a copy to pinned memory on a side stream, written by a
thread with `dcp.save`. "lost" is what training lost until the save was durable: the call and the steps until then, less
as many undisturbed steps. torch_checkpointing leaves it to the system when the disk has what was written. A load is
compared with what was saved, bit by bit. A file is made cold with fsync and posix_fadvise(DONTNEED). `--device cpu`
runs all of it without a GPU; its figures say nothing about one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_bench import disk, machine, report
from checkpoint_bench.contenders import is_installed, join_group_of_one
from checkpoint_bench.samples import Samples
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from torchtitan_lite.checkpoint import CheckpointManager, TrainState

MODES = {"ours, async": "async", "ours, process": "async_with_pinned_mem", "ours, disabled": "disabled"}
BY_HAND, DCP_ASYNC, DCP_PINNED = "by hand", "dcp.async_save", "dcp.async_save, pinned"
OTHER = "torch_checkpointing"
SAVES = (*MODES, BY_HAND, DCP_ASYNC, DCP_PINNED, OTHER)
LOADS = tuple(f"{name}, {how}" for how in ("cold", "warm") for name in ("ours", "dcp.load", "torch.load, mmap"))
IMAGE, LIMITS = "ours, image in memory", "limits"
DEADLINE_SECONDS = 600.0
STEPS_AFTER = 10
SETTLE_SECONDS = 5.0
_KEYS = {"preemption_signals": (), "memory_ttl_seconds": 0}
_KEYS_OF_IMAGES = {"interval_type": "none", "memory_interval": 1, "memory_ttl_seconds": 60, "async_mode": "async"}
_TABLES = {
    "saves": (
        {
            "first_call_ms": "first ms",
            "call_ms": "call ms",
            "next_step_ms": "next ms",
            "excess_ms": "lost ms",
            "steps_after_ratio": "x steps",
            "durable_seconds": "durable",
        },
        "call_ms",
    ),
    "the end of a manager": ({"close_seconds": "close s"}, "close_seconds"),
    "loads": ({"seconds": "seconds", "gigabytes_per_second": "GB/s"}, "seconds"),
    "limits": ({"gigabytes_per_second": "GB/s"}, "gigabytes_per_second"),
}


def main() -> int:
    """Run the command."""
    args = _arguments().parse_args()
    if args.child:
        return _child(json.loads(args.child))
    if args.device == "cuda" and not torch.cuda.is_available():
        print("This machine has no GPU that torch can use: --device cpu runs all of it without one", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    samples, failed = Samples(), dict[str, str]()
    facts = machine.facts(place)
    with tempfile.TemporaryDirectory(prefix="bench-accelerator-", dir=place) as folder:
        job = {"device": args.device, "gigabytes": args.gigabytes, "saves": args.saves, "folder": folder}
        _run(job | {"contender": "make"})
        cases = [name for name in (LIMITS, *SAVES, *LOADS, IMAGE) if name != OTHER or is_installed(OTHER)]
        for number in range(args.rounds):
            for name in random.Random(number).sample(cases, len(cases)):
                print(f"  round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                try:
                    for table, contender, figure, value in _run(job | {"contender": name}):
                        samples.add(table, contender, figure, number, value)
                except ContenderFailed as error:
                    failed[name] = str(error)
                if args.json:  # Each time: the machine may be lent for minutes.
                    document = {"machine": facts, "args": vars(args), "samples": samples.to_json()}
                    Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{args.gigabytes} GB on {facts['accelerator'] or 'no accelerator'}, torch {torch.__version__}")
    print(_tables(samples))
    if not is_installed(OTHER):
        failed[OTHER] = "it is not installed"
    for name, why in failed.items():
        print(f"not measured: {name}: {why}"[: report.WIDTH])
    return 0


class ContenderFailed(RuntimeError):
    """A process of the bench failed, or did not end in time."""


def _run(job: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Run `job` in a process of its own, that of an image in two; return its figures."""
    with tempfile.TemporaryDirectory() as runtime:  # Keepers of real runs stay out of this.
        if job["contender"] == IMAGE:
            _process(job | {"contender": "image"}, -signal.SIGKILL, runtime)
        return _process(job, 0, runtime)


def _process(job: dict[str, Any], expected: int, runtime: str) -> list[tuple[str, str, str, float]]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ContenderFailed(f"it did not end within {DEADLINE_SECONDS:.0f} s") from None
    if ended.returncode != expected:
        raise ContenderFailed((ended.stderr.strip().splitlines() or ["it ended without an error"])[-1])
    return [tuple(json.loads(line)) for line in ended.stdout.splitlines() if line.startswith('["')]


def _child(job: dict[str, Any]) -> int:
    name, trained = job["contender"], Trained(job["device"], job["gigabytes"])
    if name == "make":
        _make(trained, Path(job["folder"]))
    elif name == LIMITS:
        _measure_limits(trained, Path(job["folder"]))
    elif name in SAVES:
        _measure_saves(name, trained, Path(job["folder"], "saves"), job["saves"])
    elif name == "image":
        _keep_an_image(trained, Path(job["folder"], "image"))
    else:
        _measure_load(name, trained, Path(job["folder"]))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _print(table: str, contender: str, **figures: float) -> None:
    for figure, value in figures.items():
        print(json.dumps([table, contender, figure, value]), flush=True)


class Trained:
    """A model on `device` whose parameters and moments of AdamW are about `gigabytes`."""

    def __init__(self, device: str, gigabytes: float) -> None:
        self.device = device
        width = 4096 if gigabytes >= 1 else 512
        layers = max(1, round(gigabytes * 1e9 / (12 * width * width)))
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=False, device=device) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        self.progress = TrainState()
        self._batch = torch.randn(width, width, device=device)
        self.step()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that are saved."""
        for parameter in self.model.parameters():
            yield parameter.detach()
            yield from self.optimizer.state[parameter].values()

    def fill(self) -> None:
        """Give all tensors the values that are saved."""
        for tensor, values in zip(self.tensors(), self._values(), strict=True):
            tensor.copy_(values)
        self.sync()

    def assert_filled(self) -> None:
        """Raise unless all tensors have these values."""
        for number, (tensor, values) in enumerate(zip(self.tensors(), self._values(), strict=True)):
            assert torch.equal(tensor, values), f"tensor {number} has other values than were saved"

    def _values(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(7)
        for tensor in self.tensors():
            yield torch.rand(tensor.shape, generator=generator, device=self.device).to(tensor.device)

    def step(self, wait: Callable[[], None] = lambda: None) -> float:
        """Train one step, to its end on the device; `wait` comes before the optimizer. Return its seconds."""
        began = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16):
            self.model(self._batch).float().square().mean().backward()
        wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return time.perf_counter() - began

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def nested(self) -> dict[str, Any]:
        """Return the state in the form that DCP saves."""
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=flat)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer}

    def manager(self, folder: Path, **keys: Any) -> CheckpointManager:
        states = {"train_state": self.progress}
        return CheckpointManager.for_loop(
            model=self.model, optimizer=self.optimizer, states=states, folder=folder, **_KEYS | keys
        )


class Ours:
    """The manager, which saves at each call."""

    def __init__(self, trained: Trained, folder: Path, mode: str) -> None:
        self._trained = trained
        self._saving: Future[Any] = Future()
        keys = {"interval_type": "none", "async_mode": mode, "keep_latest_k": 1}
        self._manager = trained.manager(folder, on_event=self._note, **keys)
        self._manager.load()
        self._manager.reset()
        self.wait = self._manager.maybe_wait_for_staging
        self.close = self._manager.close

    def _note(self, event: str, step: int, /, **figures: Any) -> None:
        if event == "committed":
            self._saving.set_result(None)
        elif event == "save_failed":
            self._saving.set_exception(RuntimeError("the save failed"))

    def save(self, step: int, folder: Path) -> Future[Any]:
        self._trained.progress.step = step
        saving = self._saving = Future()
        self._manager.save(step, now=True)
        return saving


class ByHand:
    """Pinned memory and a side stream; a thread writes with `dcp.save`."""

    def __init__(self, trained: Trained) -> None:
        on_gpu = trained.device == "cuda"
        self._trained = trained
        self._to = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            for name, tensor in self._from().items()
        }
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]  # torch leaves it so

    def _from(self) -> dict[str, torch.Tensor]:
        return {str(number): tensor for number, tensor in enumerate(self._trained.tensors())}

    def save(self, step: int, folder: Path) -> Future[Any]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in self._from().items():
                self._to[name].copy_(tensor, non_blocking=True)

        def write() -> None:
            if self._stream is not None:
                self._stream.synchronize()
            dcp.save(dict(self._to), checkpoint_id=folder, no_dist=True)

        return _in_a_thread(write)

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None: ...


class DcpAsync:
    """`dcp.async_save`, which copies while the caller waits, or to pinned memory behind the next step."""

    def __init__(self, trained: Trained, *, is_pinned: bool = False) -> None:
        self._trained = trained
        self._stager = DefaultStager(StagingOptions(True, True, True, True)) if is_pinned else None
        self._staged: Future[Any] | None = None
        join_group_of_one()

    def save(self, step: int, folder: Path) -> Future[Any]:
        saving: Any = dcp.async_save(self._trained.nested(), checkpoint_id=folder, async_stager=self._stager)
        if self._stager is None:
            return saving  # type: ignore[no-any-return]  # a future
        self._staged = saving.staging_completion
        return saving.upload_completion  # type: ignore[no-any-return]  # another one

    def wait(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchCheckpointing:
    """The manager of torch_checkpointing, with its asynchronous saver."""

    def __init__(self, trained: Trained) -> None:
        from torch_checkpointing import CheckpointManager as Manager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._trained = trained
        join_group_of_one()
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = Manager(Manager.Config(save=AsyncCheckpointSaverConfig(), storage_config=storage))
        self._manager.prewarm_staging(trained.nested())
        self.close = self._manager.close

    def save(self, step: int, folder: Path) -> Any:
        return self._manager.save(str(folder), self._trained.nested())

    def wait(self) -> None:
        with self._manager.lock():
            pass


def _in_a_thread(work: Callable[[], object]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def _contender(name: str, trained: Trained, folder: Path) -> Any:
    if name in MODES:
        return Ours(trained, folder, MODES[name])
    if name == DCP_PINNED:
        return DcpAsync(trained, is_pinned=True)
    return {BY_HAND: ByHand, DCP_ASYNC: DcpAsync, OTHER: TorchCheckpointing}[name](trained)


def _measure_saves(name: str, trained: Trained, folder: Path, saves: int) -> None:
    for _ in range(3):
        trained.step()
    usual = statistics.median(trained.step() for _ in range(8))
    contender = _contender(name, trained, folder)
    until = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < until:  # What it prepares behind the first steps.
        trained.step(contender.wait)
    for number in range(saves + 1):
        place = folder / f"save-{number}"
        ended: list[float] = []
        began = time.perf_counter()
        saving = contender.save(number + 1, place)
        call = time.perf_counter() - began
        saving.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        steps = [trained.step(contender.wait)]
        while not saving.done():
            steps.append(trained.step(contender.wait))
        saving.result()
        lost = call + sum(steps) - usual * len(steps)
        steps += [trained.step(contender.wait) for _ in range(STEPS_AFTER - len(steps))]
        shutil.rmtree(place, ignore_errors=True)
        if number == 0:
            _print("saves", name, first_call_ms=1e3 * call)
            continue
        _print("saves", name, call_ms=1e3 * call, next_step_ms=1e3 * (steps[0] - usual), excess_ms=1e3 * lost)
        after = statistics.mean(steps[:STEPS_AFTER]) / usual
        _print("saves", name, steps_after_ratio=after, durable_seconds=ended[0] - began)
    began = time.perf_counter()
    contender.close()
    _print("the end of a manager", name, close_seconds=time.perf_counter() - began)
    shutil.rmtree(folder, ignore_errors=True)


def _make(trained: Trained, folder: Path) -> None:
    trained.fill()
    with trained.manager(folder / "ours", interval=1) as manager:
        manager.load()
        manager.reset()
        trained.progress.step = 1
        manager.save(1, now=True)
    join_group_of_one()
    dcp.save(trained.nested(), checkpoint_id=folder / "dcp.load")
    (folder / "torch.load").mkdir()
    torch.save([*trained.tensors()], folder / "torch.load" / "state.pt")


def _measure_load(name: str, trained: Trained, folder: Path) -> None:
    kind, _, how = name.partition(", ")
    if name == IMAGE:
        manager = trained.manager(folder / "image", **_KEYS_OF_IMAGES)
        load: Callable[[], object] = manager.load
    elif kind == "ours":
        manager = trained.manager(folder / "ours", load_only=True)
        load = manager.load
    elif kind == "dcp.load":
        join_group_of_one()
        state = trained.nested()
        load = lambda: dcp.load(state, checkpoint_id=folder / kind)  # noqa: E731  # One of three.
    else:

        def load() -> None:
            saved = torch.load(folder / kind / "state.pt", map_location="cpu", mmap=True, weights_only=True)
            for tensor, values in zip(trained.tensors(), saved, strict=True):
                tensor.copy_(values)

    if name != IMAGE:
        cached = (disk.make_cold if how == "cold" else disk.make_warm)(folder / kind)
        if (cached > 0.01) if how == "cold" else (cached < 0.99):
            raise SystemExit(f"{cached:.0%} of the files are in the page cache: {how} loads cannot be measured here")
    trained.sync()
    began = time.perf_counter()
    load()
    trained.sync()
    seconds = time.perf_counter() - began
    trained.assert_filled()
    _print("loads", name, seconds=seconds, gigabytes_per_second=trained.num_bytes / seconds / 1e9)
    if kind == "ours":
        manager.close()


def _keep_an_image(trained: Trained, folder: Path) -> None:
    """Leave an image in memory, and die."""
    images: queue.Queue[str] = queue.Queue()

    def on_event(event: str, step: int, /, **figures: Any) -> None:
        if event in ("image_ready", "image_missed"):
            images.put(event)

    shutil.rmtree(folder, ignore_errors=True)
    manager = trained.manager(folder, on_event=on_event, **_KEYS_OF_IMAGES)
    manager.load()
    manager.reset()
    trained.fill()
    for _ in range(300):  # One is missed while its memory is still being made.
        trained.progress.step += 1
        manager.save(trained.progress.step)
        manager.maybe_wait_for_staging()
        if images.get(timeout=60) == "image_ready":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    raise SystemExit("no image was ready")


def _measure_limits(trained: Trained, folder: Path) -> None:
    """Measure the link with pinned memory, and the disk with direct I/O."""
    if trained.device == "cuda":
        far = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        near = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        for name, to, source in (("to the device", far, near), ("from the device", near, far)):
            for _ in range(2):  # The first one warms up.
                trained.sync()
                began = time.perf_counter()
                to.copy_(source, non_blocking=True)
                trained.sync()
                rate = len(near) / (time.perf_counter() - began) / 1e9
            _print("limits", f"pinned memory {name}", gigabytes_per_second=rate)
    if not disk.takes_direct(folder):
        return
    buffer, place = disk.Touched(trained.num_bytes), folder / "raw"
    place.mkdir()
    for name, act in (("write", lambda: disk.Raw(buffer).write(place)), ("read", _reading(buffer, place))):
        began = time.perf_counter()
        act()
        rate = trained.num_bytes / (time.perf_counter() - began) / 1e9
        _print("limits", f"disk, {name}", gigabytes_per_second=rate)
    disk.remove(place)


def _reading(buffer: disk.Touched, place: Path) -> Callable[[], None]:
    return lambda: disk.Raw(buffer).read(place, warm=False)


def _tables(samples: Samples) -> str:
    tables = []
    for workload, (columns, first) in _TABLES.items():
        lines = [line for line in samples.lines() if line.workload == workload]
        tables.append(
            report.table(workload, lines, list(dict.fromkeys(line.contender for line in lines)), columns, first)
        )
    return "\n\n".join(tables)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of parameters and moments; 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="after the first one, of each process; 3")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--json", help="file for all samples")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
