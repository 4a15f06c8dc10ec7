"""Resumes of torchdata's loaders, with the global random generators as a run has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter

# torchdata 0.11 calls what torch 2.13 has deprecated; Python 3.12 warns of the workers' fork.
OF_TORCHDATA = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@contextmanager
def seeded_generators() -> Iterator[None]:
    """Seed the global generators, and restore them at the end."""
    before = states()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    yield
    restore(before)


def assert_resumes(
    make: Callable[[], StatefulDataLoaderAdapter], values: Callable[[Any], Any], *, epochs: int, taken: int
) -> None:
    """Fail unless a loader, left after `epochs` and `taken` batches, continues in another one, for three epochs."""
    first = make()
    for _ in range(epochs):
        values(first)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state, saved = first.state_dict(), states()
    expected = [values(batches), values(first), values(first)]
    torch.manual_seed(9)  # another process
    second = make()
    second.load_state_dict(state)
    restore(saved)  # A load restores the generators after the states.
    assert [values(second) for _ in range(3)] == expected, taken


def states() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def restore(saved: tuple[Any, ...]) -> None:
    """Give the global generators the states that `states` returned."""
    torch.set_rng_state(saved[0])
    np.random.set_state(saved[1])
    random.setstate(saved[2])
