"""Measure a load from images in memory, next to a plain copy into the same memory and `dcp.load` of warm files.

    python scripts/bench_memory_load.py --rounds 5

Each round measures everything once, in a new order; a figure is a median, with the lowest and the highest next to it.
"touched" is memory that the process has written to before, "fresh" is memory that the kernel has yet to give: that
costs most of the time there. The copies use as many threads as the load, and copy out of memory that is mapped already;
a load maps it. Every load is compared with what was saved, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_bench import ours, states
from checkpoint_bench.states import BenchState

from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.mapped_reader import THREADS, FilesInMemory
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest

_COPY_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=int, default=168_000_000, help="each with two moments of AdamW in float32")
    parser.add_argument("--folder", type=Path, default=None, help="where to save; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args.params, args.rounds, Path(folder))


def measure(params: int, rounds: int, folder: Path) -> None:
    """Print the medians of all contenders over `rounds`."""
    state = states.llama_state(params)
    saver = ours.Ours()
    saver.save(state, folder / "ours")
    saver.close()
    dcp.save(state.nested(), checkpoint_id=folder / "dcp")
    files = in_memory(folder / "ours" / layout.step_dir(1))
    peers = Peers(timedelta(seconds=600))
    touched = state.like()

    def load(target: BenchState) -> None:
        ours.load(target, folder, peers, "full", files)
        files.close()

    def copy(target: BenchState) -> None:
        pairs = zip(target.pieces(), state.pieces(), strict=True)
        parts = [
            (to + at, source + at, min(_COPY_BYTES, count - at))
            for (to, count), (source, _) in pairs
            for at in range(0, count, _COPY_BYTES)
        ]
        in_threads(parts, THREADS, lambda: lambda part: ctypes.memmove(*part))

    def load_dcp(target: BenchState) -> None:
        dcp.load(target.nested(), checkpoint_id=folder / "dcp")

    contenders: dict[str, tuple[Callable[[BenchState], None], bool]] = {
        "copy, touched": (copy, False),
        "memory, touched": (load, False),
        "copy, fresh": (copy, True),
        "memory, fresh": (load, True),
        "dcp.load, warm, touched": (load_dcp, False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in random.sample([*contenders], len(contenders)):
            act, is_fresh = contenders[name]
            target = fresh_like(state) if is_fresh else touched
            if not is_fresh:
                target.clear()
            began = time.perf_counter()
            act(target)
            if number:  # The first round warms up.
                seconds[name].append(time.perf_counter() - began)
            elif not name.startswith("copy"):
                state.assert_equals(target, name)
            del target
    report(seconds, state.num_bytes)


def in_memory(folder: Path) -> FilesInMemory:
    """Return the files of the checkpoint in `folder`, copied into memory as the images of their ranks."""
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    records = {name: record for name, record in manifest.files.items() if name != layout.METADATA}
    images = {}
    for name, record in records.items():
        arena = StagingArena(record.size)
        arena.allocate()
        images[name] = os.dup(arena.fd)
        with (folder / name).open("rb") as file:
            assert file.readinto(arena.memory) == record.size
        arena.forget()
    return FilesInMemory(dataclasses.replace(manifest, files=records), images)


def fresh_like(state: BenchState) -> BenchState:
    """Return a state with the same tensors in memory that no one has touched."""

    def fresh(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty_like(each) if each.numel() * each.element_size() >= 64 << 20 else room(each)
            for name, each in tensors.items()
        }

    memory = torch.empty(state.num_bytes + 64 * len(state.tensors()), dtype=torch.uint8)
    used = 0

    def room(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        begin = used
        used += -(-tensor.numel() * tensor.element_size() // 64) * 64
        part = memory[begin : begin + tensor.numel() * tensor.element_size()]
        return part.view(tensor.dtype).view(tensor.shape)

    return BenchState(fresh(state.model), fresh(state.optimizer), {"step": 0, "losses": []})


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    """Print each contender's seconds, and the ratios that matter within a round."""
    print(f"{num_bytes / 2**30:.2f} GiB, {len(next(iter(seconds.values())))} rounds, seconds: median (lowest, highest)")
    for name, each in seconds.items():
        print(f"  {name:26} {statistics.median(each):6.3f} ({min(each):.3f}, {max(each):.3f})")
    for over, under in (
        ("memory, touched", "copy, touched"),
        ("memory, fresh", "copy, fresh"),
        ("dcp.load, warm, touched", "memory, touched"),
    ):
        ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
        print(f"  {over} / {under}: {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")


if __name__ == "__main__":
    main()
