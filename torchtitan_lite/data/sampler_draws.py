"""The random order of a sampler that has no state: a resumed epoch draws it again.

torchdata resumes such a sampler by iterating it from its beginning and dropping what was delivered. One that draws its
order, from a generator of its own or from the global ones, would draw another one. So each iteration notes the
generators that its beginning changes, as they were before, and a resume begins with them. A sampler that draws for each
sample from a global generator is beyond that: training draws from it in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset

from torchtitan_lite.data.generators import KINDS, Generators, States, global_generators, set_state, state_of

_LONGEST_PATH = 100
"""Letters: more would be samplers in a circle."""


class ReplayedSampler:
    """Stands for `sampler` in a loader. Its other attributes are those of `sampler`."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._replayed: States = {}
        self.began: States = {}
        """The generators that the beginning of the present iteration changed, as they were before."""

    def __iter__(self) -> Iterator[Any]:
        generators = _generators_of(self._sampler)
        for name, state in self._replayed.items():
            if name in generators:
                set_state(generators[name], state)
        before = {name: state_of(generator) for name, generator in generators.items()}
        iterator = iter(self._sampler)
        if hasattr(iterator, "state_dict"):
            return iterator  # It resumes by itself.
        first = [*islice(iterator, 1)]  # A generator function draws only now.
        self.began = {name: state for name, state in before.items() if state_of(generators[name]) != state}
        return chain(first, iterator)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # TypeError for one without a length, as without this class

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def replay(self, began: States) -> None:
        """Have all further iterations begin with `began`, until this is called with an empty state."""
        self._replayed = began


def replayed_sampler(loader: Any) -> ReplayedSampler | None:
    """Put a `ReplayedSampler` into a StatefulDataLoader; None if it has no sampler, or one that resumes by itself."""
    owner, name = loader, "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(owner, name)
    if type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "sampler"):
        owner, name, sampler = sampler, "sampler", sampler.sampler  # It cuts the order of this one into batches.
    is_exact = type(sampler).__module__.startswith("torchdata.") or hasattr(sampler, "state_dict")
    if is_exact or isinstance(loader.dataset, IterableDataset):
        return None
    replayed = sampler if isinstance(sampler, ReplayedSampler) else ReplayedSampler(sampler)
    object.__setattr__(owner, name, replayed)  # A loader refuses to change its sampler by setattr.
    return replayed


def _generators_of(sampler: Any) -> Generators:
    """Return the random generators that `sampler` may draw from, by name: global ones, its own, its samplers' own."""
    found = global_generators()
    path, each = "", sampler
    while each is not None and len(path) < _LONGEST_PATH:
        own = getattr(each, "__dict__", {})
        found |= {f"{path}.{name}": value for name, value in own.items() if isinstance(value, KINDS)}
        path, each = f"{path}.sampler", own.get("sampler")
    return found
