"""Samplers of all kinds in torchdata's loader: a run that is resumed twice has the samples of a straight run."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data.resumed_loaders import OF_TORCHDATA, restore, seeded_generators, states
from tests.examples import mostly_exhaustive
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter
from torchtitan_lite.data.plain_values import NoValueError, copy_of, plain, restored
from torchtitan_lite.data.rank_state import pack, unpack
from torchtitan_lite.errors import ConfigError

SAMPLES = list(range(24))
LENGTHS = [5 + 7 * each % 11 for each in SAMPLES]
Options = dict[str, Any]


def rng(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Counting:
    """Counts its epochs when they begin, as most bucket samplers do."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(SAMPLES, len(SAMPLES))
        self.epoch += 1
        return iter(order)


class CountingLater(Counting):
    """Counts its epochs when they end."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(SAMPLES, len(SAMPLES))
        self.epoch += 1


class CountingBatches(Counting):
    """Counts the epochs and the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        self.epoch += 1
        order = np.random.default_rng(self.epoch + self.delivered).permutation(24).reshape(12, 2).tolist()
        for batch in order:
            self.delivered += 1
            yield batch


class Slotted:
    """Has no `__dict__`."""

    __slots__ = ("order", "rng")

    def __init__(self) -> None:
        self.order, self.rng = np.arange(24), np.random.RandomState(4)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)  # The order depends on that of the epoch before.
        return iter(self.order.tolist())


class InPlace(Counting):
    """Shuffles one list again and again."""

    def __init__(self) -> None:
        self.rng, self.order, self.lengths = random.Random(4), SAMPLES.copy(), np.zeros(1)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        yield from self.order


class Buffered(Counting):
    """A buffer that is not emptied at the end of an epoch, and counts of each sample."""

    def __init__(self) -> None:
        self.rng, self.buffer, self.counts = np.random.default_rng(1), deque[int](maxlen=8), {0: 0}
        self.seen: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for index in SAMPLES:
            self.buffer.append(index)
            place = int(self.rng.integers(len(self.buffer)))
            self.counts[self.buffer[place]] = self.counts.get(self.buffer[place], 0) + 1
            self.seen.add(index)
            yield (self.buffer[place] + self.counts[self.buffer[place]] + len(self.seen)) % 24


class Progress:
    def __init__(self) -> None:
        self.epoch, self.weights = 0, torch.ones(24)


class Nested:
    """Keeps its progress in an object, and has two samplers in a list."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.samplers = [CountingLater(), RandomSampler(SAMPLES, generator=rng())]

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        self.progress.epoch += 1
        own = rng(self.progress.epoch)
        for one, other in itertools.islice(zip(*self.samplers, strict=True), 12):
            self.progress.weights[one] += 1
            third = torch.multinomial(self.progress.weights, 1, generator=own)
            yield [one, int(other), int(third)]


class GeneratorLater(Counting):
    """Makes its generator at the first use."""

    def __init__(self) -> None:
        self.rng: random.Random | None = None

    def __iter__(self) -> Iterator[int]:
        if self.rng is None:
            self.rng = random.Random(8)
        yield from (self.rng.randrange(24) for _ in SAMPLES)


class Endless:
    """As detectron2's training sampler: permutations without end."""

    def __iter__(self) -> Iterator[int]:
        own = rng(7)
        while True:
            yield from torch.randperm(24, generator=own).tolist()


class OwnIterator:
    """Is its own iterator, which continues where the epoch before ended."""

    def __init__(self) -> None:
        self.at = self.left = 0

    def __iter__(self) -> OwnIterator:
        self.left = 23
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.at, self.left = self.at + 1, self.left - 1
        return (self.at * 7) % 24


class TwoStages(Counting):
    """Draws from torch's global generator in `__iter__`, and again for the first sample."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return self._drawn(int(torch.randint(24, ())))

    def _drawn(self, first: int) -> Iterator[int]:
        yield from ((first + each) % 24 for each in torch.randperm(24).tolist())


class Closed(Counting):
    """Has its counter and its generator in a closure."""

    def __init__(self) -> None:
        count, own = 0, random.Random(2)

        def drawn() -> list[int]:
            nonlocal count
            count += 1
            return [(each + count) % 24 for each in own.sample(SAMPLES, 24)]

        self.drawn = drawn

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn()


class Grouped:
    """As torchvision's batch sampler of equal shapes: batches as they fill, over a sampler of its own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        waiting: dict[int, list[int]] = {0: [], 1: []}
        for index in self.sampler:
            group = waiting[index % 2]
            group.append(index)
            if len(group) == 2:
                yield group.copy()
                group.clear()


class OwnState(Counting):
    """Has a state of its own, of the sampler and of its iterator."""

    def __iter__(self) -> Iterator[int]:
        return OwnStateIterator(self)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class OwnStateIterator(Iterator[int]):
    def __init__(self, sampler: OwnState) -> None:
        self.sampler, self.at = sampler, 0

    def __next__(self) -> int:
        self.at += 1
        if self.at > 24:
            self.sampler.epoch += 1
            raise StopIteration
        return (self.at * 5 + self.sampler.epoch) % 24

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OneByOne(Counting):
    """Draws each sample with `draw`."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        yield from (self.draw() for _ in SAMPLES)


class Kept(Counting):
    """Continues with an iterator from one epoch to the next."""

    def __init__(self) -> None:
        self.stream = itertools.cycle(random.Random(1).sample(range(24), 23))

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self.stream, 24)


class KeptList(Kept):
    """The same, with all samples at once."""

    def __iter__(self) -> Iterator[int]:
        return iter([*itertools.islice(self.stream, 24)])


class KeptObject(Counting):
    """Makes an object in its first epoch, and keeps it."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def __iter__(self) -> Iterator[int]:
        self.progress = self.progress or Progress()
        self.progress.epoch += 1
        yield from random.Random(self.progress.epoch).sample(SAMPLES, 24)


def in_batches(sampler: Any) -> Options:
    return {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}


def in_fours(sampler: Any) -> Options:
    return {"sampler": sampler, "batch_size": 4}


def length_grouped(**options: Any) -> Any:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return LengthGroupedSampler(4, lengths=LENGTHS, **options)


def length_grouped_ranks() -> Any:
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    return DistributedLengthGroupedSampler(4, lengths=LENGTHS, num_replicas=2, rank=1)


def of_accelerate() -> Any:
    from accelerate.data_loader import SeedableRandomSampler

    return SeedableRandomSampler(SAMPLES, data_seed=5)


def torchdatas_ranks() -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(SAMPLES, num_replicas=2, rank=1)


TORCHS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(SAMPLES),
    "random": lambda: RandomSampler(SAMPLES),
    "random with a generator": lambda: RandomSampler(SAMPLES, generator=rng()),
    "random with replacement": lambda: RandomSampler(SAMPLES, replacement=True),
    "random with replacement and a generator": lambda: RandomSampler(
        SAMPLES, replacement=True, num_samples=40, generator=rng()
    ),
    "a random subset": lambda: SubsetRandomSampler(SAMPLES[::2]),
    "a random subset with a generator": lambda: SubsetRandomSampler(SAMPLES[::2], generator=rng()),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 8, 24),
    "of ranks": lambda: DistributedSampler(SAMPLES, num_replicas=2, rank=1),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "by length": length_grouped,
    "by length with a generator": lambda: length_grouped(generator=rng()),
    "by length, of ranks": length_grouped_ranks,
    "accelerate's": of_accelerate,
    "counting": Counting,
    "counting later": CountingLater,
    "slotted": Slotted,
    "in place": InPlace,
    "buffered": Buffered,
    "a generator later": GeneratorLater,
    "endless": Endless,
    "its own iterator": OwnIterator,
    "two stages": TwoStages,
    "closed": Closed,
    "one by one, from its own": lambda: OneByOne(partial(random.Random(1).randrange, 24)),
    "its own state": OwnState,
    "torchdata's of ranks": torchdatas_ranks,
}
BATCHES: dict[str, Callable[[], Any]] = {
    "counting batches": CountingBatches,
    "nested": Nested,
    "grouped": lambda: Grouped(RandomSampler(SAMPLES)),
    "grouped, counting": lambda: Grouped(CountingLater()),
}
KINDS: dict[str, Callable[[], Options]] = {
    **{name: lambda make=make: in_fours(make()) for name, make in (TORCHS | OTHERS).items()},
    **{f"batches of {name}": lambda make=make: in_batches(make()) for name, make in (TORCHS | OTHERS).items()},
    **{name: lambda make=make: {"batch_sampler": make()} for name, make in BATCHES.items()},
    "no batches": lambda: {"sampler": CountingLater(), "batch_size": None},
    "shuffled by the loader": lambda: {"shuffle": True, "batch_size": 4},
    "shuffled by the loader, with a generator": lambda: {"shuffle": True, "batch_size": 4, "generator": rng()},
    "one generator for both": lambda: one_generator(rng()),
}
"""Each is resumed exactly."""
REFUSED: dict[str, tuple[Callable[[], Options], str]] = {
    "one by one, from torch's": (
        lambda: in_fours(OneByOne(lambda: int(torch.randint(24, ())))),
        "OneByOne draws samples after the first from the global generator of torch",
    ),
    "one by one, from NumPy's": (
        lambda: in_fours(OneByOne(partial(np.random.randint, 24))),
        "OneByOne draws samples after the first from the global generator of NumPy",
    ),
    "one by one, from Python's": (
        lambda: in_batches(OneByOne(partial(random.randrange, 24))),
        "BatchSampler draws samples after the first from the global generator of Python",
    ),
    "an iterator that is kept": (lambda: in_fours(Kept()), "Kept keeps stream, a cycle, from one iteration"),
    "an iterator that is kept, in lists": (lambda: in_fours(KeptList()), "KeptList keeps stream, a cycle, from one"),
    "an object that is kept": (lambda: in_fours(KeptObject()), "KeptObject keeps progress, a Progress, from one"),
}
"""Each is refused, but for saves from which it resumes exactly."""


def one_generator(generator: torch.Generator) -> Options:
    return {"generator": generator, **in_fours(RandomSampler(SAMPLES, generator=generator))}


pytestmark = [*OF_TORCHDATA, pytest.mark.usefixtures("seeded")]
NUM_EVENTS = 26
"""Batches, and ends of epochs: three epochs of most samplers."""
QUICK = ("counting", "batches of accelerate's", "nested", "batches of of ranks", "buffered", "two stages")
WITH_WORKERS = (
    *QUICK,
    *("random", "random with a generator", "of ranks", "by length", "endless", "its own state", "torchdata's of ranks"),
    *("one by one, from its own", "batches of random", "grouped, counting", "no batches", "shuffled by the loader"),
)
"""One for each way in which a sampler keeps its place; the others with workers are exhaustive: 2 s each."""

VALUES: list[Any] = [
    *(None, True, 3, 2.5, float("inf"), "text", b"bytes", range(3), 2**80),
    *([1, 2], [1, 2.5, "a", None], (1, (2,)), {1, 2}, frozenset({3}), {1: "a", (2, 3): [4]}, []),
    *(deque([1, 2], maxlen=5), Counter("aab"), OrderedDict(b=1, a=2), [2**70, 1], [True, 1]),
    *(np.arange(6).reshape(2, 3), np.float32(2.5), [np.int64(3)], [np.int32(3), 4], np.array("text"), np.array(True)),
    *(torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0), [torch.tensor(3)]),
    *(
        random.Random(3),
        rng(),
        np.random.RandomState(2),
        np.random.default_rng(2),
        np.random.Generator(np.random.MT19937()),
    ),
]


@dataclass
class Saved:
    """What a checkpoint of the run has."""

    loader: dict[str, Any] | None
    generators: tuple[Any, ...]
    epoch: int


class Run:
    """Trains on `kind`'s batches, with random numbers of its own, and sets the epoch as it begins one."""

    def __init__(self, kind: str, num_workers: int, saved: Saved | None = None, *, is_bare: bool = False) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        options = KINDS[kind]() if kind in KINDS else REFUSED[kind][0]()
        if "nested" in kind:
            options["collate_fn"] = list
        self.loader = StatefulDataLoader(SAMPLES, num_workers=num_workers, **options)
        self.setters = [each for each in (self.loader.sampler, self.loader.batch_sampler) if "of ranks" in kind]
        if not is_bare:
            self.adapter = StatefulDataLoaderAdapter(self.loader, rank=0, num_ranks=1)
        self.epoch = 0
        if saved is not None:
            assert saved.loader is not None
            self.adapter.load_state_dict(saved.loader)
            restore(saved.generators)  # A load restores the generators after the states.
            self.epoch = saved.epoch
        self.events: Generator[Any, None, None] = self._events(self.loader if is_bare else self.adapter)

    def _events(self, loader: Any) -> Generator[Any, None, None]:
        while True:
            self._set_epoch()
            for batch in loader:
                torch.rand(1), np.random.rand(), random.random()
                yield torch.as_tensor(batch).reshape(-1).tolist()
            self.epoch += 1
            yield "end"

    def _set_epoch(self) -> None:
        for sampler in self.setters:
            inner = getattr(sampler, "sampler", sampler)
            if hasattr(inner, "set_epoch") and not hasattr(inner, "initial_seed"):
                inner.set_epoch(self.epoch)

    def save(self) -> Saved:
        state = self.adapter.state_dict()
        return Saved(state, states(), self.epoch)

    def end(self) -> None:
        """End its workers now; a collection of garbage would wait for each."""
        self.events.close()
        self.loader._iterator = None


def straight(kind: str, num_workers: int) -> tuple[list[Any], list[Saved], str]:
    """Return the events of a straight run, what each save after one has, and why a later one was refused."""
    restore(BEGINNING)
    run = Run(kind, num_workers)
    events, saves, refusal = [], [], ""
    for _ in range(NUM_EVENTS):
        events.append(next(run.events))
        if not refusal:
            try:
                saves.append(run.save())
            except ConfigError as error:
                refusal = str(error)
    run.end()
    return events, saves, refusal


def resumed(kind: str, num_workers: int, saved: Saved, num_events: int) -> tuple[list[Any], Saved]:
    torch.manual_seed(9)  # another process
    run = Run(kind, num_workers, saved)
    events = [next(run.events) for _ in range(num_events)]
    found = run.save() if events else Saved(None, (), 0)
    run.end()
    return events, found


def assert_resumes_twice(kind: str, num_workers: int, leaving: list[tuple[int, int]]) -> str:
    """Fail unless runs that are left after the two numbers of events have those of a straight run."""
    events, saves, refusal = straight(kind, num_workers)
    for first, second in leaving:
        if second > len(saves):
            continue
        middle, saved = resumed(kind, num_workers, saves[first - 1], second - first)
        assert middle == events[first:second], (first, second)
        last, _ = resumed(kind, num_workers, saved, NUM_EVENTS - second) if not refusal else ([], None)
        assert refusal or last == events[second:], (first, second)
    return refusal


with seeded_generators():
    BEGINNING = states()

# In the first epoch, at its end, after it; the same in the second one, or three epochs on.
LEAVING = [(2, 5), (6, 7), (7, 9), (3, 13), (9, 14), (14, 20)]

REFUSED_LEAVING = [(1, 2), (2, 5), (3, 6), (6, 7)]


@pytest.mark.parametrize("kind", QUICK)
def test_a_run_that_is_resumed_twice_has_the_samples_of_a_straight_run(kind: str) -> None:
    assert not assert_resumes_twice(kind, 0, LEAVING)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in QUICK])
def test_any_sampler_resumes_exactly(kind: str) -> None:
    assert not assert_resumes_twice(kind, 0, LEAVING)


@pytest.mark.slow  # Workers take a while to start.
@pytest.mark.parametrize("kind", mostly_exhaustive(KINDS, kept=WITH_WORKERS))
def test_any_sampler_resumes_exactly_with_workers(kind: str) -> None:
    assert not assert_resumes_twice(kind, 2, [(3, 9), (7, 14)])


@pytest.mark.parametrize("kind", REFUSED)
def test_a_sampler_that_no_checkpoint_can_have_is_refused_by_name(kind: str) -> None:
    assert REFUSED[kind][1] in assert_resumes_twice(kind, 0, REFUSED_LEAVING)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one by one, from torch's", "one by one, from Python's", "an object that is kept"])
def test_a_sampler_with_workers_resumes_exactly_until_it_is_refused(kind: str) -> None:
    refusal = assert_resumes_twice(kind, 2, REFUSED_LEAVING)
    assert REFUSED[kind][1] in refusal or "one by one" in kind  # Most samples are drawn ahead, with no step between.


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", QUICK)
def test_the_adapter_changes_no_samples_of_a_straight_run(kind: str, num_workers: int) -> None:
    bare = Run(kind, num_workers, is_bare=True)
    expected = [next(bare.events) for _ in range(NUM_EVENTS)]
    bare.end()
    restore(BEGINNING)
    adapted = Run(kind, num_workers)
    assert [next(adapted.events) for _ in range(NUM_EVENTS)] == expected
    adapted.end()


def test_attributes_that_are_set_through_the_loader_are_those_of_the_sampler() -> None:
    run = Run("counting batches", 0)
    run.loader.batch_sampler.epoch = 7  # type: ignore[attr-defined, union-attr]  # of CountingBatches
    sampler = run.loader.batch_sampler._sampler  # type: ignore[attr-defined, union-attr]  # what it stands for
    assert sampler.epoch == 7


def test_a_long_array_that_a_sampler_changes_is_refused_and_one_that_it_only_reads_is_not() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = InPlace()
    sampler.lengths = np.zeros(5_000_000)
    loader = StatefulDataLoader(SAMPLES, batch_size=4, sampler=sampler)
    adapted = StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)
    next(iter(adapted))
    assert len(adapted.state_dict()["rank0"]) < 20_000
    sampler.lengths[0] = 1
    with pytest.raises(ConfigError, match=r"InPlace changes lengths, which has a value of 38 MiB that no checkpoint"):
        adapted.state_dict()


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_restored_as_it_was(value: Any) -> None:
    packed = pack({"value": plain(copy_of(value))}, rank=0, num_ranks=1)
    found = restored(unpack(packed, rank=0, num_ranks=1)["value"], None)
    assert type(found) is type(value) and copy_of(found) == copy_of(value)


@pytest.mark.parametrize("value", [[object()], {"a": len}, np.array([object()]), open])
def test_what_is_no_value_is_not_taken_for_one(value: Any) -> None:
    with pytest.raises(NoValueError):
        plain(copy_of(value))
