"""An iterable dataset of Hugging Face whose state is its position at any time, and is loaded for one iteration.

By itself it has four traits that make a resumed run another one, or end it: until the first example of an iteration its
state is that of the iteration before; every iteration after a load begins at the loaded position, also those of later
epochs; a position of an epoch other than its own is ignored; and with datasets 5.2 the position of a worker in a stream
that is shuffled or interleaved cannot be loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

_MOST_ALIKE = 1_000
"""After this many examples a position has changed. Those of one shuffle buffer share one."""
_KIND = ("datasets.iterable_dataset", "IterableDataset")


class PositionedStream:
    """Stands for `dataset`, a `datasets.IterableDataset`, in a loader or an adapter."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._loaded: dict[str, Any] = {}
        self._is_next = self._can_load = False
        self.has_begun = False
        """Whether the present iteration has given an example."""

    def __iter__(self) -> Iterator[Any]:
        if not self._is_next:
            self._loaded = {}
        self._is_next = self.has_begun = False
        self.dataset.load_state_dict(self._loaded)  # An empty one is the beginning.
        return self._examples()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the present iteration; empty at its beginning.

        Raises ConfigError if a resume could not load it.
        """
        if not self.has_begun:
            return self._loaded
        found: dict[str, Any] = self.dataset.state_dict()
        if get_worker_info() is not None and not self._can_load:
            _refuse_unloadable(self.dataset, found)
            self._can_load = True
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at `state`."""
        self._loaded, self._is_next, self.has_begun = state, True, False
        if "epoch" in state:
            self.dataset.set_epoch(state["epoch"])

    def _examples(self) -> Iterator[Any]:
        for example in _advancing(self.dataset, self._loaded):
            self.has_begun = True
            yield example


def _advancing(dataset: Any, loaded: dict[str, Any]) -> Iterator[Any]:
    """Yield the examples of `dataset`, which begins at the position `loaded`; empty for its beginning.

    Raises ConfigError if the position does not change after a load: with the first example, or after that one at all.
    """
    is_watched, before = bool(loaded), repr(loaded)
    for number, example in enumerate(dataset):
        if is_watched:
            found = repr(dataset.state_dict())
            if found == before and number in (0, _MOST_ALIKE):
                raise ConfigError(
                    f"dataloader: the position of this {type(dataset).__name__} did not advance with the examples that "
                    f"were taken after a load, so the next resume would take some again: {found:.200}. Use another "
                    "version of datasets, or a stream whose state_dict advances."
                )
            is_watched, before = number == 0 or found == before, found
        yield example


def is_hugging_face_stream(dataset: object) -> bool:
    """Return whether `dataset` is a `datasets.IterableDataset`. Imports nothing."""
    return any((kind.__module__, kind.__name__) == _KIND for kind in type(dataset).__mro__)


class BufferWatch:
    """Warns once, at a save, of a shuffle buffer in `dataset`: its position has none of the examples in the buffer.

    To refill it exactly, a resume would have to read the epoch from its beginning.
    """

    def __init__(self, dataset: object) -> None:
        self._size = _buffer_size(dataset) if is_hugging_face_stream(dataset) else 0

    def on_save(self, *, in_epoch: bool) -> None:
        """Warn if a resume at this position loses examples, the first time."""
        if self._size > 1 and in_epoch:
            logger.warning(
                "dataloader: the examples in the shuffle buffer of this datasets.IterableDataset (buffer_size=%d) are "
                "in no checkpoint, so a resume skips up to that many and has another order until the epoch ends. To "
                "resume exactly, shuffle the files once, and the order of the shards with .shuffle(seed=..., "
                "buffer_size=1)",
                self._size,
            )
            self._size = 0


def _buffer_size(dataset: Any) -> int:
    """Return the size of the largest shuffle buffer in `dataset`; 0 if there is none."""
    found = 0
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    for each in waiting:  # It grows meanwhile.
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            found = max(found, each.buffer_size)
        inner = [getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())]
        waiting += [one for one in inner if one is not None]
    return found


def _refuse_unloadable(dataset: Any, position: dict[str, Any]) -> None:
    """Raise ConfigError if a dataset like `dataset` cannot begin at `position`. Reads no example."""
    trial = copy.deepcopy(dataset)
    begin = getattr(trial, "_prepare_ex_iterable_for_iteration", None)
    if begin is None:
        return
    trial.load_state_dict(position)
    try:
        begin()
    except Exception as error:
        raise ConfigError(
            f"dataloader: the position of a worker in this datasets.IterableDataset cannot be loaded again "
            f"({type(error).__name__} in datasets), as if it is shuffled or interleaved, so no checkpoint could be "
            "resumed. Use num_workers=0."
        ) from error
