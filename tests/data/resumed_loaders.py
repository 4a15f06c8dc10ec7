"""Resumes of torchdata's loaders, with the global random generators as a run has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter


@contextmanager
def seeded_generators() -> Iterator[None]:
    """Seed the global generators, and restore them at the end."""
    before = _states()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    yield
    _restore(before)


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
    state, saved = first.state_dict(), _states()
    expected = [values(batches), values(first), values(first)]
    torch.manual_seed(9)  # another process
    second = make()
    second.load_state_dict(state)
    _restore(saved)  # A load restores the generators after the states.
    assert [values(second) for _ in range(3)] == expected, taken


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
