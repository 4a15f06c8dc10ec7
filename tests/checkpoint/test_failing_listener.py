"""A caller's `on_event` that raises on one rank neither stops that rank nor leaves the others waiting for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager


@on_two_ranks
def test_an_event_that_a_rank_cannot_take_is_a_warning_on_it(rank: int, tmp_path: Path) -> None:
    def on_event(event: str, step: int, /, **figures: Any) -> None:
        if rank == 0:
            raise OSError("no space for events")

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"on_event": on_event, "preemption_signals": (), "timeout_seconds": 20}
    with CheckpointManager.for_loop(model=model, folder=tmp_path, **options) as manager:
        manager.load()
        with logged_warnings() as found:
            assert manager.save(1, force=True)
            assert manager.latest_step() == 1
    wanted = "on_event failed for save_started of step 1: OSError: no space for events"
    assert (wanted in found) == (rank == 0)


def test_a_listener_that_exits_ends_neither_the_loop_nor_a_thread(tmp_path: Path) -> None:
    def on_event(event: str, step: int, /, **figures: Any) -> None:
        sys.exit(f"no\n{event}")

    options: dict[str, Any] = {"on_event": on_event, "preemption_signals": (), "timeout_seconds": 5}
    options |= {"interval": 1, "keep_latest_k": 1, "async_mode": "async"}
    with logged_warnings() as found:
        with CheckpointManager.for_loop(model=nn.Linear(2, 2), folder=tmp_path, **options) as manager:
            manager.load()
            assert [manager.save(step) for step in (1, 2)] == [True, True]
        assert "on_event failed for purged of step 1: SystemExit: no purged" in found
        assert all(line.startswith("on_event failed for ") for line in found)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
