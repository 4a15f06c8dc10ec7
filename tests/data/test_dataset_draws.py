"""Random numbers that a dataset draws for samples, in workers and without, are those of an uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from tests.data.resumed_loaders import OF_TORCHDATA, assert_resumes
from tests.examples import mostly_exhaustive
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter
from torchtitan_lite.data.generators import own_generators, set_state, state_of
from torchtitan_lite.data.rank_state import pack, unpack

pytestmark = [*OF_TORCHDATA, pytest.mark.usefixtures("seeded")]
NUM_SAMPLES = 12
Draw = Callable[[], float]


def from_torch() -> float:
    return float(torch.rand(1))


class Transform:
    """Draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand(1, generator=self.generator))
        return float(self.generator.random() if hasattr(self.generator, "random") else self.generator.rand())


class Samples:
    """A dataset with indices, whose samples are `draw`'s numbers."""

    def __init__(self, *draws: Draw) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [index, *(draw() for draw in self.draws)]


class Batches(Samples):
    """Makes the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in reversed(indices)]


class CountedSamples(Samples):
    """Has a state, too."""

    count = 0

    def __getitem__(self, index: int) -> list[float]:
        self.count += 1
        return [*super().__getitem__(index), self.count]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[list[float]]):
    """An iterable dataset without a state."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.at = draw, 0

    def __iter__(self) -> Iterator[list[float]]:
        while self.at < NUM_SAMPLES:
            self.at += 1
            yield [self.at, self.draw()]
        self.at = 0


class StatefulStream(Stream):
    """Knows its position."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OwnIterator(StatefulStream):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[list[float]]:
        return self

    def __next__(self) -> list[float]:
        if self.at >= NUM_SAMPLES:
            self.at = 0
            raise StopIteration
        self.at += 1
        return [self.at, self.draw()]


class StatefulIterator(OwnIterator):
    """The iterator of `WithIterator`."""


class WithIterator(IterableDataset[list[float]]):
    """Has no state, but its iterators have one."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[list[float]]:
        return StatefulIterator(self.draw)


def collating(generator: random.Random) -> Callable[[list[Any]], Any]:
    return lambda samples: default_collate([[*sample, generator.random()] for sample in samples])


def own(make: Callable[[int], Any]) -> Transform:
    return Transform(make(5))


DATASETS: dict[str, Callable[[], Any]] = {
    "torch": lambda: Samples(from_torch),
    "numpy and python": lambda: Batches(np.random.rand, random.random),
    "generators of its own": lambda: Samples(
        *map(own, (torch.Generator().manual_seed, np.random.default_rng, np.random.RandomState, random.Random))
    ),
    "a generator in a partial": lambda: Samples(partial(own(np.random.default_rng))),
    "with a state": lambda: CountedSamples(from_torch, own(random.Random)),
    "a stream": lambda: Stream(from_torch),
    "a stream with a state": lambda: StatefulStream(from_torch),
    "a stream with a state and a generator": lambda: StatefulStream(own(random.Random)),
    "a stream that is its own iterator": lambda: OwnIterator(from_torch),
    "a stream whose iterators have a state": lambda: WithIterator(random.random),
}


def adapter(kind: str, options: dict[str, Any]) -> StatefulDataLoaderAdapter:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(DATASETS[kind](), batch_size=2, **{"collate_fn": collating(random.Random(7))} | options)
    return StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)


def values(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


def assert_resumes_exactly(kind: str, options: dict[str, Any], epochs: int, taken: int) -> None:
    assert_resumes(lambda: adapter(kind, options), values, epochs=epochs, taken=taken)


@pytest.mark.parametrize("kind", DATASETS)
def test_a_resumed_loader_without_workers_draws_what_an_uninterrupted_one_does(kind: str) -> None:
    for taken in (1, 4, 6):
        assert_resumes_exactly(kind, {}, 1, taken)


@pytest.mark.slow
@pytest.mark.parametrize("is_persistent", mostly_exhaustive([False, True], kept=[True]))
@pytest.mark.parametrize("kind", DATASETS)
def test_resumed_workers_draw_what_uninterrupted_ones_do(kind: str, is_persistent: bool) -> None:
    epochs = 0 if is_persistent and kind == "a stream" else 1  # Persistent workers are not seeded for each epoch.
    assert_resumes_exactly(kind, {"num_workers": 2, "persistent_workers": is_persistent}, epochs, 3)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 2, 5, 6])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_workers_are_kept_wherever_the_epoch_is_left(taken: int, every: int) -> None:
    assert_resumes_exactly("torch", {"num_workers": 2, "snapshot_every_n_steps": every}, 0, taken)


@pytest.mark.exhaustive
def test_spawned_workers_are_kept_too() -> None:
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": default_collate}
    assert_resumes_exactly("numpy and python", options, 0, 3)


class LoadedOnce(OwnIterator):
    """Refuses to be loaded twice."""

    is_loaded = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self.is_loaded
        self.is_loaded = True
        super().load_state_dict(state)


def test_a_stream_that_is_its_own_iterator_loads_its_state_once() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    first, second = (
        StatefulDataLoaderAdapter(
            StatefulDataLoader(LoadedOnce(from_torch), batch_size=2, num_workers=1), rank=0, num_ranks=1
        )
        for _ in range(2)
    )
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert values(second) == values(batches)


def worker_that_sets_its_dataset(worker: int) -> None:
    info = get_worker_info()
    assert type(info.dataset) is CountedSamples
    info.dataset.count = 100 * (1 + worker)
    torch.manual_seed(worker)


@pytest.mark.slow
def test_a_worker_init_fn_sets_the_dataset_itself_and_seeds_the_worker() -> None:
    options = {"num_workers": 2, "worker_init_fn": worker_that_sets_its_dataset}
    first = adapter("with a state", options)
    counts = [int(batch[3][0]) for batch in first]
    assert counts[:2] == [101, 201]
    assert_resumes_exactly("with a state", options, 1, 3)


def test_a_loader_has_its_own_dataset_between_the_iterations() -> None:
    first = adapter("torch", {"num_workers": 1})
    batches = iter(first)
    assert type(first._loader.dataset) is Samples
    assert len(values(batches)) == 6


def test_the_state_of_a_dataset_that_draws_nothing_has_no_generators() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Samples(), batch_size=2, num_workers=1)
    adapted = StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)
    next(iter(adapted))
    text = bytes(adapted.state_dict()["rank0"].tolist())
    assert b"generators" not in text and len(text) < 1000


def test_a_state_from_before_the_draws_were_kept_loads() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    old = StatefulDataLoader(CountedSamples(), batch_size=2, num_workers=1)
    batches = iter(old)
    next(batches)
    new = StatefulDataLoaderAdapter(
        StatefulDataLoader(CountedSamples(), batch_size=2, num_workers=1), rank=0, num_ranks=1
    )
    packed = pack({"num_workers": 1, "loader": old.state_dict()}, rank=0, num_ranks=1)
    new.load_state_dict(packed)
    assert values(new) == values(batches)


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator(),
        random.Random(),
        np.random.RandomState(),
        *(
            np.random.Generator(kind(1))
            for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
        ),
    ],
    ids=["torch", "random", "RandomState", "PCG64", "MT19937", "Philox", "SFC64"],
)
def test_a_generator_with_its_state_set_again_draws_the_same(generator: Any) -> None:
    draw = Transform(generator)
    draw()
    state = json_and_back(state_of(generator))
    drawn = [draw() for _ in range(700)]  # More than a Mersenne twister makes at once.
    set_state(generator, state)
    assert [draw() for _ in range(700)] == drawn


def json_and_back(value: Any) -> Any:
    return unpack(pack({"value": value}, rank=0, num_ranks=1), rank=0, num_ranks=1)["value"]


def test_a_global_generator_is_none_of_the_datasets_own() -> None:
    assert own_generators("dataset", Samples(random.random, np.random.rand, torch.rand, random.Random.random)) == {}


def test_generators_are_found_once_where_attributes_lists_and_dicts_refer_to_them() -> None:
    generator, other = random.Random(), torch.Generator()
    root = Samples(Transform(generator), Transform(generator))
    root.more = {"transforms": [partial(Transform(other))], "root": root, "samples": [random.Random()] * 101}  # type: ignore[attr-defined]
    assert own_generators("dataset", root) == {
        "dataset.draws[0].generator": generator,
        "dataset.more['transforms'][0].func.generator": other,
    }


def test_a_search_for_generators_ends_in_a_large_structure() -> None:
    chain: Any = random.Random()
    for _ in range(5000):
        chain = [chain]
    assert own_generators("dataset", chain) == {}
