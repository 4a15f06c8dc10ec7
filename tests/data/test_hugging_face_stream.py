"""Streams of Hugging Face in torchdata's loader: a resumed run reads what an uninterrupted one reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.data.resumed_loaders import OF_TORCHDATA, assert_resumes
from torchtitan_lite.data.adapters import HuggingFaceStreamAdapter, StatefulDataLoaderAdapter
from torchtitan_lite.errors import ConfigError

datasets = pytest.importorskip("datasets")

pytestmark = [*OF_TORCHDATA, pytest.mark.usefixtures("seeded")]


def read(shards: Sequence[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"at": 10 * shard + line} for line in range(6))


def augmented(example: dict[str, Any]) -> dict[str, Any]:
    return {**example, "python": random.random(), "torch": float(torch.rand(1))}


def stream() -> Any:
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": [0, 1, 2, 3]})


STREAMS: dict[str, Callable[[], Any]] = {
    "a stream": stream,
    "a stream that draws": lambda: stream().map(augmented),
    "a shuffled stream": lambda: stream().shuffle(seed=3, buffer_size=1),
}


def adapter(dataset: Any, num_workers: int, *, is_persistent: bool = False) -> StatefulDataLoaderAdapter:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=num_workers, persistent_workers=is_persistent)
    return StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1)


def values(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch.values()] for batch in batches]


# One batch of two workers: the other worker has delivered none in this epoch.
@pytest.mark.parametrize("taken", [1, 4, 12])
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_stream_and_its_later_epochs_are_those_of_an_uninterrupted_run(
    kind: str, epochs: int, taken: int
) -> None:
    assert_resumes(lambda: adapter(STREAMS[kind](), 0), values, epochs=epochs, taken=taken)


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("taken", [1, 4, 12])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_stream_in_workers_resumes_exactly(epochs: int, taken: int, is_persistent: bool) -> None:
    def make() -> StatefulDataLoaderAdapter:
        return adapter(STREAMS["a stream that draws"](), 2, is_persistent=is_persistent)

    assert_resumes(make, values, epochs=epochs, taken=taken)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_save_right_after_a_load_has_the_loaded_position(num_workers: int) -> None:
    first, second, third = (adapter(stream(), num_workers) for _ in range(3))
    batches = iter(first)
    values(next(batches) for _ in range(5))
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    assert values(third) == values(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_position_of_a_later_epoch_is_not_ignored(num_workers: int) -> None:
    first, second = adapter(stream(), num_workers), adapter(stream(), num_workers)
    first._loader.dataset.set_epoch(2)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert second._loader.dataset.epoch == 2
    assert values(second) == values(batches)


def test_a_stream_whose_position_in_a_worker_cannot_be_loaded_is_refused_at_its_first_batch() -> None:
    loader = adapter(STREAMS["a shuffled stream"](), 2)
    with pytest.raises(Exception, match=r"cannot be loaded again[^.]*resumed\. Use num_workers=0"):
        next(iter(loader))


def shuffled(buffer_size: int) -> Any:
    return stream().shuffle(seed=3, buffer_size=buffer_size)


def test_a_stream_whose_position_does_not_advance_after_a_load_is_refused_by_name() -> None:
    class Still(datasets.IterableDataset):  # type: ignore[misc]  # datasets has no types
        """Its position is what was loaded."""

        def state_dict(self) -> Any:
            return self._starting_state_dict or super().state_dict()

    first, second = (
        HuggingFaceStreamAdapter(Still(ex_iterable=stream()._ex_iterable), rank=0, num_ranks=1) for _ in range(2)
    )
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match=r"position of this Still did not advance with the examples .* after a load"):
        next(iter(second))


def test_a_position_that_many_examples_of_a_shuffle_buffer_share_is_none_that_does_not_advance() -> None:
    for taken in range(1, 12):
        first, second = (
            HuggingFaceStreamAdapter(stream().shuffle(seed=3, buffer_size=4), rank=0, num_ranks=1) for _ in range(2)
        )
        examples = iter(first)
        for _ in range(taken):
            next(examples)
        second.load_state_dict(first.state_dict())
        assert [*second]


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "of a stream": lambda dataset: HuggingFaceStreamAdapter(dataset, rank=0, num_ranks=1),
    "of a loader": lambda dataset: adapter(dataset, 0),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_shuffle_buffer_is_named_by_one_warning_at_the_first_save_in_an_epoch(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ADAPTERS[kind](datasets.interleave_datasets([shuffled(4).map(dict), stream()]))
    loader.state_dict()
    assert not caplog.records
    examples = iter(loader)
    for _ in range(2):
        next(examples)
        loader.state_dict()
    (record,) = caplog.records
    assert "buffer_size=4" in record.getMessage()
    assert record.getMessage().endswith(".shuffle(seed=..., buffer_size=1)")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_shuffled_order_of_shards_resumes_exactly_and_without_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (ADAPTERS[kind](shuffled(1)) for _ in range(2))
    examples = iter(first)
    for _ in range(5):
        next(examples)
    second.load_state_dict(first.state_dict())
    assert [str([*second]), str([*second])] == [str([*examples]), str([*first])]
    assert not [record for record in caplog.records if record.name.startswith("torchtitan_lite")]
