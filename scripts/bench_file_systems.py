"""Measure saves and loads on file systems, next to what dd and dcp.save reach there, in one run.

    python scripts/bench_file_systems.py FOLDER [FOLDER ...] [--mb 256] [--rounds 5]

A state of `--mb` MB is saved and loaded in every FOLDER once in each round, in a new order; figures are medians, in MB
per second. Every save ends with fsync. Before a load the files are dropped from the page cache of this machine; what a
server of the file system keeps stays there. dd writes in blocks of 4 MiB and reads in blocks as large as our requests;
`direct` bypasses the page cache, and is left out where the file system refuses that. The last column of a line is the
speed divided by that of the best of the others: of both dd and dcp for a save, of both dd for a load.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_checkpoint import be_quiet
from checkpoint_bench import disk
from checkpoint_bench.contenders import Contender, Dcp, join_group_of_one
from checkpoint_bench.ours import Ours
from checkpoint_bench.states import BenchState, llama_state

from torchtitan_lite.disk.block_writer import aligned
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.disk.read_requests import REQUEST_BYTES

OURS = "ours"
WRITE_BYTES = 4 << 20
_BYTES_OF_A_PARAMETER = 12
"""With its state of AdamW."""


class Dd:
    """dd, of a file of `num_bytes` in memory."""

    who_syncs = "itself: fsync"

    def __init__(self, source: Path, *, direct: bool) -> None:
        self.name = "dd direct" if direct else "dd"
        self._source, self._direct = source, direct

    def save(self, state: BenchState, folder: Path) -> None:
        flags = ["oflag=direct"] if self._direct else []
        _dd(f"if={self._source}", f"of={folder / 'dd'}", f"bs={WRITE_BYTES}", "conv=fsync", *flags)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        flags = ["iflag=direct"] if self._direct else []
        _dd(f"if={folder / 'dd'}", "of=/dev/null", f"bs={REQUEST_BYTES}", *flags)

    def close(self) -> None: ...


def main() -> int:
    """Print a table for each folder. Return 2 if one cannot be used."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]  # it is there
    arguments.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    arguments.add_argument("--mb", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    be_quiet()
    join_group_of_one()
    state = llama_state(options.mb * 1_000_000 // _BYTES_OF_A_PARAMETER)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory:
        source = Path(memory) / "source"
        with source.open("wb") as file:
            for tensor in state.tensors().values():
                file.write(tensor.reshape(-1).numpy())
            file.truncate(aligned(state.num_bytes))
        for folder in options.folders:
            try:
                with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as trial:
                    found = _measured(Path(trial), state, source, options.rounds)
            except OSError as error:
                print(f"{folder} cannot be used: {error}", file=sys.stderr)
                return 2
            print(
                _table(f"{folder} ({mount_of(folder)}), {state.num_bytes / 1e6:.0f} MB", found, state.num_bytes),
                flush=True,
            )
    return 0


def _measured(folder: Path, state: BenchState, source: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the saves and the loads of each contender."""
    target = state.like()
    direct = [Dd(source, direct=True)] if disk.takes_direct(folder) else []
    contenders: list[Contender] = [Dd(source, direct=False), *direct, Dcp(), Ours()]
    seconds: dict[str, dict[str, list[float]]] = {"save": defaultdict(list), "load": defaultdict(list)}
    for number in range(rounds):
        random.Random(number).shuffle(contenders)
        for each in contenders:
            place = folder / f"{each.name} {number}"
            place.mkdir()
            seconds["save"][each.name].append(_timed(lambda each=each, place=place: each.save(state, place)))  # type: ignore[misc]
            if not isinstance(each, Dcp):
                disk.make_cold(place)
                seconds["load"][each.name].append(
                    _timed(lambda each=each, place=place: each.load(target, place, warm=False))  # type: ignore[misc]
                )
            if number == 0 and isinstance(each, Ours):
                state.assert_equals(target, each.name)
            disk.remove(place)
    for each in contenders:
        each.close()
    return seconds


def _table(title: str, seconds: dict[str, dict[str, list[float]]], num_bytes: int) -> str:
    lines = [title]
    for kind, rivals in (("save", ("dd", "dd direct", "dcp")), ("load", ("dd", "dd direct"))):
        speed = {name: num_bytes / 1e6 / statistics.median(values) for name, values in seconds[kind].items()}
        figures = ", ".join(f"{name} {speed[name]:.0f}" for name in sorted(speed))
        best = max(speed[name] for name in rivals if name in speed)
        spread = [min(seconds[kind][OURS]), max(seconds[kind][OURS])]
        span = " to ".join(f"{num_bytes / 1e6 / value:.0f}" for value in reversed(spread))
        lines.append(f"  {kind}: {figures} (ours {span}): {speed[OURS] / best:.2f}")
    return "\n".join(lines)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _dd(*arguments: str) -> None:
    command: Sequence[str] = ("dd", *arguments)
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
