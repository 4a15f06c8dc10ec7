"""torchdata's StatefulDataLoader without our adapter: a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.resumed_loaders import OF_TORCHDATA
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

pytestmark = OF_TORCHDATA


def losses(folder: Path, num_steps: int, num_workers: int, loader: str) -> dict[int, float]:
    """Train until step `num_steps` of twelve in an epoch; return the losses by step. Every third step is saved."""
    torch.manual_seed(0)
    model, progress = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), TrainState()
    optimizer = torch.optim.AdamW(model.parameters())
    samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    batches = StatefulDataLoader(list(samples), batch_size=2, shuffle=True, num_workers=num_workers)
    given = {"dataloader": batches, "states": {"train_state": progress}}
    if loader == "a state":
        given = {"states": {"batches": batches, "train_state": progress}}
    found = {}
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=folder, interval=3, preemption_signals=(), **given
    ) as manager:
        manager.load()
        while progress.step < num_steps:
            for batch in batches:
                progress.step += 1
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[progress.step] = loss.item()
                manager.save(progress.step)
                if progress.step == num_steps:
                    break
    batches._iterator = None  # Ends its workers now; a collection of garbage would wait five seconds for each.
    return found


@pytest.mark.parametrize("loader", ["the dataloader", "a state"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # workers
@pytest.mark.parametrize("end", [4, 12])
def test_a_resumed_run_has_the_dropout_of_an_uninterrupted_one(
    tmp_path: Path, end: int, num_workers: int, loader: str
) -> None:
    straight = losses(tmp_path / "straight", 15, num_workers, loader)
    losses(tmp_path / "resumed", end, num_workers, loader)
    resumed = losses(tmp_path / "resumed", 15, num_workers, loader)
    assert resumed == {step: loss for step, loss in straight.items() if step in resumed}
    assert min(resumed) == end // 3 * 3 + 1


SAMPLES = list(range(12))
KEPT: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": False},
    {"batch_size": None},
    {"sampler": DistributedSampler(SAMPLES, num_replicas=2, rank=0)},
    {"batch_sampler": BatchSampler(SequentialSampler(SAMPLES), 2, drop_last=False)},
]
LOST: list[dict[str, Any]] = [
    {"sampler": RandomSampler(SAMPLES)},
    {"batch_sampler": BatchSampler(RandomSampler(SAMPLES), 2, drop_last=False)},
    {"sampler": RandomSampler(SAMPLES), "batch_size": None},
]


@pytest.mark.parametrize(("options", "is_lost"), [*((each, False) for each in KEPT), *((each, True) for each in LOST)])
def test_an_order_that_is_in_no_state_is_named_when_the_manager_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_lost: bool
) -> None:
    loader = StatefulDataLoader(SAMPLES, **options)
    model = nn.Linear(1, 1)
    CheckpointManager.for_loop(model=model, dataloader=loader, folder=tmp_path)
    CheckpointManager.for_loop(model=model, states={"batches": loader}, folder=tmp_path)
    named = [record.args[:2] for record in caplog.records if record.levelname == "WARNING" and record.args]
    assert named == ([("dataloader", "RandomSampler"), ("batches", "RandomSampler")] if is_lost else [])
