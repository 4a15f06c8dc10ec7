"""A DataLoader that drew a seed from the generator that a load has restored, in the middle of an epoch.

`iter` of torch's DataLoader draws a seed, and the first batch of a shuffled one draws another. An uninterrupted run did
that before the save; a run that iterates after the load, and skips the batches of before, does it again: all random
numbers after that are others, and so is a shuffled order.

It is reported only where it is sure: the seed is the one that the restored generator gives first; the steps say that
the checkpoint is of the middle of an epoch, and that many batches were skipped; and something else has drawn, too.
So it is not found in the last two steps of an epoch, nor if a sampler skips.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import loader_iterators, num_yielded, seeds_of


class LateSeedWatch:
    """Looks at the first two steps after a load. One rank."""

    def __init__(self) -> None:
        self._loaded: int | None = None
        self._states: tuple[torch.Tensor, ...] = ()
        self._seed = self._first_step = 0
        self._first: list[tuple[weakref.ref[Any], int]] = []
        """The iterators that drew the seed, and how many batches of each were taken at the first step."""

    def after_load(self, step: int) -> None:
        """Note what the generator that was just restored with `step` gives next."""
        before, generator = torch.get_rng_state(), torch.Generator()
        generator.set_state(before)
        self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        self._loaded, self._states, self._first = step, (before, generator.get_state()), []

    def at_step(self, step: int) -> None:
        """Warn if a loader drew that seed late."""
        if self._loaded is None:
            return
        if not self._first:
            self._first_step, self._first = step, self._found()
            if not self._first:
                self._loaded = None
            return
        loaded, self._loaded = self._loaded, None
        for iterator, taken in self._first:
            skipped = _skipped(iterator(), taken, self._first_step, step, loaded)
            if skipped:
                logger.warning(
                    "A DataLoader drew a seed from the random generator that the load of step %d restored, and "
                    "skipped %d batches: random numbers, as of dropout, and a shuffled order are not those of an "
                    "uninterrupted run. Give it a generator of its own, seeded with the number of each epoch, or if it "
                    "does not shuffle, make its iterator before load()",
                    loaded,
                    skipped,
                )
                return

    def _found(self) -> list[tuple[weakref.ref[Any], int]]:
        now = torch.get_rng_state()
        # Nothing has drawn, or a loader alone: no other number is changed by that.
        if any(now.equal(state) for state in self._states):
            return []
        return [(weakref.ref(each), num_yielded(each)) for each in loader_iterators() if self._seed in seeds_of(each)]


def _skipped(iterator: Any, taken: int, first_step: int, step: int, loaded: int) -> int:
    """Return how many batches were skipped to reach the place of step `loaded` in its epoch; 0 if that is not sure."""
    a_step = (num_yielded(iterator) - taken) / max(step - first_step, 1)
    skipped = taken - a_step * (first_step - loaded)
    try:
        place = a_step * loaded % len(iterator)
    except TypeError:  # An iterable dataset has no length: more than a loop takes ahead is sure.
        place = 3
    return int(skipped) if a_step > 0 and skipped >= place > 0 else 0
