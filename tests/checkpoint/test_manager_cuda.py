"""A run on a GPU that ends and starts again is the run that did not, in each mode, and no save waits for the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager, TrainState

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
MODES = ["disabled", "async", "async_with_pinned_mem"]
KEYS: dict[str, Any] = {"preemption_signals": (), "memory_ttl_seconds": 0}


class DeviceRun:
    """A model with dropout, and with buffers that forward changes."""

    def __init__(self, folder: Path, seed: int, **keys: Any) -> None:
        torch.manual_seed(seed)
        layers = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(2)]
        self.model = nn.Sequential(*chain(*layers), nn.Linear(64, 64).bfloat16()).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=DEVICE == "cuda")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.progress = TrainState()
        self.manager = CheckpointManager.for_loop(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            states={"train_state": self.progress},
            folder=folder,
            **KEYS | keys,
        )

    def step(self) -> float:
        batch = torch.rand(32, 64, device=DEVICE)  # From the generator of the device, which is saved, too.
        loss = self.model[-1](self.model[:-1](batch).bfloat16()).float().square().mean()
        loss.backward()
        self.manager.maybe_wait_for_staging()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.progress.step += 1
        return loss.item()

    def steps(self, number: int) -> list[float]:
        """Train, and save where that is due; return the losses."""
        losses = []
        for _ in range(number):
            losses.append(self.step())
            self.manager.save(self.progress.step)
        return losses


@contextmanager
def starting(folder: Path, seed: int, **keys: Any) -> Iterator[DeviceRun]:
    run = DeviceRun(folder, seed, **keys)
    with run.manager:
        if not run.manager.load():
            run.manager.reset()
        yield run


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_starts_again_has_the_losses_of_one_that_does_not(mode: str, tmp_path: Path) -> None:
    keys = {"interval": 2, "async_mode": mode, "digest_tensors": ["save", "load"]}
    with starting(tmp_path / "straight", 1, **keys) as run:
        straight = run.steps(12)
    losses: list[float] = []
    for seed in (1, 2, 3):
        with starting(tmp_path / "run", seed, **keys) as run:
            assert run.progress.step == len(losses)
            losses += run.steps(4)
    assert losses == straight


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_later_save_does_not_wait_for_the_gpu(mode: str, tmp_path: Path) -> None:
    with starting(tmp_path, 1, interval_type="none", async_mode=mode) as run:
        for step in (1, 2):
            run.step()
            run.manager.save(step, now=True)
            run.manager.wait()
        run.step()
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            torch.cuda._sleep(1_000_000_000)
        ended = torch.Event(DEVICE) if DEVICE == "cuda" else None
        if ended is not None:
            ended.record()
        try:
            run.manager.save(3, now=True)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert ended is None or not ended.query(), "the call waited for what the GPU had to do"


FROM_MEMORY = """
import os, queue, signal, sys
from pathlib import Path
from tests.checkpoint import test_manager_cuda as runs
runs.DEVICE, images = sys.argv[2], queue.Queue()
def on_event(event, step, /, **figures):
    if event in ("image_ready", "image_missed"):
        images.put(event)
    if event == "loaded":
        print(figures["origin"])
keys = {"interval_type": "none", "async_mode": "async", "memory_interval": 1, "memory_ttl_seconds": 60}
with runs.starting(Path(sys.argv[1]), 1 if sys.argv[3] == "first" else 2, on_event=on_event, **keys) as run:
    losses = run.steps(1)
    if sys.argv[3] == "first":
        while images.get(timeout=60) != "image_ready" and len(losses) < 1000:
            losses += run.steps(1)  # Its memory was still being made.
    print(losses, flush=True)
    if sys.argv[3] == "first":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("memory_tier")
def test_a_killed_run_continues_from_its_image_in_memory(tmp_path: Path) -> None:
    def start(which: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", FROM_MEMORY, str(tmp_path / "run"), DEVICE, which]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert ended.returncode == (-signal.SIGKILL if which == "first" else 0), ended.stderr
        return ended.stdout.splitlines()

    [first], [source, second] = start("first"), start("second")
    losses = [*json.loads(first), *json.loads(second)]
    with starting(tmp_path / "straight", 1, interval_type="none") as run:
        straight = run.steps(len(losses))
    assert source == "memory"
    assert losses == straight
