"""A stream that keeps its position as `datasets.IterableDataset` does is resumed; here without that library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.data import hugging_face_stream
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter
from torchtitan_lite.data.hugging_face_stream import PositionedStream, is_hugging_face_stream
from torchtitan_lite.errors import ConfigError

# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"), pytest.mark.usefixtures("seeded")]

NUM_EXAMPLES = 7


class Stream(IterableDataset[int]):
    """Seven numbers an epoch; its position has the traits that the docstring of the module under test lists."""

    def __init__(self) -> None:
        self.epoch = 0
        self._begin: dict[str, int] = {}
        self._now: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return dict(self._now)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = dict(state)

    def __iter__(self) -> Iterator[int]:
        first = self._begin["at"] if self._begin.get("epoch") == self.epoch else 0
        for at in range(first, NUM_EXAMPLES):
            self._now = {"epoch": self.epoch, "at": at + 1}
            yield 100 * self.epoch + at


Stream.__module__, Stream.__name__ = "datasets.iterable_dataset", "IterableDataset"


def loader_of(dataset: Stream, num_workers: int = 0) -> StatefulDataLoaderAdapter:
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=num_workers)
    return StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)


def epochs(adapter: Any, count: int) -> list[list[int]]:
    return [[number for batch in adapter for number in batch.tolist()] for _ in range(count)]


@pytest.mark.parametrize(("num_read", "epoch"), [(0, 0), (1, 0), (3, 0), (1, 2), (3, 2)])
def test_a_resume_ends_its_epoch_and_reads_the_later_ones_completely(num_read: int, epoch: int) -> None:
    stream = Stream()
    stream.set_epoch(epoch)
    through = loader_of(stream)
    batches = iter(through)
    for _ in range(num_read):
        next(batches)
    state = through.state_dict()
    rest = [number for batch in batches for number in batch.tolist()]
    resumed = loader_of(Stream())
    resumed.load_state_dict(state)
    assert epochs(resumed, 3) == [rest, *epochs(through, 2)]
    assert len(rest) == NUM_EXAMPLES - 2 * num_read


def test_the_state_is_empty_until_the_first_example_and_the_loaded_one_after_a_load() -> None:
    stream = PositionedStream(Stream())
    assert list(stream) and stream.state_dict() == {"epoch": 0, "at": NUM_EXAMPLES}
    again = iter(stream)
    assert stream.state_dict() == {}
    next(again)
    position = stream.state_dict()
    assert position == {"epoch": 0, "at": 1}
    stream.load_state_dict(position)
    rest = iter(stream)
    assert stream.state_dict() == position
    assert next(rest) == 1


class KeepsWhatWasLoaded(Stream):
    """Its position after a load is what was loaded."""

    def state_dict(self) -> dict[str, int]:
        return dict(self._begin or self._now)


class LosesItsPlace(Stream):
    """Its position after a load is the beginning, as with datasets 5.0.0."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": 0} if self._begin else dict(self._now)


@pytest.mark.parametrize("kind", [KeepsWhatWasLoaded, LosesItsPlace])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_position_that_does_not_advance_after_a_load_is_refused_by_name_at_the_first_batch(
    kind: type[Stream], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face_stream, "_MOST_ALIKE", 1)
    first, second = loader_of(kind(), num_workers), loader_of(kind(), num_workers)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ConfigError, match=rf"position of this {kind.__name__} did not advance with the examples .* after a load"
    ):
        next(iter(second))


def test_streams_of_the_version_that_loses_their_place_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="5.0.0"))  # type: ignore[misc]
    loader = StatefulDataLoader(Stream())
    for wrong in (
        lambda: StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1),
        lambda: CheckpointManager.for_loop(model=nn.Linear(1, 1), dataloader=loader, folder=tmp_path),
        lambda: CheckpointManager.for_loop(model=nn.Linear(1, 1), states={"data": Stream()}, folder=tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"datasets 5\.0\.0 .* pip install 'datasets!=5\.0\.0'"):
            wrong()


def test_only_a_stream_of_datasets_or_a_subclass_is_one() -> None:
    class Own(Stream):
        pass

    assert is_hugging_face_stream(Stream()) and is_hugging_face_stream(Own())
    assert not is_hugging_face_stream(iter([])) and not is_hugging_face_stream([1])
