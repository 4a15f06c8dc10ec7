"""torchdata's StatefulDataLoader without our adapter: a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.checkpoint import CheckpointManager, TrainState

# torchdata 0.11 calls what torch 2.13 has deprecated; Python 3.12 warns of the workers' fork.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


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
