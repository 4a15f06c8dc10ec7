"""Two ranks, one of which raises by itself: both raise the same error at once, and neither waits for the other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.sharded_run import at_steps, sharded_run
from tests.checkpoint.small_run import SmallRun
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.checkpoint.state.optimizer_state import ParameterSlot
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointUnreadable, FolderUnusable

PEERS_SECONDS = 60


class Failing:
    """A state that raises in the method that `fails_in` names."""

    def __init__(self) -> None:
        self.fails_in = ""

    def state_dict(self) -> dict[str, Any]:
        self._maybe_raise("state_dict")
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._maybe_raise("load_state_dict")

    def _maybe_raise(self, place: str) -> None:
        if place == self.fails_in:
            raise RuntimeError(f"rank 1 raised in {place}")


def saved(folder: Path, **options: Any) -> SmallRun:
    """Save step 1 with one run; return another run in the same folder."""
    with (run := sharded_run(folder, loader=Failing(), seams={"save_policy": at_steps(1)}, **options)).manager:
        run.train(1, last=False)
    return sharded_run(folder, loader=Failing(), **options)


@on_two_ranks
def test_a_state_that_raises_during_a_load(rank: int, tmp_path: Path) -> None:
    for place in ("state_dict", "load_state_dict"):
        run = saved(tmp_path / place)
        state: Any = run.manager._run.small["dataloader"]
        state.fails_in = place if rank == 1 else ""
        with pytest.raises(RuntimeError, match=f"rank 1 raised in {place}"), run.manager:
            run.manager.load()


@pytest.mark.slow
@on_two_ranks
def test_an_optimizer_and_a_model_that_raise_during_a_load(rank: int, tmp_path: Path) -> None:
    def raises(*_: Any) -> None:
        raise RuntimeError("rank 1 raised in its hook")

    hooks: list[Callable[[SmallRun], Any]] = [
        lambda run: run.optimizer.register_load_state_dict_pre_hook(raises),
        lambda run: run.optimizer.register_state_dict_post_hook(raises),
        lambda run: run.model.register_load_state_dict_post_hook(raises),
        lambda run: run.model.register_state_dict_post_hook(raises),
    ]
    for number, hook in enumerate(hooks):
        run = saved(tmp_path / str(number))
        if rank == 1:
            hook(run)
        with pytest.raises(RuntimeError, match="rank 1 raised in its hook"), run.manager:
            run.manager.load()


@on_two_ranks
def test_a_model_that_raises_while_it_is_digested_after_a_load(rank: int, tmp_path: Path) -> None:
    run = saved(tmp_path, digest_tensors=("save", "load"))
    is_loaded: list[bool] = []

    def note(*_: Any) -> None:
        is_loaded.append(True)

    def raise_then(*_: Any) -> None:
        if is_loaded:
            raise RuntimeError("rank 1 raised when it was verified")

    if rank == 1:
        run.model.register_load_state_dict_post_hook(note)
        run.model.register_state_dict_post_hook(raise_then)
    with pytest.raises(RuntimeError, match="rank 1 raised when it was verified"), run.manager:
        run.manager.load()


@on_two_ranks
def test_an_optimizer_that_raises_where_a_run_that_rolls_back_looks_at_it(rank: int, tmp_path: Path) -> None:
    is_loaded: list[bool] = []

    def note(*_: Any) -> None:
        is_loaded.append(True)

    def raise_then(*_: Any) -> None:
        if is_loaded:
            raise RuntimeError("rank 1 raised after its load")

    run = sharded_run(tmp_path, interval=1)
    with run.manager:
        run.manager.load()
        run.train(1, last=False)
        if rank == 1:
            run.optimizer.register_load_state_dict_post_hook(note)
            run.optimizer.register_state_dict_post_hook(raise_then)
        with pytest.raises(RuntimeError, match="rank 1 raised after its load"):
            run.manager.roll_back(2, "loss is nan")


class Unplaced(ParameterSlot):
    """A parameter for whose state there is no memory."""

    def empty(self, *_: Any, **__: Any) -> torch.Tensor:
        raise MemoryError("no memory for it on rank 1")


@on_two_ranks
def test_a_rank_without_memory_for_a_tensor(rank: int, tmp_path: Path) -> None:
    run = saved(tmp_path)
    slots = run.manager._run.optimizer.slots()
    if rank == 1:
        slots = {name: Unplaced(**slot.__dict__) for name, slot in slots.items()}
    stored = StoredCheckpoint(run.root / "step-1", Peers(timedelta(seconds=PEERS_SECONDS)))
    with pytest.raises(CheckpointUnreadable, match="rank 1: MemoryError: no memory for it on rank 1"):
        stored.read_optimizer(slots)
    run.manager.close()


class Unstartable(SyncSaver):
    """A saver that cannot start on one rank."""

    def start(self) -> None:
        if self._peers.rank == 1:
            raise OSError(11, "rank 1 cannot start a process")


@on_two_ranks
def test_a_saver_that_cannot_be_started(rank: int, tmp_path: Path) -> None:
    run = sharded_run(tmp_path, saver=Unstartable(Peers(timedelta(seconds=PEERS_SECONDS))))
    with run.manager:
        run.manager.load()
        with pytest.raises(OSError, match="rank 1 cannot start a process"):
            run.train(1, last=False)


@on_two_ranks
def test_a_folder_that_rank_0_cannot_list(rank: int, tmp_path: Path) -> None:
    folder = saved(tmp_path).root
    with (run := sharded_run(tmp_path, loader=Failing(), load_only=True)).manager:
        run.manager.load()
        if rank == 0:
            folder.rename(tmp_path / "away")
            folder.write_text("in its place")
        for look in (run.manager.load, run.manager.latest_step, run.manager.ended):
            with pytest.raises(FolderUnusable, match=f"{folder} cannot be used for checkpoints: "):
                look()
