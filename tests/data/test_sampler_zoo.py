"""Samplers of all kinds in torchdata's loader: a run that is resumed twice has the samples of a straight run."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.resumed_loaders import OF_TORCHDATA, restore, seeded_generators, states
from tests.data.samplers import KINDS, REFUSED, SAMPLES, InPlace, rng
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter
from torchtitan_lite.data.generators import state_of
from torchtitan_lite.data.plain_values import NoValueError, copy_of, plain, restored
from torchtitan_lite.data.rank_state import pack, unpack
from torchtitan_lite.errors import ConfigError

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
@pytest.mark.parametrize(
    "kind", [kind if kind in WITH_WORKERS else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
)
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


def test_a_state_from_before_attributes_were_kept_loads() -> None:
    generators = {".generator": state_of(rng(5)), "torch": state_of(torch.default_generator)}
    first, second = (Run("random with a generator", 0) for _ in range(2))
    first.loader.batch_sampler.sampler.generator.manual_seed(5)  # type: ignore[union-attr, attr-defined]
    expected = [next(first.events) for _ in range(3)]
    old = unpack(first.adapter.state_dict(), rank=0, num_ranks=1) | {"sampler": generators}
    second.adapter.load_state_dict(pack(old, rank=0, num_ranks=1))
    rest = [next(second.events) for _ in range(3)]
    assert rest == [next(first.events) for _ in range(3)]
    assert sorted([*itertools.chain(*expected, *rest)]) == SAMPLES
