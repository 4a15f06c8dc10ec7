"""Adapters for the data loaders of torchdata and Hugging Face, to use in place of `TokenLoader`.

Each adapter is a `Stateful` whose state belongs to one data-parallel rank and is a copy, which later batches do not
change. A resume on the same number of ranks continues with the next batch; another number of ranks is refused with one
error. Everything else depends on the wrapped loader; docs/samples.md lists what was measured. Call `load_state_dict`
before iterating: it has no effect on an iteration in progress.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import IterableDataset

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.dataset_draws import bared_dataset, draws_in_workers, set_states_of_dataset, states_of_dataset
from torchtitan_lite.data.hugging_face_stream import BufferWatch, PositionedStream
from torchtitan_lite.data.rank_state import RESTART_DATA, pack, unpack
from torchtitan_lite.data.sampler_draws import replayed_sampler
from torchtitan_lite.distributed.tried_torch import refuse_stuck_stream
from torchtitan_lite.errors import ConfigError, ExtraMissing
from torchtitan_lite.log import counted, logger
from torchtitan_lite.torch_private import iterator_of, workers_of


class StatefulDataLoaderAdapter:
    """Adapt torchdata's StatefulDataLoader. Iterating yields the rest of its epoch, iterating again the next epoch.

    The state is that of the last batch yielded, so batches that workers fetched ahead are neither lost nor repeated.
    The wrapped loader must give each rank its share, for example by a sampler. The adapter does not check the corpus.

    Random numbers that the dataset and `collate_fn` draw are those of an uninterrupted run, in workers, too.

    Workers ignore `preemption_signals`, because a launcher sends the signal to every process and the workers would
    otherwise end before the ranks have saved. Their `worker_init_fn` runs after that. They end with their iterator,
    also if a collection of garbage ends that, and when this process ends, also in the middle of an epoch.
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
        # The only hook that torch has: the workers of the next iteration start with it.
        loader.worker_init_fn = partial(begin_worker, tuple(preemption_signals), loader.worker_init_fn)
        self._sampler = replayed_sampler(loader)
        self._buffer = BufferWatch(loader.dataset)
        self._still = _StillWatch(loader.dataset)
        refuse_stuck_stream("dataloader", loader.dataset)
        self._processes: list[BaseProcess] = []
        # Runs before multiprocessing's own exit handler, which sends workers SIGTERM and waits for them.
        atexit.register(_end_workers, self._processes, os.getpid())

    def __iter__(self) -> Iterator[Any]:
        with self._beginning():
            iterator: Iterator[Any] = iter(self._loader)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's position in the data."""
        with self._beginning():  # It begins the iteration if none has begun.
            state = {"num_workers": self._loader.num_workers, "loader": self._loader.state_dict()}
        if self._loader.generator is not None:
            state["generator"] = self._loader.generator.get_state()
        self._still.on_save(state["loader"])
        is_finished = state["loader"]["_iterator_finished"]
        self._buffer.on_save(in_epoch=not is_finished and state["loader"].get("_num_yielded", 0) > 0)
        if self._sampler is not None and (kept := self._sampler.kept(is_finished=is_finished)):
            state["sampler"] = kept
        if draws := states_of_dataset(self._loader):
            state["dataset"] = draws
        return pack(state, rank=self._rank, num_ranks=self._num_ranks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at the position of `state_dict`.

        Raises ConfigError if it has another number of ranks or workers.
        """
        state = unpack(state_dict, rank=self._rank, num_ranks=self._num_ranks)
        if state["num_workers"] != self._loader.num_workers:
            raise ConfigError(
                f"dataloader: its state has {counted(state['num_workers'], 'worker')} a rank, this loader has "
                f"{self._loader.num_workers}. Set num_workers={state['num_workers']}, or {RESTART_DATA}."
            )
        if self._sampler is not None:
            self._sampler.begin_replay(state.get("sampler", {}), state["loader"])
        self._still.on_load(state["loader"])
        self._loader.load_state_dict(state["loader"])
        # Begins the iteration now: that draws from torch's generator, which the load of a run restores last.
        with self._beginning():
            self._loader.state_dict()
        if self._sampler is not None:
            self._sampler.end_replay()
        if "generator" in state and self._loader.generator is not None:
            # To begin drew from it, too; an uninterrupted run did that before the save. torchdata does not undo it.
            self._loader.generator.set_state(state["generator"])
        # Samples that were read again and dropped drew, too.
        set_states_of_dataset(self._loader, state.get("dataset", {}))

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """Have the workers that an iteration begins in this block end with its iterator, and with this process."""
        with _none_left_by_a_failure(), draws_in_workers(self._loader):
            yield
        iterator = iterator_of(self._loader)
        workers = workers_of(iterator)
        if not {*workers} <= {*self._processes}:
            self._processes[:] = [*(each for each in self._processes if each.exitcode is None), *workers]
            # An iterator that dies in a reference cycle has lost its queues, and its workers wait for SIGTERM.
            weakref.finalize(iterator, _end_with_iterator, workers, self._processes, os.getpid()).atexit = False


class _StillWatch:
    """Warns once, at a save, of an iterable dataset whose own state is still what was loaded.

    It refuses nothing: a dataset may draw its samples, or count no more than the files that it has read.
    """

    def __init__(self, dataset: object) -> None:
        self._kind = type(dataset).__name__ if isinstance(dataset, IterableDataset) else ""
        self._loaded: tuple[int, str] | None = None

    def on_load(self, state: dict[str, Any]) -> None:
        """Note the position in `state`, a loader's, unless the dataset has none."""
        self._loaded = _position_in(state) if self._kind else None

    def on_save(self, state: dict[str, Any]) -> None:
        """Warn if `state`, the loader's, has that position although batches were taken."""
        if self._loaded is None or (found := _position_in(state)) == self._loaded:
            return
        if found and found[0] > self._loaded[0] and found[1] == self._loaded[1]:
            logger.warning(
                "dataloader: the state of this %s is what was loaded, although batches were taken since (%d), so a "
                "resume may take samples again. Let its state_dict return its position",
                self._kind,
                found[0] - self._loaded[0],
            )
        self._loaded = None


def _position_in(state: dict[str, Any]) -> tuple[int, str] | None:
    """Return how many batches of the epoch were taken, and the dataset's own states; None if it has none."""
    of_workers = state.get("_snapshot")
    parts = [state] if of_workers is None else of_workers["_worker_snapshots"].values()
    own = [(part.get("dataset_state"), (part.get("fetcher_state") or {}).get("dataset_iter_state")) for part in parts]
    if not any(each for states in own for each in states):
        return None
    return (state["_num_yielded"] if of_workers is None else of_workers["_snapshot_step"]), repr(own)


def _end_workers(workers: Sequence[BaseProcess], pid: int) -> None:
    """End `workers` of process `pid`; in a fork of it, do nothing."""
    if os.getpid() == pid:
        _kill(workers)


def _end_with_iterator(workers: Sequence[BaseProcess], remembered: list[BaseProcess], pid: int) -> None:
    """End `workers` of process `pid`, whose iterator is gone, and forget them: each keeps pipes open.

    In another thread than the main one do nothing: torch would raise the end of a worker in the main one. They end when
    the process does.
    """
    if threading.current_thread() is threading.main_thread():
        _end_workers(workers, pid)
        remembered[:] = [each for each in remembered if each not in workers]


@contextmanager
def _none_left_by_a_failure() -> Iterator[None]:
    """End the workers that begin in this block if it raises: no one has their iterator, and the exit waits for them."""
    before = multiprocessing.active_children()
    try:
        yield
    except BaseException:
        _kill(child for child in multiprocessing.active_children() if child.daemon and child not in before)
        raise


def _kill(workers: Iterable[BaseProcess]) -> None:
    """End `workers`, which have nothing to save, and ignore SIGTERM."""
    for worker in workers:
        if worker.is_alive():
            with suppress(RuntimeError):  # Torch's handler for the end of a child raises one for a worker.
                worker.kill()
                worker.join()
            worker.join()


class HuggingFaceStreamAdapter:
    """Adapt a `datasets.IterableDataset`. Iterating yields the rest of its epoch, iterating again the next epoch.

    The wrapped dataset must give each rank its share, by `datasets.distributed.split_dataset_by_node`. Its position is
    exact except for shuffle buffers, whose contents are lost; the first save warns of it. Read the dataset only through
    this adapter, without workers.
    """

    def __init__(self, dataset: Any, *, rank: int, num_ranks: int) -> None:
        _check_kind(dataset, "datasets", "IterableDataset")
        self._dataset, self._stream = dataset, PositionedStream(dataset)
        self._place = {"rank": rank, "num_ranks": num_ranks}
        self._buffer = BufferWatch(dataset)
        refuse_stuck_stream("dataloader", dataset)
        self.epoch = int(dataset.epoch)
        """The epoch of the present or next iteration; the first one is the dataset's own, by default 0."""

    def __iter__(self) -> Iterator[Any]:
        self._dataset.set_epoch(self.epoch)  # The dataset ignores a position of an epoch other than its own.
        self._stream.load_state_dict(self._stream.state_dict())
        yield from self._stream
        self.epoch += 1
        self._stream.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's position in the data."""
        self._buffer.on_save(in_epoch=self._stream.has_begun)
        return pack(self.position(), **self._place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at the position of `state_dict`. Raise ConfigError for another number of ranks."""
        self.seek(unpack(state_dict, **self._place))

    @property
    def is_in_epoch(self) -> bool:
        """Return whether the present or next iteration has begun its epoch, here or before a resume."""
        return bool(self._stream.state_dict())

    def position(self) -> dict[str, Any]:
        """Return this rank's position in the data, as plain values: the epoch, and the place in it."""
        return {"epoch": self.epoch, "place": self._stream.state_dict() or None}

    def seek(self, position: dict[str, Any]) -> None:
        """Start the next iteration at what `position` returned."""
        self.epoch = position["epoch"]
        self._stream.load_state_dict(position["place"] or {})


def begin_worker(ignored: Sequence[str], then: Callable[[int], object] | None, worker: int) -> None:
    """Prepare a worker of a loader, before its first sample, and then call `then`.

    It ignores the signals that the ranks watch: a launcher sends them to every process. A module function: a spawned
    worker must import it.
    """
    for name in ignored:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    draws = bared_dataset()
    if then is not None:
        then(worker)
    if draws is not None:
        draws.find()


def _check_kind(given: object, module: str, name: str) -> None:
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ExtraMissing.of(error, module.partition(".")[0]) from error
    if not isinstance(given, kind):
        raise ConfigError(
            f"dataloader: expected a {module}.{name}, found a {type(given).__name__}, which has no state. "
            f"Make it a {name}: without a state, a resume begins the data again from the start."
        )
