"""The second due save of a tiny loop, traced until it is committed: files, rooms, depth, and whose calls they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

RUNS = 5
KEYS = ("files", "changes of room", "depth", "calls", "calls of store/")

TRACED = """
import json, sys, tempfile, threading, time
from pathlib import Path
import torch
import torchtitan_lite
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

root, calls = str(Path(torchtitan_lite.__file__).parent), []
loaded = sum(name.startswith("torchtitan_lite") for name in sys.modules)
depths, deepest = {}, 0

def note(frame, event, argument):
    global deepest
    path = frame.f_code.co_filename
    if path.startswith(root) and event in ("call", "return"):
        thread = threading.get_ident()
        depths[thread] = max(0, depths.get(thread, 0) + (1 if event == "call" else -1))
        deepest = max(deepest, depths[thread])
        if event == "call":
            calls.append((thread, path[len(root) + 1 :]))

model, state = torch.nn.Linear(4, 4), TrainState()
optimizer = torch.optim.AdamW(model.parameters())
options = dict(interval=2, async_mode="async", memory_ttl_seconds=float(sys.argv[1]))
with tempfile.TemporaryDirectory() as folder, CheckpointManager.for_loop(
    model=model, optimizer=optimizer, states={"train_state": state}, folder=f"{folder}/checkpoint", **options
) as manager:
    manager.load()
    manager.reset()
    while state.step < 4:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step == 4:
            threading.setprofile(note)
            sys.setprofile(note)
        manager.save(state.step)
    sys.setprofile(None)
    threading.setprofile(None)
    time.sleep(0.5)  # The threads that began in the save are traced to their end.
last, changes = {}, 0
for thread, path in calls:
    room = str(Path(path).parent)
    if room == ".":
        continue
    changes += last.setdefault(thread, room) != room
    last[thread] = room
store = sum(path.startswith("store/") for _, path in calls)
print(json.dumps([len({path for _, path in calls}), changes, deepest, len(calls), store, loaded]))
"""


def rows(root: Path) -> list[tuple[str, object]]:
    """Return the figures of a due save in the checkout `root`, medians of `RUNS` runs: some threads end later."""
    found: list[tuple[str, object]] = []
    for kept, seconds in (("on", "600"), ("off", "0")):
        runs = [_traced(root, seconds) for _ in range(RUNS)]
        figures = [median(values) for values in zip(*runs, strict=True)]
        found += [(f"{key} of a due save, copies {kept}", value) for key, value in zip(KEYS, figures, strict=False)]
    found.append(("modules of the package after the import of its manager", figures[-1]))
    return found


def _traced(root: Path, memory_ttl_seconds: str) -> list[Any]:
    command = [sys.executable, "-c", TRACED, memory_ttl_seconds]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    figures: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
