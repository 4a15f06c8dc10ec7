"""A resumed run takes the batches of an uninterrupted one from a `Loader` of torchdata.nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torchdata.nodes
from torch import nn
from torch.utils.data import DistributedSampler, SequentialSampler

from tests.examples import mostly_slow
from torchtitan_lite.checkpoint import CheckpointManager, PerRank, TrainState

SAMPLES = list(range(12))


def in_order() -> Any:
    return torchdata.nodes.MapStyleWrapper(SAMPLES, SequentialSampler(SAMPLES))


def iterable() -> Any:
    return torchdata.nodes.IterableWrapper(SAMPLES)


def distributed() -> Any:
    return torchdata.nodes.SamplerWrapper(DistributedSampler(SAMPLES, num_replicas=2, rank=1))


def prefetched() -> Any:
    return torchdata.nodes.Prefetcher(iterable(), prefetch_factor=3)


def batches_of(folder: Path, num_steps: int, source: Any, wrap: Any) -> dict[int, Any]:
    """Take batches until step `num_steps`; return them by step. Every step is saved."""
    loader = torchdata.nodes.Loader(torchdata.nodes.Batcher(source(), 2, drop_last=False))
    progress = TrainState()
    found: dict[int, Any] = {}
    with CheckpointManager.for_loop(
        model=nn.Linear(1, 1),
        dataloader=wrap(loader),
        states={"train_state": progress},
        folder=folder,
        interval=1,
        preemption_signals=(),
    ) as manager:
        manager.load()
        while progress.step < num_steps:
            for batch in loader:
                progress.step += 1
                found[progress.step] = batch
                manager.save(progress.step)
                if progress.step == num_steps:
                    break
    return found


@pytest.mark.parametrize("wrap", [lambda loader: loader, PerRank], ids=["bare", "PerRank"])
@pytest.mark.parametrize("source", mostly_slow([in_order, iterable, distributed, prefetched], kept=[prefetched]))
@pytest.mark.parametrize("end", [3, *(pytest.param(end, marks=pytest.mark.slow) for end in (2, 7))])
def test_a_resumed_loader_of_nodes_continues_with_the_next_batch(
    tmp_path: Path, end: int, source: Any, wrap: Any
) -> None:
    straight = batches_of(tmp_path / "straight", 14, source, wrap)
    batches_of(tmp_path / "resumed", end, source, wrap)
    assert batches_of(tmp_path / "resumed", 14, source, wrap) == {
        step: batch for step, batch in straight.items() if step > end
    }
