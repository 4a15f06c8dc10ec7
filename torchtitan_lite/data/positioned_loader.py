"""A loader whose iteration has a position, for a loop that calls `iter` and `next` itself.

Nothing of a loader begins before its first batch is taken, so no random number is drawn before. A `StatefulDataLoader`
resumes at its own position. Any other loader is replayed: its iteration begins with the random generators that it began
with, and the batches that were taken are read again and dropped. Neither changes the global generators. A sampler or a
dataset that counts its epochs by itself must follow `set_epoch`; this does not look into them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter, begin_worker
from torchtitan_lite.data.rank_state import RESTART_DATA, pack, unpack
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, logger

_SLOW_SECONDS = 5.0
"""A replay of fewer seconds is not logged."""


class PositionedLoader:
    """Stands for `loader`, whose attributes it has, and calls `before_batch` before each batch is read.

    The iteration ends if that returns a true value. `seek` acts on the next iteration, at its first batch. Raises
    ConfigError for a loader with a state of its own that is not torchdata's.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        num_ranks: int,
        before_batch: Callable[[], object] = lambda: False,
        preemption_signals: Sequence[str] = Checkpoint.preemption_signals,
    ) -> None:
        self._loader, self._before_batch = loader, before_batch
        self._source = _sample_source(loader, rank, num_ranks, preemption_signals)
        self._loaded: Mapping[str, Any] | None = None
        self._is_over = True
        """Whether the iteration of the position is over: the next batch begins another one."""

    def __iter__(self) -> Iterator[Any]:
        self._is_over = self._loaded is None
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of an iteration that begins with its first batch, at the position that was loaded."""
        if self._before_batch():
            return
        loaded, self._loaded, self._is_over = self._loaded, None, False
        for batch in self._source.begin() if loaded is None else self._source.resume(loaded):
            self._source.taken += 1
            yield batch
            if self._before_batch():
                return

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:  # As copy and pickle ask for them.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a loop that saves its loaders by itself would save the position twice."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, like `state_dict`."""

    def position(self) -> dict[str, Any]:
        """Return the position as tensors, of this rank: the one to begin at, if there is one."""
        return dict(self._loaded) if self._loaded is not None else self._source.position(is_over=self._is_over)

    def seek(self, position: Mapping[str, Any]) -> None:
        """Begin the next iteration at `position`."""
        self._loaded = position

    def leave(self) -> None:
        """Note that the present iteration is over, although no other one has begun."""
        self._is_over = True


def _sample_source(loader: Any, rank: int, num_ranks: int, preemption_signals: Sequence[str]) -> _Stateful | _Replayed:
    if any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(loader).__mro__):
        adapter = StatefulDataLoaderAdapter(
            loader, rank=rank, num_ranks=num_ranks, preemption_signals=preemption_signals
        )
        return _Stateful(adapter, rank, num_ranks)
    if not isinstance(loader, DataLoader) and hasattr(loader, "state_dict"):
        raise ConfigError(
            "dataloader: expected a DataLoader or torchdata's StatefulDataLoader, found a "
            f"{type(loader).__name__} with a state of its own, which was not tried. Give its dataset to a "
            "StatefulDataLoader."
        )
    if getattr(loader, "num_workers", 0) > 0:
        loader.worker_init_fn = partial(begin_worker, tuple(preemption_signals), loader.worker_init_fn)
    return _Replayed(loader, rank, num_ranks)


class _Stateful:
    """Resumes a `StatefulDataLoader` at its own position."""

    def __init__(self, adapter: StatefulDataLoaderAdapter, rank: int, num_ranks: int) -> None:
        self._adapter, self._place = adapter, {"rank": rank, "num_ranks": num_ranks}
        self._begun: dict[str, Any] = {}
        """The global generators with which the present iteration began: workers are seeded from them."""
        self.taken = 0
        """Batches that were taken in the present iteration."""

    def begin(self) -> Iterator[Any]:
        self._begun, self.taken = RngState().state_dict(), 0
        return iter(self._adapter)

    def resume(self, position: Mapping[str, Any]) -> Iterator[Any]:
        own = unpack(position["position"], **self._place)
        generators = RngState().state_dict()
        RngState().load_state_dict(own["begun"])
        self._adapter.load_state_dict(dict(position["loader"]))
        iterator = iter(self._adapter)
        RngState().load_state_dict(generators)
        if own["is_over"]:  # A loop may leave an iteration before its end: the next one is another.
            return self.begin()
        self._begun, self.taken = own["begun"], own["taken"]
        return iterator

    def position(self, *, is_over: bool) -> dict[str, Any]:
        if not self._begun:
            return {}
        own = pack({"is_over": is_over, "taken": self.taken, "begun": self._begun}, **self._place)
        return {"position": own, "loader": self._adapter.state_dict()}


class _Replayed:
    """Reads the batches that were taken again, from the generators that their iteration began with."""

    def __init__(self, loader: Any, rank: int, num_ranks: int) -> None:
        self._loader, self._place = loader, {"rank": rank, "num_ranks": num_ranks}
        self._begun: dict[str, Any] = {}
        """The generators with which the present iteration began."""
        self.taken = 0
        if getattr(loader, "persistent_workers", False):
            logger.warning(
                "dataloader: workers of this DataLoader persist, and their random numbers continue from one epoch to "
                "the next: a resume begins them again. Set persistent_workers=False if the dataset draws in workers"
            )

    def begin(self) -> Iterator[Any]:
        self._begun, self.taken = {"global": RngState().state_dict(), "own": self._own()}, 0
        return iter(self._loader)

    def resume(self, position: Mapping[str, Any]) -> Iterator[Any]:
        state = unpack(position["position"], **self._place)
        if state["is_over"]:
            self._set_own(state["own"])
            return self.begin()
        generators, since = RngState().state_dict(), time.monotonic()
        RngState().load_state_dict(state["begun"]["global"])
        self._set_own(state["begun"]["own"])
        iterator = self.begin()
        self._skip(iterator, state["taken"])
        RngState().load_state_dict(generators)
        if (seconds := time.monotonic() - since) > _SLOW_SECONDS:
            logger.info(
                "Read %s again and dropped them: %.1f s. A StatefulDataLoader resumes at its position",
                counted(self.taken, "batch"),
                seconds,
            )
        return iterator

    def position(self, *, is_over: bool) -> dict[str, Any]:
        if not self._begun:
            return {}
        state = {"is_over": is_over, "taken": self.taken, "own": self._own(), "begun": {} if is_over else self._begun}
        return {"position": pack(state, **self._place)}

    def _skip(self, iterator: Iterator[Any], number: int) -> None:
        for taken in range(number):
            if next(iterator, self) is self:
                raise ConfigError(
                    f"dataloader: expected at least {counted(number, 'batch')} an epoch, which were taken "
                    f"before the save, found {taken}. Give it the data of that run, or {RESTART_DATA}."
                )
        self.taken = number

    def _own(self) -> list[torch.Tensor]:
        return [each.get_state() for each in _generators(self._loader)]

    def _set_own(self, states: Sequence[torch.Tensor]) -> None:
        for each, state in zip(_generators(self._loader), states, strict=False):
            each.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that `loader` and its samplers have for themselves, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(each, "generator", None) for each in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
