"""Measure loads that follow one another on a host: of this package, past the page cache, and of torch.load, through it.

    python scripts/bench_second_load.py --rounds 5

Every load is a process of its own, as after a crash, or of an evaluation next to the training. Before the first load of
a round the page cache has nothing of the files. torch.load reads into new tensors; with mmap it maps the file, and the
tensors are copied into the model's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("ours", "torch.load", "mmap and copy")
WIDTH = 2048
DEADLINE_SECONDS = 300


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=2048, help="size of the model (default: 2048)")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _process(**json.loads(args.child))
        return 0
    found: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        _in_process(folder=folder, mb=args.mb, kind="save")
        for number in range(args.rounds):
            for kind in random.Random(number).sample(KINDS, len(KINDS)):
                _make_cold(Path(folder))
                for load in (1, 2):
                    found.setdefault((kind, load), []).append(_in_process(folder=folder, mb=args.mb, kind=kind))
    print(f"{'':14}{'first s':>26}{'second s':>26}")
    for kind in KINDS:
        print(f"{kind:14}{_figure(found[kind, 1]):>26}{_figure(found[kind, 2]):>26}")
    return 0


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _make_cold(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _in_process(**job: Any) -> float:
    """Run `job` in a process of its own; return the seconds that it took there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHTITAN_LITE_MEMORY": "off"}
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS)
    if done.returncode:
        sys.exit("a process failed; see above")
    return float(done.stdout.splitlines()[-1])


def _process(folder: str, mb: int, kind: str) -> None:
    """Save, or load, and print the seconds."""
    import torch

    from torchtitan_lite.checkpoint import CheckpointManager

    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range((mb << 20) // (4 * WIDTH**2)))
    )
    path = Path(folder, "model.pt")
    if kind in ("ours", "save"):
        options: dict[str, Any] = {"load_only": kind == "ours"}
        with CheckpointManager.for_loop(model=model, folder=Path(folder, "checkpoint"), **options) as manager:
            began = time.monotonic()
            manager.load()
            seconds = time.monotonic() - began
            if kind == "save":
                manager.save(1, now=True)
                torch.save(model.state_dict(), path)
    else:
        began = time.monotonic()
        loaded = torch.load(path, weights_only=True, mmap=kind != "torch.load")
        if kind != "torch.load":
            model.load_state_dict(loaded)
        seconds = time.monotonic() - began
    print(seconds)


if __name__ == "__main__":
    sys.exit(main())
