"""Loaders of others, in place of ours in a checkpoint: torchdata's and Hugging Face's.

Each adapter is a `Stateful` whose state is a copy that goes with one data-parallel rank: a resume on
the same number of ranks goes on with the next batch, another number is refused in one sentence. How
exact the rest is, is the wrapped loader's own; docs/samples.md says what was found. Load before
iterating: an iteration that is under way does not notice.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.rank_state import START_ANEW, pack, unpack
from torchtitan_lite.errors import ConfigError, ExtraMissing


class StatefulDataLoaderAdapter:
    """torchdata's StatefulDataLoader. Iterating gives the rest of its epoch, iterating again the next one.

    Batches that workers have fetched ahead are neither lost nor repeated: the state is that of the last batch
    handed out. The wrapped loader gives each rank its share, say by a sampler; it does not check the corpus.

    Workers ignore `preemption_signals`, of which a launcher sends one to every process: else they would be gone before
    the ranks have saved. Their `worker_init_fn` is called after that. They end when this process does, in the middle of
    an epoch too.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        num_ranks: int,
        preemption_signals: Sequence[str] = Checkpoint.preemption_signals,
    ) -> None:
        _check_kind(loader, "torchdata.stateful_dataloader", "StatefulDataLoader")
        self._loader, self._rank, self._num_ranks = loader, rank, num_ranks
        # torch has no other door: what is set here is what the workers of the next iteration begin with.
        loader.worker_init_fn = partial(_begin_worker, tuple(preemption_signals), loader.worker_init_fn)
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        # Runs before multiprocessing's own handler, which ends workers by SIGTERM and waits for them.
        atexit.register(_end_workers, self._iterators, weakref.ref(loader), os.getpid())

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        self._iterators.add(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """A copy of where this rank stands."""
        state = {"num_workers": self._loader.num_workers, "loader": self._loader.state_dict()}
        return pack(state, rank=self._rank, num_ranks=self._num_ranks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration begins there. Raises ConfigError at another number of ranks or workers."""
        state = unpack(state_dict, rank=self._rank, num_ranks=self._num_ranks)
        if state["num_workers"] != self._loader.num_workers:
            raise ConfigError(
                f"dataloader: its state is of {state['num_workers']} workers a rank, this loader has "
                f"{self._loader.num_workers}. Set num_workers={state['num_workers']}, or {START_ANEW}."
            )
        self._loader.load_state_dict(state["loader"])


def _end_workers(iterators: weakref.WeakSet[Any], loader: weakref.ref[Any], pid: int) -> None:
    """Leave no worker of `iterators`; runs at exit of the process `pid`, and does nothing in a fork of it."""
    if os.getpid() != pid:
        return
    # The loader makes one by itself when it is asked for its state first.
    for iterator in {*iterators, getattr(loader(), "_iterator", None)}:
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():
                worker.kill()  # They have nothing to lose, and ignore SIGTERM.
                worker.join()


class HuggingFaceStreamAdapter:
    """A `datasets.IterableDataset`. Iterating gives the rest of its epoch, iterating again the next one.

    The wrapped dataset gives each rank its share: `datasets.distributed.split_dataset_by_node`. Its place is exact
    except for shuffle buffers, whose contents are lost. Read it through this adapter alone, with no workers.
    """

    def __init__(self, dataset: Any, *, rank: int, num_ranks: int) -> None:
        _check_kind(dataset, "datasets", "IterableDataset")
        self._dataset, self._rank, self._num_ranks = dataset, rank, num_ranks
        self._epoch = int(dataset.epoch)
        self._place: dict[str, Any] | None = None
        self._is_under_way = False

    def __iter__(self) -> Iterator[Any]:
        self._place = self._present_place()
        self._dataset.set_epoch(self._epoch)  # a place in another epoch than the dataset's would be ignored
        self._dataset.load_state_dict(self._place)
        for example in self._dataset:
            self._is_under_way = True
            yield example
        self._epoch, self._place, self._is_under_way = self._epoch + 1, None, False

    def state_dict(self) -> dict[str, Any]:
        """A copy of where this rank stands."""
        state = {"epoch": self._epoch, "place": self._present_place()}
        return pack(state, rank=self._rank, num_ranks=self._num_ranks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration begins there. Raises ConfigError at another number of ranks."""
        state = unpack(state_dict, rank=self._rank, num_ranks=self._num_ranks)
        self._epoch, self._place, self._is_under_way = state["epoch"], state["place"], False

    def _present_place(self) -> dict[str, Any] | None:
        """The dataset's own state; None at the beginning of an epoch."""
        # Until its first example after a load, the dataset tells where it was before.
        return self._dataset.state_dict() if self._is_under_way else self._place


def _begin_worker(ignored: Sequence[str], then: Callable[[int], object] | None, worker: int) -> None:
    """Runs in a worker, before its first sample. Of the module, not of an object, so that a spawned one finds it."""
    for name in ignored:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    if then is not None:
        then(worker)


def _check_kind(given: object, module: str, name: str) -> None:
    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ExtraMissing(module.partition(".")[0]) from error
    if not isinstance(given, kind):
        raise ConfigError(
            f"dataloader: expected a {module}.{name}, found a {type(given).__name__}, which has no state. "
            f"Make it a {name}: without a state, a resume begins the data again from their start."
        )
