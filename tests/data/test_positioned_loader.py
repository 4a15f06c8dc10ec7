"""A loader with a position: a resumed iteration has the batches and the random numbers of one that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchtitan_lite.data.positioned_loader import PositionedLoader
from torchtitan_lite.errors import ConfigError

PLACE: dict[str, int] = {"rank": 0, "num_ranks": 1}


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))


def loader(*, own: bool = False, workers: int = 0) -> DataLoader[float]:
    generator = torch.Generator().manual_seed(5) if own else None
    return DataLoader(Noisy(), batch_size=2, shuffle=True, generator=generator, num_workers=workers)


def taken(positioned: PositionedLoader, number: int) -> list[Any]:
    """Take `number` batches of one iteration."""
    return [*islice(positioned, number)]


@pytest.mark.parametrize("settings", [{}, {"own": True}, pytest.param({"workers": 1}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("number", [2, 5, 7])
def test_a_resumed_iteration_continues_as_if_it_had_never_stopped(settings: dict[str, Any], number: int) -> None:
    torch.manual_seed(1)
    before = PositionedLoader(loader(**settings), **PLACE)
    iterator, draws = iter(before), []
    for at in range(number):
        if at == 5:  # An epoch has five batches, and a loop may know that.
            iterator = iter(before)
        draws.append((next(iterator).tolist(), float(torch.rand(()))))
    if number == 5:
        iterator = iter(before)
    position, generator = before.position(), torch.get_rng_state()
    rest = [(batch.tolist(), float(torch.rand(()))) for batch in iterator]

    torch.manual_seed(2)
    after = PositionedLoader(loader(**settings), **PLACE)
    torch.set_rng_state(generator)
    iterator = iter(after)
    after.seek(position)
    assert [(batch.tolist(), float(torch.rand(()))) for batch in iterator] == rest
    assert len(rest) == (5 if number == 5 else 5 - number % 5)


def test_nothing_is_drawn_or_read_before_the_first_batch() -> None:
    calls: list[str] = []
    positioned = PositionedLoader(loader(), **PLACE, before_batch=lambda: calls.append("before"))
    state = torch.get_rng_state()
    iterator = iter(positioned)
    assert torch.get_rng_state().equal(state) and not calls and positioned.position() == {}
    next(iterator)
    assert not torch.get_rng_state().equal(state) and calls == ["before"]


def test_it_has_the_length_and_the_attributes_of_the_loader() -> None:
    inner = loader()
    positioned = PositionedLoader(inner, **PLACE)
    assert len(positioned) == 5 and positioned.sampler is inner.sampler and positioned.state_dict() == {}
    with pytest.raises(AttributeError):
        _ = positioned.nothing


def test_fewer_batches_than_were_taken_are_refused() -> None:
    before = PositionedLoader([torch.ones(1)] * 4, **PLACE)
    taken(before, 3)
    after = PositionedLoader([torch.ones(1)] * 2, **PLACE)
    after.seek(before.position())
    with pytest.raises(ConfigError, match=r"expected at least 3 batches an epoch.*found 2"):
        next(iter(after))


def test_a_position_of_another_number_of_ranks_is_refused() -> None:
    before = PositionedLoader(loader(), rank=0, num_ranks=2)
    taken(before, 1)
    after = PositionedLoader(loader(), **PLACE)
    after.seek(before.position())
    with pytest.raises(ConfigError, match="each of 2 data-parallel ranks and does not fit 1"):
        next(iter(after))


def test_a_loader_with_a_state_of_its_own_kind_is_refused() -> None:
    class Own(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match="found a Own with a state of its own"):
        PositionedLoader(Own(), **PLACE)


def test_workers_that_persist_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    PositionedLoader(DataLoader(Noisy(), num_workers=1, persistent_workers=True), **PLACE)
    assert "persistent_workers=False" in caplog.text
