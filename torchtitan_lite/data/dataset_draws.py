"""The random numbers that a dataset draws for its samples: a resumed loader draws the same ones.

In the process of the loader these come from the global generators, which a checkpoint of the run has, and from those
in the attributes of the dataset and of `collate_fn`, which the adapter's state has. A resume seeds workers as at the
beginning of their epoch; so what stands for the dataset in them adds all generators to its state.

An iterable dataset without a state can keep nothing in a worker, and needs it least: torchdata reads it from its
beginning again, with the same seeds, and drops what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, get_worker_info

from torchtitan_lite.data.generators import Generators, States, global_generators, own_generators, set_state, states_of
from torchtitan_lite.data.hugging_face_stream import PositionedStream, is_hugging_face_stream

_GENERATORS, _OWN = "torchtitan_lite.generators", "torchtitan_lite.own"
"""Keys of a state: the generators, and the state of the dataset, or of its iterator, itself."""


class WorkerDraws:
    """The generators that a dataset and `collate_fn` draw from in a worker."""

    def __init__(self, dataset: object, collate_fn: object) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn
        self._seeded: States = {}
        self._generators: Generators = {}

    def find(self) -> None:
        """Find the generators: after the worker was seeded, and before it draws."""
        self._seeded = states_of(global_generators())
        self._generators = global_generators() | _own_generators(self._dataset, self._collate_fn)

    def added_to(self, owner: object) -> Any:
        """Return the state of `owner`, if it has one, with that of the generators, if there is any to keep."""
        own = owner.state_dict() if _has_state_dict(owner) else None  # type: ignore[attr-defined]  # it has one
        kept = {name: state for name, state in states_of(self._generators).items() if state != self._seeded.get(name)}
        if kept:
            return {_GENERATORS: kept, _OWN: own}
        return {} if own is None else own

    def load(self, state: Any, owner: object) -> None:
        """Load what `added_to` returned, or what `owner` itself did."""
        has_generators = isinstance(state, dict) and _GENERATORS in state
        own = state[_OWN] if has_generators else state
        if _has_state_dict(owner) and own is not None:
            owner.load_state_dict(own)  # type: ignore[attr-defined]  # it has one
        if has_generators:
            _set_states(self._generators, state[_GENERATORS])


class _Stands:
    """Stands for a dataset in a loader's iterators. Its other attributes are those of the dataset."""

    def __init__(self, dataset: Any, draws: WorkerDraws) -> None:
        self.dataset, self.draws = dataset, draws

    def __getattr__(self, name: str) -> Any:
        # A loader looks for this special method; pickle looks for others, before there is a dataset.
        if name.startswith("__") and name != "__getitems__":
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)


class _Samples(_Stands):
    """Stands for a dataset with indices."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def state_dict(self) -> Any:
        return self.draws.added_to(self.dataset)

    def load_state_dict(self, state: Any) -> None:
        self.draws.load(state, self.dataset)


class _Stream(_Stands):
    """Stands for an iterable dataset, or for an iterator of one."""

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.dataset)
        if iterator is self.dataset:
            return self
        is_stateful = _has_state_dict(self.dataset) or _has_state_dict(iterator)
        return _StatefulStream(iterator, self.draws) if is_stateful else iterator

    def __next__(self) -> Any:
        return next(self.dataset)


class _StatefulStream(_Stream):
    """The same for one that has a state."""

    def state_dict(self) -> Any:
        return self.draws.added_to(self.dataset)

    def load_state_dict(self, state: Any) -> None:
        self.draws.load(state, self.dataset)


def states_of_dataset(loader: Any) -> States:
    """Return the states of the generators in this process that the dataset and `collate_fn` of `loader` have."""
    return states_of(_own_generators(loader.dataset, loader.collate_fn))


def set_states_of_dataset(loader: Any, states: States) -> None:
    """Give these generators the states that `states_of_dataset` returned."""
    _set_states(_own_generators(loader.dataset, loader.collate_fn), states)


@contextmanager
def draws_in_workers(loader: Any) -> Iterator[None]:
    """Begin iterations in this block: their workers keep the draws, and streams of Hugging Face their positions.

    Outside it the loader has its own dataset.
    """
    dataset = standing = loader.dataset
    if is_hugging_face_stream(dataset):
        standing = PositionedStream(dataset)
    if loader.num_workers and not isinstance(dataset, IterDataPipe | MapDataPipe):  # torch changes pipes.
        standing = _standing(standing, WorkerDraws(dataset, loader.collate_fn))
    object.__setattr__(loader, "dataset", standing)  # It refuses setattr.
    try:
        yield
    finally:
        object.__setattr__(loader, "dataset", dataset)


def bared_dataset() -> WorkerDraws | None:
    """In a worker: have `get_worker_info` return the dataset itself, whose attributes a `worker_init_fn` may set.

    Return what keeps the draws; it has to find the generators again when the worker is seeded.
    """
    info = get_worker_info()
    if info is None or not isinstance(info.dataset, _Stands):
        return None
    draws = info.dataset.draws
    dataset = info.dataset.dataset
    own = dataset.dataset if isinstance(dataset, PositionedStream) else dataset
    object.__setattr__(info, "dataset", own)  # It refuses setattr.
    return draws


def _standing(dataset: Any, draws: WorkerDraws) -> _Stands:
    if not isinstance(dataset, IterableDataset | PositionedStream):
        return _Samples(dataset, draws)
    return _StatefulStream(dataset, draws) if _has_state_dict(dataset) else _Stream(dataset, draws)


def _own_generators(dataset: object, collate_fn: object) -> Generators:
    return own_generators("collate_fn", collate_fn) | own_generators("dataset", dataset)


def _set_states(generators: Generators, states: States) -> None:
    for name, state in states.items():
        if name in generators:
            set_state(generators[name], state)


def _has_state_dict(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
