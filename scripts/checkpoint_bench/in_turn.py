"""Saves and loads while the caller waits: every contender once in each round, in another order each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint_bench import disk
from checkpoint_bench.contenders import Contender, RawDisk
from checkpoint_bench.machine import copy, move, spending
from checkpoint_bench.samples import Samples
from checkpoint_bench.states import BenchState
from torchtitan_lite.disk.in_threads import in_threads

MEMCPY = "memcpy"
MEMCPY_THREADS = 2

Tell = Callable[[str], None]


def measure(
    workload: str,
    state: BenchState,
    contenders: Sequence[Contender],
    folder: Path,
    rounds: int,
    samples: Samples,
    tell: Tell,
) -> None:
    """`samples` has saves, cold and warm loads of `state` by each of `contenders`, by the raw disk, and copies."""
    target, buffer = state.like(), disk.Touched(state.num_bytes)
    memcpy(state, buffer)
    raw = [RawDisk(buffer)] if disk.takes_direct(folder) else []
    everyone: list[Contender] = [*raw, *contenders]
    for number in range(rounds):
        random.Random(number).shuffle(everyone)
        tell(f"{workload}: round {number + 1} of {rounds}: {', '.join(each.name for each in everyone)}")
        with spending() as spent:
            memcpy(state, buffer)
        samples.add(workload, MEMCPY, "memcpy_seconds", number, spent.seconds)
        for contender in everyone:
            _measure_one(workload, contender, state, target, folder / "checkpoint", number, samples)
            if number == 0 and isinstance(contender, RawDisk):
                _assert_holds(buffer, state)
    for contender in everyone:
        contender.close()


def memcpy(state: BenchState, to: disk.Touched) -> None:
    """The memory of `state` is in `to`, copied by two threads."""
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
    for kind, make_so in (("cold", disk.make_cold), ("warm", disk.make_warm)):
        if number == 0:
            target.clear()
        note(f"{kind}_cached_part", make_so(folder))
        with spending() as spent:
            contender.load(target, folder, warm=kind == "warm")
        note(f"{kind}_load_seconds", spent.seconds)
        note(f"{kind}_load_cpu_seconds", spent.cpu_seconds)
        if number == 0 and not isinstance(contender, RawDisk):
            state.assert_equals(target, f"{contender.name}, {kind}")
    disk.remove(folder)


def _assert_holds(buffer: disk.Touched, state: BenchState) -> None:
    """Raises unless `buffer`, which the raw disk was read into, has the bytes of `state`."""
    view, at = buffer.view(), 0
    for tensor in state.tensors().values():
        count = tensor.numel() * tensor.element_size()
        if bytes(view[at : at + count]) != tensor.contiguous().view(-1).numpy().tobytes():
            raise AssertionError("raw: what was read is not what was written")
        at += count
