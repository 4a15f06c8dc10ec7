"""Measure what images in memory every step (checkpoint.memory_interval = 1) add to a step, next to a plain copy.

    python scripts/bench_images.py
    python scripts/bench_images.py --params 0.8 168 --steps 15 --json images.json

One process trains a model of `--params` million parameters with AdamW (12 bytes of state for each). Blocks of steps
with images and without take turns, because absolute figures drift. A step is timed from the end of the last one to the
end of the call of `save`; what runs during the next step counts with it. `memcpy` is what two threads need to copy the
same tensors into memory that has been touched. The target: an image adds at most 1.3 x memcpy + 10 ms.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.disk.threads import in_threads

WIDTH = 1024
BLOCKS = 3
TARGET_RATIO, TARGET_SECONDS = 1.3, 0.010


def main() -> int:
    """Run the command; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, nargs="+", default=[0.8, 168.0], help="million parameters")
    parser.add_argument("--steps", type=int, default=12, help="steps of each block")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    found = []
    for params in args.params:
        each = _measure(round(params * 1e6), args.steps)
        found.append(each)
        print(_line(each), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(each["added_seconds"] > each["target_seconds"] for each in found))


def _line(each: dict[str, Any]) -> str:
    of = {name: f"{1e3 * value:.1f} ms" for name, value in each.items() if name.endswith("_seconds")}
    return (
        f"{each['params'] / 1e6:.1f} M parameters, {each['bytes'] / 1e6:.0f} MB: a step takes {of['plain_seconds']}, "
        f"with an image {of['image_seconds']}: {of['added_seconds']} more, of which save blocks "
        f"{of['blocked_seconds']}; memcpy {of['memcpy_seconds']}, target {of['target_seconds']}; "
        f"{each['images']} images in {each['steps']} steps"
    )


def _measure(params: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # The sockets of keepers of real runs stay out of this.
        os.environ["XDG_RUNTIME_DIR"] = folder
        return _measured_in(folder, params, steps)


def _measured_in(folder: str, params: int, steps: int) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, params // WIDTH**2))))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ready: list[int] = []

    def on_event(event: str, step: int, /, **figures: Any) -> None:
        if event == "image_ready":
            ready.append(step)

    plain: list[float] = []
    images: list[float] = []
    blocked: list[float] = []
    _train(model, optimizer)  # The moments are there after a step.
    tensors = [each for p in model.parameters() for each in (p, *optimizer.state[p].values()) if each.dim()]
    num_bytes = sum(each.nbytes for each in tensors)
    memcpy = [_seconds_of_copies(tensors)]  # Before and after: its target is not there while steps are measured.
    keys = {
        "preemption_signals": (),
        "interval_type": "none",
        "async_mode": "async_with_pinned_mem",
        "memory_interval": 1,
    }
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=Path(folder) / "checkpoint", on_event=on_event, **keys
    ) as manager:
        manager.load()
        step = 0
        for number in range(2 * BLOCKS + 1):
            for _ in range(steps):
                step += 1
                began = time.perf_counter()
                _train(model, optimizer)
                trained = time.perf_counter()
                if number % 2 == 1 or number == 0:
                    manager.save(step)
                ended = time.perf_counter()
                if number > 0:
                    (images if number % 2 == 1 else plain).append(ended - began)
                if number % 2 == 1:
                    blocked.append(ended - trained)
    memcpy.append(_seconds_of_copies(tensors))
    added = statistics.median(images) - statistics.median(plain)
    return {
        "params": params,
        "bytes": num_bytes,
        "plain_seconds": statistics.median(plain),
        "image_seconds": statistics.median(images),
        "added_seconds": added,
        "blocked_seconds": statistics.median(blocked),
        "memcpy_seconds": statistics.mean(memcpy),
        "target_seconds": TARGET_RATIO * statistics.mean(memcpy) + TARGET_SECONDS,
        "images": len(ready),
        "steps": (BLOCKS + 1) * steps,
    }


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(32, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _seconds_of_copies(tensors: Sequence[torch.Tensor]) -> float:
    """Return the median seconds of five copies of `tensors` by two threads into memory that has been touched."""
    targets = [torch.ones_like(tensor) for tensor in tensors]
    pairs = zip(targets, tensors, strict=True)
    parts = [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in pairs]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        in_threads(parts, 2, lambda: lambda part: ctypes.memmove(*part))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
