"""Traces of the time of a step, and snapshots of the memory.

Every `profile_freq` steps, counted by the run's step number, the profiler writes a trace of the last
`profiler_active` steps to
{dump_folder}/profile_traces/iteration_N/rankR_trace.json, and a snapshot of the CUDA allocator to memory_snapshot/.
With both off, `step` does nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchtitan_lite.config.job_config import Profiling
from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import memory_snapshot, record_memory_history

MAX_MEMORY_EVENTS = 100_000
"""Allocations and frees that a memory snapshot keeps."""


class Profiler:
    """Write the traces and snapshots of one rank. Call `step` after each training step. **Any rank**."""

    def __init__(self, dump_folder: Path, config: Profiling, *, rank: int, loaded_step: int = 0) -> None:
        self._config = config
        self._traces = dump_folder / config.save_traces_folder
        self._snapshots = dump_folder / config.save_memory_snapshot_folder
        self._rank = rank
        self._step = loaded_step
        self._trace: profile | None = None
        self._records_memory = False

    def __enter__(self) -> Profiler:
        if self._config.enable_profiling:
            self._start_cycle()
            logger.info("Profiling active. Traces will be saved at %s", self._traces)
        if self._config.enable_memory_snapshot:
            self._start_memory_history()
        return self

    def step(self) -> None:
        """Write the trace and the snapshot of the last step, if they are due."""
        self._step += 1
        is_due = self._step % self._config.profile_freq == 0
        if self._trace is not None:
            self._trace.step()
            if is_due:
                self._end_cycle()
                self._start_cycle()
        if self._records_memory and is_due:
            self._write_snapshot(f"iteration_{self._step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._trace is not None:
            self._end_cycle()
        if self._records_memory:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"iteration_{self._step}_exit")
            record_memory_history(max_events=0)
            self._records_memory = False

    def _start_cycle(self) -> None:
        # Each trace has a profiler of its own, so that acc_events adds none of an earlier one. Without it torch 2.11
        # and 2.12 warn before they prepare a trace; where warnings are errors, `stop` then crashes the process.
        num_left = self._config.profile_freq - self._step % self._config.profile_freq
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._trace = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=lambda num_done: _action(num_left - num_done, self._config),
            on_trace_ready=self._write_trace,
            record_shapes=True,
            acc_events=True,
        )
        self._trace.start()

    def _end_cycle(self) -> None:
        assert self._trace is not None, "a cycle was started"
        trace, self._trace = self._trace, None
        trace.stop()

    def _write_trace(self, trace: profile) -> None:
        if self._trace is None:
            return  # At exit torch calls this for the step that did not finish.
        path = self._traces / f"iteration_{self._step}" / f"rank{self._rank}_trace.json"
        self._write("trace", path, lambda: trace.export_chrome_trace(str(path)))

    def _start_memory_history(self) -> None:
        if not torch.cuda.is_available():
            if self._rank == 0:
                logger.warning("profiling.enable_memory_snapshot has no effect: there is no CUDA device")
            return
        record_memory_history(max_events=MAX_MEMORY_EVENTS)
        self._records_memory = True

    def _write_snapshot(self, name: str) -> None:
        path = self._snapshots / name / f"rank{self._rank}_memory_snapshot.pickle"
        self._write("memory snapshot", path, lambda: path.write_bytes(pickle.dumps(memory_snapshot())))

    def _write(self, what: str, path: Path, write: Callable[[], object]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except (OSError, RuntimeError) as error:
            # An exception that leaves this call would make torch's profiler crash the process when it is stopped.
            logger.warning("Could not write the %s of step %d to %s: %s", what, self._step, path, error)
        else:
            logger.info("Wrote a %s of step %d to %s", what, self._step, path)


def _action(num_left: int, config: Profiling) -> ProfilerAction:
    """Return the profiler's action for the step after which `num_left` - 1 remain; the last ones are traced."""
    if num_left == 1:
        return ProfilerAction.RECORD_AND_SAVE
    if 1 < num_left <= config.profiler_active:
        return ProfilerAction.RECORD
    is_warmup = 1 < num_left <= config.profiler_active + config.profiler_warmup
    return ProfilerAction.WARMUP if is_warmup else ProfilerAction.NONE
