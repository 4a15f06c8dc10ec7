"""A loop that rolls back where a batch is poisoned, and the run that was never given that batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tests.checkpoint.small_run import SmallRun, loss_of
from torchtitan_lite.store import layout

StartRun = Callable[..., SmallRun]
STEPS = 12


def train(run: SmallRun, *, poisoned: Collection[int], steps: int = STEPS, ends: bool = True, **limits: int) -> None:
    """Train as a loop of one's own: skip what the manager says, and roll back where a batch is poisoned."""
    while run.train_state.step < steps:
        step = run.train_state.step + 1
        for _ in range(run.manager.batches_to_skip(step)):
            next(run.loader)
        number = run.loader.state["position"] + 1
        batch = next(run.loader)
        if number in poisoned:
            assert run.manager.roll_back(step, "loss is nan", **limits) == run.train_state.step < step
            continue
        run.take_step(partial(loss_of, batch=batch))
        run.manager.save(run.train_state.step, force=ends and run.train_state.step == steps)


def straight(start_run: StartRun, *, without: Collection[int]) -> dict[str, Any]:
    """Return the contents of a run that was given the batches in their order, without some, and never rolled back."""
    run = start_run(interval=100)
    for number in range(1, STEPS + len(without) + 1):
        batch = next(run.loader)
        if number not in without:
            run.take_step(partial(loss_of, batch=batch))
    return run.contents()


def record(run: SmallRun) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.root / layout.ROLLBACKS).read_bytes())["rollbacks"]
    return found
