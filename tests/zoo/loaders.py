"""Loops over a DataLoader without a state, which skip after a load what the epoch has had, in epochs of eight steps.

A cell is a loop that is resumed at a step. It is equal to the loop that was never stopped, without a warning; or
warned of, once, and different.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tests.logged import logged_warnings
from tests.zoo.outcome import DIFFERS, EQUAL, WARNED, Outcome, sentence
from tests.zoo.run import quiet
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.train_state import TrainState

STEPS_AN_EPOCH, LAST = 8, 18
COLUMNS = {"in an epoch": 4, "at its end": 8, "in the second epoch": 12}
"""The step at which the loop of a column is resumed."""


@dataclass(frozen=True)
class Loop:
    """A loop over a loader: `kind` is its order, and `is_early` says that its iterator is made before `load()`."""

    kind: str = "in order"
    has_generator: bool = False
    is_early: bool = False
    dropout: float = 0.5
    batches_a_step: int = 1
    takes_ahead: bool = False

    def __str__(self) -> str:
        further = [
            *(["with a generator"] if self.has_generator else []),
            *(["without dropout"] if not self.dropout else []),
            *([f"{self.batches_a_step} batches a step"] if self.batches_a_step > 1 else []),
            *(["one batch taken ahead"] if self.takes_ahead else []),
            f"made {'before' if self.is_early else 'after'} `load()`",
        ]
        return ", ".join([self.kind, *further])


KINDS = ("in order", "shuffled", "a DistributedSampler", "an iterable dataset", "single samples")
_PLAIN = [Loop(is_early=True), Loop(), Loop(has_generator=True)]
LOOPS = [
    *(replace(loop, kind=kind) for kind in KINDS for loop in _PLAIN),
    *(replace(loop, dropout=0.0) for loop in _PLAIN[:2]),
    *(replace(loop, batches_a_step=2) for loop in _PLAIN),
    *(replace(loop, takes_ahead=True) for loop in _PLAIN),
]


class Samples(Dataset[Tensor]):
    """A row of fours for each number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((4,), float(at))


class Stream(IterableDataset[Tensor]):
    """The same, one after the other."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return (self.samples[at] for at in range(len(self.samples)))


def find_loop(loop: Loop, resumed_at: int, folder: Path) -> Outcome:
    """Return the outcome of `loop`, resumed at a step by a run that begins with another seed."""
    with quiet():
        straight = _losses(loop, folder / "straight", 0, LAST)
        _losses(loop, folder / "resumed", 0, resumed_at)
        with logged_warnings() as warned:
            resumed = _losses(loop, folder / "resumed", 9, LAST)
    is_equal = all(straight[step] == loss for step, loss in resumed.items()) and len(resumed) == LAST - resumed_at
    if is_equal == bool(warned) or len(warned) > 1:
        return Outcome(DIFFERS, f"warned although it is equal: {warned[0]}" if is_equal else "without one warning")
    return Outcome(EQUAL) if is_equal else Outcome(WARNED, re.sub(r"\d+", "N", sentence(warned[0])))


def _losses(loop: Loop, folder: Path, seed: int, last: int) -> dict[int, float]:
    """Train until step `last` and save it; return the losses by step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(loop.dropout), nn.Linear(8, 1))
    optimizer, progress, losses = torch.optim.AdamW(model.parameters()), TrainState(), {}
    generator = torch.Generator() if loop.has_generator else None
    loader = _loader(loop, generator)
    begun = iter(loader) if loop.is_early else None
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, states={"t": progress}, folder=folder, interval=1000, preemption_signals=()
    ) as manager:
        manager.load()
        while progress.step < last:
            epoch, place = divmod(progress.step, STEPS_AN_EPOCH)
            if generator is not None:
                generator.manual_seed(epoch)
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            # An epoch that begins after the load draws after it, as without a resume.
            batches = begun if begun is not None and (place or progress.step == 0) else iter(loader)
            begun = None
            for step in _steps(loop, batches, place):
                loss = sum((model(batch).square().mean() for batch in step), torch.zeros(()))
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                optimizer.step()
                optimizer.zero_grad()
                losses[progress.step] = loss.item()
                progress.step += 1
                manager.save(progress.step, force=progress.step == last)
                if progress.step == last:
                    break
    return losses


def _loader(loop: Loop, generator: torch.Generator | None) -> DataLoader[Any]:
    samples = Samples(STEPS_AN_EPOCH * loop.batches_a_step * (1 if loop.kind == "single samples" else 2))
    options: dict[str, Any] = {"batch_size": 2, "generator": generator}
    if loop.kind == "shuffled":
        return DataLoader(samples, shuffle=True, **options)
    if loop.kind == "a DistributedSampler":
        return DataLoader(samples, sampler=DistributedSampler(samples, num_replicas=1, rank=0), **options)
    if loop.kind == "single samples":
        return DataLoader(samples, **(options | {"batch_size": None}))
    return DataLoader(Stream(samples) if loop.kind == "an iterable dataset" else samples, **options)


def _steps(loop: Loop, batches: Iterator[Any], place: int) -> Iterator[Iterable[Any]]:
    """Yield the batches of each step, from the one at `place` on."""
    rest: Iterator[Any] = itertools.islice(batches, place * loop.batches_a_step, None)
    if loop.takes_ahead:
        rest = _ahead(rest)
    while step := [*itertools.islice(rest, loop.batches_a_step)]:
        yield step


def _ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each batch when the next one is there."""
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last
