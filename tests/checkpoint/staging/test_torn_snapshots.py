"""No checkpoint mixes two moments: optimizers wait, and digests taken before staging find every other change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import target
from torchtitan_lite.checkpoint.format.file_data import FileData
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave, ThreadSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copied, HostCopier
from torchtitan_lite.checkpoint.staging.stager import Copying, Stager, watch
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))
DEADLINE_SECONDS = 60.0


class StagedWhenAskedFor(ThreadSaver):
    """A saver whose saves are staged as soon as a caller waits for that; records the state at that moment."""

    def __init__(self) -> None:
        super().__init__(PEERS)
        self.seen: list[float] = []
        self.look: Callable[[], float] = lambda: 0.0

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        pending = super().save(state, target)
        return PendingSave(pending.step, _Asked(self), pending.durable)


class _Asked(Future[None]):
    def __init__(self, saver: StagedWhenAskedFor) -> None:
        super().__init__()
        self._saver = saver

    def result(self, timeout: float | None = None) -> None:
        self._saver.seen.append(self._saver.look())
        self.set_result(None)


@pytest.mark.promise(
    "An optimizer waits for the copy, even if the loop forgets `maybe_wait_for_staging`.",
    section="state",
)
def test_an_optimizer_that_steps_without_the_manager_waits_until_its_state_is_staged(start_run: StartRun) -> None:
    saver = StagedWhenAskedFor()
    run = start_run(interval=1, async_mode="async", seams={"saver": saver})
    saver.look = lambda: run.model.first.weight.sum().item()
    run.step()
    weight = run.model.first.weight.sum().item()
    run.model(next(run.loader)).square().mean().backward()
    run.optimizer.step()  # without a call of the manager
    assert saver.seen == [weight]
    assert run.model.first.weight.sum().item() != weight


def test_a_closed_manager_leaves_the_optimizer_as_it_was(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.step()
    hooks = run.optimizer._optimizer_step_pre_hooks
    assert len(hooks) == 1
    run.manager.close()
    assert not run.optimizer._optimizer_step_pre_hooks


class Disturbed(HostCopier):
    """A copier that changes `tensor` after staging began and before it is copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def copy(self, image: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        self._tensor.add_(1)
        return super().copy(image, arena, digests=digests)


def test_a_tensor_that_changed_while_it_was_staged_is_named_and_not_committed(tmp_path: Path) -> None:
    state = {"model": {"calm": torch.zeros(5000), "volatile": torch.zeros(3, 4).T}}
    saver = ThreadSaver(PEERS, copying=Copying(Stager(Disturbed(state["model"]["volatile"]))), watch=watch)
    store = CheckpointStore(tmp_path / "checkpoint")
    failure = saver.save(state, target(store, 1)).durable.exception(DEADLINE_SECONDS)
    assert isinstance(failure, SaveFailed)
    assert "model.volatile changed while being staged" in failure.cause
    assert "calm" not in failure.cause
    assert store.committed() == []
    saver.close(DEADLINE_SECONDS)


@pytest.mark.parametrize("async_mode", ["async", "async_with_pinned_mem"])
def test_a_run_that_changes_nothing_while_staging_saves_with_the_watch_on(start_run: StartRun, async_mode: str) -> None:
    run = start_run(interval=2, async_mode=async_mode, digest_tensors=("staging",))
    run.train(6)
    assert run.committed() == [2, 4, 6]
