"""Samplers without a state that draw their order: a resumed epoch, and all later ones, have the same samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

from tests.data.resumed_loaders import OF_TORCHDATA, assert_resumes
from tests.examples import mostly_exhaustive
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter

pytestmark = [*OF_TORCHDATA, pytest.mark.usefixtures("seeded")]
SAMPLES = list(range(12))


class Drawing:
    """A sampler whose order `draw` returns; lazy: it draws when its first sample is taken."""

    def __init__(self, rng: Any, draw: Callable[[Any], list[int]], *, is_lazy: bool = False) -> None:
        self.rng, self._draw, self._is_lazy = rng, draw, is_lazy

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return self._later() if self._is_lazy else iter(self._draw(self.rng))

    def _later(self) -> Iterator[int]:
        yield from self._draw(self.rng)


class OneByOne(Drawing):
    """Draws each sample when it is taken, from a generator of its own."""

    def _later(self) -> Iterator[int]:
        yield from (self._draw(self.rng)[0] for _ in SAMPLES)


class Counted:
    """Draws batches, in an order that depends on a sampler of its own."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(1))
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*BatchSampler(self.sampler, 2, drop_last=False)]
        self.rng.shuffle(batches)
        return iter(batches)


def permuted(rng: Any) -> list[int]:
    return [int(each) for each in rng.permutation(len(SAMPLES))]


def shuffled(rng: Any) -> list[int]:
    order = SAMPLES.copy()
    rng.shuffle(order)
    return order


def drawn(generator: torch.Generator | None) -> list[int]:
    return [int(each) for each in torch.randperm(len(SAMPLES), generator=generator)]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch's, from its own generator": lambda: {
        "sampler": RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(5))
    },
    "torch's, from the global generator": lambda: {"sampler": RandomSampler(SAMPLES)},
    "torch's, weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 12)},
    "numpy's generator": lambda: {"sampler": Drawing(np.random.default_rng(3), permuted)},
    "numpy's Mersenne Twister": lambda: {"sampler": Drawing(np.random.Generator(np.random.MT19937(3)), permuted)},
    "numpy's old generator": lambda: {"sampler": Drawing(np.random.RandomState(3), permuted, is_lazy=True)},
    "numpy's global generator": lambda: {"sampler": Drawing(np.random, permuted)},
    "Python's generator": lambda: {"sampler": Drawing(random.Random(3), shuffled, is_lazy=True)},
    "Python's global generator": lambda: {"sampler": Drawing(random, shuffled)},
    "torch's global generator": lambda: {"sampler": Drawing(None, drawn, is_lazy=True)},
    "sample by sample": lambda: {"sampler": OneByOne(torch.Generator().manual_seed(3), drawn, is_lazy=True)},
    "batches of torch": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(5)), 2, False)
    },
    "batches of its own": lambda: {"batch_sampler": Counted()},
    "no batches": lambda: {"sampler": Drawing(random.Random(3), shuffled), "batch_size": None},
}


def adapter(kind: str, num_workers: int) -> StatefulDataLoaderAdapter:
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = KINDS[kind]()
    if "batch_sampler" not in options:
        options = {"batch_size": 2} | options
    return StatefulDataLoaderAdapter(
        StatefulDataLoader(SAMPLES, num_workers=num_workers, **options), rank=0, num_ranks=1
    )


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in torch.as_tensor(batch).reshape(-1).tolist()]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])  # Workers take a while to start.
@pytest.mark.parametrize("epochs", mostly_exhaustive([0, 1], kept=[1]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_epoch_and_later_ones_have_the_order_of_an_uninterrupted_run(
    kind: str, epochs: int, num_workers: int
) -> None:
    for taken in (4,) if num_workers else (1, 4, 6):
        assert_resumes(lambda: adapter(kind, num_workers), flat, epochs=epochs, taken=taken)


def test_the_state_of_a_sampler_that_draws_from_its_epoch_alone_is_as_before() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=0)
    loader = StatefulDataLoader(SAMPLES, batch_size=2, sampler=sampler)
    adapted = StatefulDataLoaderAdapter(loader, rank=0, num_ranks=2)
    next(iter(adapted))
    text = bytes(adapted.state_dict()["rank0"].tolist())
    assert b'"sampler"' not in text and len(text) < 1000
    assert len(loader) == 3


def test_the_attributes_of_a_sampler_stay_its_own() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=0)
    loader = StatefulDataLoader(SAMPLES, batch_size=2, sampler=sampler)
    StatefulDataLoaderAdapter(loader, rank=0, num_ranks=2)
    assert loader.batch_sampler is not None
    loader.batch_sampler.sampler.set_epoch(7)  # type: ignore[attr-defined]  # of the sampler in it
    assert sampler.epoch == 7 and loader.sampler is sampler


class Order(Dataset[int]):
    """The order of a sampler, as a dataset that `Shared` shares among ranks. Lightning does so."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: int) -> int:
        return self.order[index]


class Shared(DistributedSampler[int]):
    """The part of a rank in what another sampler draws."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(Order(sampler), num_replicas=2, rank=0)

    def __iter__(self) -> Iterator[int]:
        self.dataset.order = [*self.dataset._sampler]  # type: ignore[attr-defined]  # an Order
        return (self.dataset[index] for index in super().__iter__())


@pytest.mark.parametrize(("epochs", "taken"), [(0, 1), (1, 0), (1, 2)])
def test_a_sampler_in_a_dataset_of_indices_draws_again_what_it_drew(epochs: int, taken: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler as OfTorchdata

    def make() -> StatefulDataLoaderAdapter:
        loader = StatefulDataLoader(SAMPLES, batch_size=2, sampler=Shared(OfTorchdata(SAMPLES)))
        return StatefulDataLoaderAdapter(loader, rank=0, num_ranks=2)

    assert_resumes(make, lambda loader: [batch.tolist() for batch in loader], epochs=epochs, taken=taken)


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(drawn(None))


def test_a_loader_whose_sampler_has_no_length_is_iterated_as_a_list() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(SAMPLES, batch_size=2, sampler=Endless())
    adapted = StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    assert sorted(flat(list(loader))) == sorted(flat(list(adapted))) == SAMPLES
