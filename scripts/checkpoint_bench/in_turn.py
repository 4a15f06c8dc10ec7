"""Saves and loads while the caller waits: every contender once in each round, in a new order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint_bench import disk
from checkpoint_bench.contenders import Contender, RawDisk
from checkpoint_bench.machine import copy, move, spending
from checkpoint_bench.samples import Samples
from checkpoint_bench.states import BenchState
from torchtitan_lite.disk.threads import in_threads

MEMCPY = "memcpy"
MEMCPY_THREADS = 2

PrintProgress = Callable[[str], None]


def measure(
    workload: str,
    state: BenchState,
    contenders: Sequence[Contender],
    folder: Path,
    rounds: int,
    samples: Samples,
    print_progress: PrintProgress,
) -> None:
    """Add to `samples` the saves and the cold and warm loads of `contenders` and of the raw disk, and memory copies."""
    target, buffer = state.like(), disk.Touched(state.num_bytes)
    memcpy(state, buffer)
    raw = [RawDisk(buffer)] if disk.takes_direct(folder) else []
    all_contenders: list[Contender] = [*raw, *contenders]
    for number in range(rounds):
        random.Random(number).shuffle(all_contenders)
        print_progress(f"{workload}: round {number + 1} of {rounds}: {', '.join(each.name for each in all_contenders)}")
        with spending() as spent:
            memcpy(state, buffer)
        samples.add(workload, MEMCPY, "memcpy_seconds", number, spent.seconds)
        for contender in all_contenders:
            _measure_one(workload, contender, state, target, folder / "checkpoint", number, samples)
            if number == 0 and isinstance(contender, RawDisk):
                _assert_holds(buffer, state)
    for contender in all_contenders:
        contender.close()


def memcpy(state: BenchState, to: disk.Touched) -> None:
    """Copy the memory of `state` to `to`, with two threads."""
    copy(state.pieces(), to.address, lambda jobs: in_threads(jobs, MEMCPY_THREADS, lambda: move))


def _measure_one(
    workload: str,
    contender: Contender,
    state: BenchState,
    target: BenchState,
    folder: Path,
    number: int,
    samples: Samples,
) -> None:
    def note(figure: str, value: float) -> None:
        samples.add(workload, contender.name, figure, number, value)

    folder.mkdir()
    with spending() as spent:
        contender.save(state, folder)
    note("save_seconds", spent.seconds)
    note("save_cpu_seconds", spent.cpu_seconds)
    note("file_bytes", disk.num_bytes(folder))
    for kind, prepare in (("cold", disk.make_cold), ("warm", disk.make_warm)):
        if number == 0:
            target.clear()
        note(f"{kind}_cached_part", prepare(folder))
        with spending() as spent:
            contender.load(target, folder, warm=kind == "warm")
        note(f"{kind}_load_seconds", spent.seconds)
        note(f"{kind}_load_cpu_seconds", spent.cpu_seconds)
        if number == 0 and not isinstance(contender, RawDisk):
            state.assert_equals(target, f"{contender.name}, {kind}")
    disk.remove(folder)


def _assert_holds(buffer: disk.Touched, state: BenchState) -> None:
    """Raise unless `buffer`, into which the raw file was read, has the bytes of `state`."""
    view, at = buffer.view(), 0
    for tensor in state.tensors().values():
        count = tensor.numel() * tensor.element_size()
        if bytes(view[at : at + count]) != tensor.contiguous().view(-1).numpy().tobytes():
            raise AssertionError("raw: the bytes read differ from the bytes written")
        at += count
