"""All figures of a run, collected from the loop and the checkpoint manager.

The loop times its parts and passes its figures at logged steps. The manager's events are written to events.jsonl at
once, and their figures go into the next logged step. The figures of a logged step cover the steps since the last logged
one. `ledger` counts where the time goes.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import torchtitan_lite
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.events import (
    EVENTS,
    CleanEnd,
    Committed,
    Event,
    ImageMissed,
    ImageReady,
    Loaded,
    ReplicaMissed,
    ReplicaReady,
    SaveStaged,
    Uploaded,
)
from torchtitan_lite.json_lines import JsonLines
from torchtitan_lite.log import logger
from torchtitan_lite.metrics.ledger import Ledger, RunClock
from torchtitan_lite.metrics.logger import MetricsLogger, WandbRun
from torchtitan_lite.metrics.progress_bar import build_progress_bars

EVENTS_FILE = "events.jsonl"
OF_IMAGES = (ImageReady, ImageMissed, ReplicaReady, ReplicaMissed)
"""Events that may come with every step: events.jsonl has the first one of each in a start."""


class RunMetrics:
    """Figures of this rank. Rank 0 writes them, unless the run only loads. A context manager.

    `began` is the reading of `time.monotonic` when this start began; None for now. Raises ExtraMissing if the config
    wants wandb, on rank 0.
    """

    def __init__(self, config: JobConfig, world: World, *, flops_per_token: float, began: float | None = None) -> None:
        dump_folder = Path(config.job.dump_folder).absolute()
        self.timer = StepTimer()
        """Timer of the parts of a step: data, forward, backward, optimizer."""
        self._flops_per_token = flops_per_token
        self._peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        writes = not (config.checkpoint.enable_checkpoint and config.checkpoint.load_only)
        self._writes = world.rank == 0 and writes
        self._files = MetricsLogger(dump_folder, config.metrics, rank=world.rank, writes=writes)
        self._events = JsonLines(dump_folder / EVENTS_FILE) if self._writes else None
        self._device = world.device
        memory_tags(world.device)  # The first peaks are those since now.
        self._bars = build_progress_bars(config, world.rank)
        self.ledger = Ledger(dump_folder, RunClock(began=began), writes=self._writes)
        """Where the time goes."""
        self._heartbeat: Heartbeat | None = None
        self._wandb = WandbRun(dump_folder) if config.metrics.enable_wandb and self._writes else None
        self._config = config
        folder = config.checkpoint.folder
        self._checkpoints = folder.rstrip("/") if is_in_object_store(folder) else str(dump_folder / folder)
        self._world_size = world.world_size
        self._lock = threading.Lock()
        self._event_tags: dict[str, float] = {}
        self._written_once: set[type[Event]] = set()
        self._end: CleanEnd | None = None
        self._begin_figures()

    def begin(self, topology: str) -> None:
        """Begin this start in the ledger, and the heartbeat. Call it once the checkpoint folder is this job's."""
        self.ledger.begin(
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=self._world_size,
            topology=topology,
            version=torchtitan_lite.__version__,
        )
        if self._writes:
            self._heartbeat = Heartbeat(self.ledger.beat)
            if self._wandb is not None:
                first = (*(start.id for start in self.ledger.before.starts), self.ledger.id)[0]
                self._wandb.begin(first, self._config.to_dict())

    def start(self, loaded_step: int) -> None:
        """Drop the history on file after `loaded_step`. Call it directly before the loop."""
        self._start_history(loaded_step)
        self.ledger.start_loop(loaded_step, self._checkpoints)

    def rolled_back(self, step: int, loaded_step: int) -> None:
        """Drop the history on file after `loaded_step`, to which the run rolled back from `step`."""
        self._start_history(loaded_step)
        self.ledger.rolled_back(step, loaded_step)

    def _start_history(self, loaded_step: int) -> None:
        self._files.start(loaded_step)
        for bar in self._bars:
            bar.start(loaded_step)
        self._begin_figures()

    def _begin_figures(self) -> None:
        self._tokens, self._steps, self._losses = 0.0, 0, 0.0
        self.timer.pop(1)  # After a rollback there is what steps took that count no more.
        self._since = time.perf_counter()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the block for the part `name` of the ledger."""
        return self.ledger.clock.part(name)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time the block as the data part of a step."""
        with self.timer("data"), self.part("waiting_for_data"):
            yield

    def on_event(self, event: str, step: int, /, **figures: Any) -> None:
        """Note an event of the checkpoint manager, as its listener. **Any thread**."""
        self.note(EVENTS[event](step, **figures))

    def note(self, event: Event) -> None:
        """Write `event` to events.jsonl and keep its figures for the next logged step. **Any thread**.

        Of images in memory, made and missed, which may come with every step, the first one of a start is written.
        """
        event = self.ledger.completed(event)
        kind = type(event)
        if self._events is not None and kind not in self._written_once:
            self._events.append(Recorded(time.time(), event).to_record())
        if kind in OF_IMAGES:
            self._written_once.add(kind)
        self.ledger.note(event)
        if isinstance(event, CleanEnd):
            self._end = event
        with self._lock:
            self._event_tags |= checkpoint_tags(event)
        for bar in self._bars:
            bar.note(event)

    def past(self) -> Past:
        """Return the hours and the unclean ends of earlier starts; none where no ledger is written."""
        return Past(self.ledger.before.hours, self.ledger.accounts().unclean_ends)

    def step_done(self, num_tokens: float, global_avg_loss: float) -> None:
        """Count one more step, of `num_tokens` on this rank."""
        self._tokens += num_tokens
        self._steps += 1
        for bar in self._bars:
            bar.step_done()
        self._losses += global_avg_loss

    def log(self, step: int, figures: Mapping[str, float], progress: tuple[int, float | None]) -> None:
        """Log the line of `step` and write its figures to the files, those of the loop by TensorBoard tag.

        `progress` is the epoch and the part of it.
        """
        seconds = time.perf_counter() - self._since
        num_steps = max(1, self._steps)
        parts = self.timer.pop(num_steps)
        speed = throughput_tags(self._tokens / seconds, self._flops_per_token, self._peak)
        with self._lock:
            event_tags, self._event_tags = self._event_tags, {}
        mean_loss = {"loss_metrics/running_avg_loss": self._losses / num_steps}
        tags = {**figures, **mean_loss, **self.ledger.tags(), **epoch_tags(*progress)}
        tags |= speed | time_tags(seconds / num_steps, parts) | memory_tags(self._device) | event_tags
        for bar in self._bars:
            bar.logged(tags["loss_metrics/global_avg_loss"], tags["throughput(tps)"])
        self._files.log(step, tags)
        if self._wandb is not None:
            self._wandb.log(step, tags)
        logger.info(step_line(step, tags, *progress))
        self._begin_figures()

    def close(self, *, failed: bool = False) -> None:
        """Remove the progress bar, end the ledger and close all files. Idempotent.

        `failed` says that an error ends the run.
        """
        for bar in self._bars:
            bar.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
            self.ledger.end(None if failed else self._end)
        if self._wandb is not None:
            self._wandb.close(failed=failed)
        self._files.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> RunMetrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def checkpoint_tags(event: Event) -> dict[str, float]:
    """Return the TensorBoard tags for the figures of `event`."""
    match event:
        case SaveStaged():
            return {"checkpoint/stage(s)": event.stall_seconds}
        case ImageReady():
            return {"checkpoint/image(s)": event.seconds, "checkpoint/image_stall(s)": event.stall_seconds}
        case Loaded():
            return {"checkpoint/load(s)": event.seconds}
        case Uploaded():
            return {"checkpoint/upload(s)": event.seconds, "checkpoint/uploaded_step": event.step}
        case Committed():
            return {
                "checkpoint/stall(s)": event.stall_seconds,
                "checkpoint/save(s)": event.seconds,
                "checkpoint/bytes": event.bytes,
                "checkpoint/GBps": event.bytes / event.seconds / 1e9 if event.seconds > 0 else 0.0,
            }
    return {}


# A thread that does something every few seconds, as long as the process lives.
#
# What it does must be short and may not need the main thread: that may wait for a disk, or for other ranks.


BEAT_SECONDS = 4.0
"""Seconds between two beats: with the delays of a busy machine still under the five that are promised."""


class Heartbeat:
    """Call `beat` every `seconds`, until `close`. An error of it is one warning, and the thread continues.

    The thread does not keep the process alive.
    """

    def __init__(self, beat: Callable[[], None], seconds: float = BEAT_SECONDS) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._thread = daemon("heartbeat", self._run)
        except OSError as error:
            logger.warning("No heartbeat is written: %s. Training continues", error)

    def close(self) -> None:
        """End the thread; one that hangs in the disk is not waited for longer than a beat. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._seconds)

    def _run(self) -> None:
        has_warned = False
        while not self._stop.wait(self._seconds):
            try:
                self._beat()
            except Exception as error:
                if not has_warned:
                    logger.warning("A heartbeat failed: %s: %s. Training continues", type(error).__name__, error)
                has_warned = True


# The seconds of each part of a step.
#
# These are seconds of the host: on an accelerator a part ends when its kernels are launched, not when they finish, and
# the wait counts for the part that needs a result.


class StepTimer:
    """Seconds by part: data, forward, backward, optimizer."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `part`, which may come several times in one step."""
        start = self._clock()
        yield
        self._seconds[part] += self._clock() - start

    def pop(self, num_steps: int) -> dict[str, float]:
        """Return the mean seconds per step in the `num_steps` since the last call, by part, and reset them."""
        means = {part: seconds / num_steps for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return means


# The log line of a step, and the figures in it.
#
# All functions are pure, but `memory_tags`, which reads the device or the system. The line keeps torchtitan's format,
# because scripts read it.


_GIB = 1024**3

# Dense bf16 FLOP/s, from the manufacturers' data sheets (half of it where they give it with sparsity).
# Longer names come first: "H200" starts with "H20", and "H100 NVL" is another device than the H100 of a server board.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI250X": 191.5e12,  # one die of the two: torch sees each as a device
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bf16 FLOP/s of a device of this name; None if it is unknown, such as a CPU's."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


def throughput_tags(tps: float, flops_per_token: float, peak: float | None) -> dict[str, float]:
    """Return tokens per second and device, the same in TFLOP/s and, if the peak is known, in percent of the peak."""
    flops = tps * flops_per_token
    tags = {"throughput(tps)": tps, "tflops": flops / 1e12}
    return tags | ({"mfu(%)": 100 * flops / peak} if peak else {})


def time_tags(end_to_end_seconds: float, parts: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a step and of its `parts`, from `StepTimer.pop`; data is torchtitan's data_loading."""
    names = {part: "data_loading" if part == "data" else part for part in parts}
    tags = {f"time_metrics/{names[part]}(s)": seconds for part, seconds in parts.items()}
    share = 100 * parts.get("data", 0.0) / end_to_end_seconds if end_to_end_seconds > 0 else 0.0
    return {"time_metrics/end_to_end(s)": end_to_end_seconds, "time_metrics/data_loading(%)": share} | tags


def epoch_tags(epoch: int, fraction: float | None) -> dict[str, float]:
    """Return the epoch, and the percentage of it that is taken if that is known."""
    return {"data/epoch": epoch} | ({} if fraction is None else {"data/epoch_progress(%)": 100 * fraction})


def step_line(step: int, tags: Mapping[str, float], epoch: int = 0, fraction: float | None = None) -> str:
    """Return the log line of a step with the figures in `tags`, and then the epoch and the part of it that is taken.

    It is torchtitan's, without mfu if the device's peak is unknown.
    """
    line = (
        f"step: {step:2}  loss: {tags['loss_metrics/global_avg_loss']:7.4f}  grad_norm: {tags['grad_norm']:7.4f}  "
        f"memory: {tags['memory/max_reserved(GiB)']:5.2f}GiB  tps: {round(tags['throughput(tps)']):,}  "
        f"tflops: {tags['tflops']:,.2f}"
    )
    line += f"  mfu: {tags['mfu(%)']:.2f}%" if "mfu(%)" in tags else ""
    # Rounded down: 100 % is the end of the epoch.
    return f"{line}  epoch: {epoch}" + ("" if fraction is None else f" ({int(1000 * fraction) / 10:.1f}%)")


def memory_tags(device: torch.device) -> dict[str, float]:
    """Return the peaks of memory, by TensorBoard tag. The step line shows `memory/max_reserved(GiB)`.

    On CUDA these are the allocator's since the last call, under torchtitan's tags. On the CPU, where there is no such
    allocator, it is the peak of the process since its start.
    """
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory/max_active(GiB)": peak / _GIB, "memory/max_reserved(GiB)": peak / _GIB}
    capacity, stats = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_stats(device)
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/max_active(GiB)": active / _GIB,
        "memory/max_active(%)": 100 * active / capacity,
        "memory/max_reserved(GiB)": reserved / _GIB,
        "memory/max_reserved(%)": 100 * reserved / capacity,
        "memory/num_alloc_retries": stats["num_alloc_retries"],
        "memory/num_ooms": stats["num_ooms"],
    }
