"""A run's objects as `Stateful`s: the model, the optimizers and the LR schedulers, and the protocol itself."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torchtitan_lite.checkpoint.state.model import ModelWrapper
from torchtitan_lite.checkpoint.state.optimizer import OptimizerWrapper
from torchtitan_lite.checkpoint.state.schedulers import LRSchedulerWrapper

__all__ = ["LRSchedulerWrapper", "ModelWrapper", "OptimizerWrapper", "Stateful", "as_stateful"]


class Stateful(Protocol):
    """Any object that can be in a checkpoint: `load_state_dict` accepts what `state_dict` returned.

    `state_dict` returns a copy, or live tensors that change only in the optimizer's step. It must be the same on every
    rank, because one rank's is saved; `PerRank` saves each rank's. Entries that may differ anyway, such as times, are
    named in an attribute `may_differ_between_ranks`: the lowest rank's are saved, without a warning.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DictState:
    """Saves the entries of `held`, and loads into that same dict: it then has the saved entries, and no others."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held

    def state_dict(self) -> dict[Any, Any]:
        """Return a copy of the dict, with the values themselves."""
        return self._held.copy()

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.update(state_dict)


def as_stateful(state: Stateful | dict[Any, Any]) -> Stateful:
    """Return `state`, or the `Stateful` of a plain dict."""
    is_plain = isinstance(state, dict) and not hasattr(state, "load_state_dict")
    return DictState(cast(dict[Any, Any], state)) if is_plain else cast(Stateful, state)
