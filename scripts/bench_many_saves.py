"""Measure what a process keeps of each save: memory, objects, descriptors, threads and mappings, in every mode.

    python scripts/bench_many_saves.py --json many_saves.json
    python scripts/bench_many_saves.py --quick

Each mode has a process of its own, which trains a tiny model and saves after every step; `no saves` is the same loop
without. At every tenth step it waits for the save and for its threads to end, collects garbage, and notes what it has,
and what its helpers have: the writer process and the one that keeps in-memory snapshots. The median of the last saves
is compared with that of as many before. `RSS` is private memory; `heap`, what the C library has given out; `objects`,
Python's. The exit code is 1 if a figure grew beyond its bound; a --quick run is too
short for that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpoint_bench import machine
from checkpoint_bench.machine import descendants

ROOT = Path(__file__).resolve().parents[1]
NO_SAVES, LEAK = "no saves", "leak"
MODES = (NO_SAVES, "disabled", "async", "async_with_pinned_mem")
EVERY = 10
"""Steps from one look to the next."""
LEAKED_BYTES = 300
"""What `leak` keeps of each save, with a descriptor."""
BOUNDS = {"rss": 200.0, "heap": 100.0, "objects": 0.5, "descriptors": 0.004, "threads": 0.004, "mappings": 0.02}
"""Growth per save that is not flat. Bytes for the first two: the C library frees no memory below what is in use, so RSS
moves with the order in which threads end."""
UNITS = {"rss": "kB", "heap": "kB"}
SHORT = {"descriptors": "fds", "mappings": "maps"}
DEADLINE_SECONDS = 3600

Looks = list[dict[str, float]]


def main() -> int:
    """Print a table; return 1 if anything grew, or a leak was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=2000, help="of each mode (2000)")
    parser.add_argument("--window", type=int, default=500, help="the last saves, compared with as many before (500)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--leak", action="store_true", help="also keep something of each save, which is to be found")
    parser.add_argument("--quick", action="store_true", help="a run that only shows that everything works")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _train(**json.loads(args.child))
        return 0
    saves, window = (300, 100) if args.quick else (args.saves, args.window)
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    found = {}
    for mode in (*args.modes, LEAK) if args.leak else args.modes:
        print(f"  {mode}: {saves} saves", file=sys.stderr, flush=True)
        found[mode] = _in_process(place, mode, saves)
    grown = [*grown_in(found, window)]
    print("\n".join(_table(found, window)))
    print("\n".join(f"GROWS: {mode}, {what}" for mode, what in grown) or "Nothing grows beyond its bound.")
    if args.json:
        document = {"machine": machine.facts(place), "saves": saves, "window": window, "looks": found}
        Path(args.json).write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0 if args.quick or {mode for mode, _ in grown} == ({LEAK} if args.leak else set()) else 1


def change(looks: Looks, figure: str, window: int) -> tuple[float, float]:
    """Return the median of `figure` over the last `window` saves, and how much it is above that of those before."""
    last = looks[-1]["save"]
    new, old = (
        statistics.median(each[figure] for each in looks if end - window < each["save"] <= end)
        for end in (last, last - window)
    )
    return new, new - old


def grown_in(found: dict[str, Looks], window: int) -> Iterator[tuple[str, str]]:
    """Yield each mode in which something grew beyond its bound, and what did."""
    for mode, looks in found.items():
        for who in ("trainer", "helpers"):
            for figure, bound in BOUNDS.items():
                if (name := f"{who}_{figure}") in looks[-1] and (by := change(looks, name, window)[1] / window) > bound:
                    yield mode, f"{who}: {by:.3g} {'bytes' if figure in UNITS else figure} each save"


def _table(found: dict[str, Looks], window: int) -> Iterator[str]:
    heads = [f"{SHORT.get(each, each)} {UNITS.get(each, '')}".strip() for each in BOUNDS]
    yield f"{f'last {window}, and growth':<21}" + _row(heads)
    for mode, looks in found.items():
        helpers = looks[-1]["helpers"]
        for who, name in (("trainer", mode), ("helpers", f"  helpers: {helpers:.0f}")):
            if who == "trainer" or helpers:
                yield f"{name:<21}" + _row([_cell(looks, f"{who}_{figure}", window) for figure in BOUNDS])


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (11, 11, 13, 8, 8, 8), strict=True))


def _cell(looks: Looks, name: str, window: int) -> str:
    if name not in looks[-1]:
        return "-"
    scale = 1000 if name.partition("_")[2] in UNITS else 1
    value, by = (each / scale for each in change(looks, name, window))
    return f" {value:.0f}{by:+.0f}"


def _in_process(place: Path, mode: str, saves: int) -> Looks:
    with tempfile.TemporaryDirectory(prefix="bench-many-saves-", dir=place) as folder:
        command = [sys.executable, __file__, "--child", json.dumps({"folder": folder, "mode": mode, "saves": saves})]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": folder}
        done = subprocess.run(
            command, env=os.environ | own, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS
        )
    if done.returncode:
        sys.exit("a process failed; see above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _train(folder: str, mode: str, saves: int) -> None:
    """Train, save after each step as `mode` says, and print the looks, so that none is kept."""
    import torch

    from torchtitan_lite.checkpoint import CheckpointManager, TrainState

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    optimizer, progress, kept = torch.optim.AdamW(model.parameters()), TrainState(), []
    root = Path(folder, "checkpoint")
    with CheckpointManager.for_loop(
        model=model,
        optimizer=optimizer,
        states={"train_state": progress},
        folder=root,
        interval=1,
        async_mode="disabled" if mode in (NO_SAVES, LEAK) else mode,
        keep_latest_k=2,
    ) as manager:
        manager.load()
        manager.reset()
        for step in range(1, saves + 1):
            model(torch.randn(4, 64)).square().mean().backward()
            manager.maybe_wait_for_staging()
            optimizer.step()
            optimizer.zero_grad()
            progress.step = step
            if mode != NO_SAVES:
                manager.save(step)
            if mode == LEAK:
                kept.append((bytes([step % 256]) * LEAKED_BYTES, os.open(os.devnull, os.O_RDONLY)))
            if step % EVERY == 0:
                manager.wait()
                print(json.dumps(_look(step, root)), flush=True)


def _look(step: int, root: Path) -> dict[str, float]:
    """Return what this process and its helpers have."""
    from torchtitan_lite.distributed.environment import runtime_folder
    from torchtitan_lite.memory.keeper.client import Keeper

    for thread in threading.enumerate():
        if thread.name in ("checkpoint", "housekeeping"):
            thread.join()
    gc.collect()
    gc.freeze()  # The next collection has only new objects to look at.
    helpers = [*descendants(os.getpid())]
    if (keeper := Keeper(root, 0.0, runtime=runtime_folder()).describe()) is not None:
        helpers.append(keeper.pid)
    found: dict[str, float] = {"save": step, "helpers": len(helpers)}
    found |= {f"trainer_{name}": value for name, value in _of_process(os.getpid()).items()}
    found |= {"trainer_objects": sys.getallocatedblocks(), "trainer_heap": _heap_bytes()}
    for pid in helpers:
        for name, value in _of_process(pid).items():
            found[f"helpers_{name}"] = found.get(f"helpers_{name}", 0) + value
    return found


def _of_process(pid: int) -> dict[str, float]:
    process = Path(f"/proc/{pid}")
    (rss,) = [line.split()[1] for line in (process / "status").read_text().splitlines() if line.startswith("RssAnon:")]
    return {
        "rss": int(rss) * 1024,
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "mappings": len((process / "maps").read_text(errors="replace").splitlines()),
    }


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"123", "hblkhd", *"56", "uordblks", *"78")]


_LIBRARY = ctypes.CDLL(None)


def _heap_bytes() -> int:
    """Return the bytes that the C library has given out; 0 where it does not say (glibc before 2.33, others)."""
    if not hasattr(_LIBRARY, "mallinfo2"):
        return 0
    _LIBRARY.mallinfo2.restype = _MallocInfo
    found = _LIBRARY.mallinfo2()
    return int(found.uordblks + found.hblkhd)


if __name__ == "__main__":
    sys.exit(main())
