"""The LR schedulers of a rank as one state.

One scheduler has the keys `lr_scheduler.<key>`. So have several schedulers in equal states, such as
those of pipeline stages: any number of schedulers resumes from them. Schedulers in different states
have the keys `lr_scheduler.<number>.<key>`, and a resume needs the same number of them. Each of these has the names of
its optimizer's parameters, so that it finds its scheduler in a list of another order, and on another rank. Each state
has the scheduler's class, because attributes of one class mean nothing to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from torchtitan_lite.checkpoint.state.optimizer_state import PARAMETERS
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.torch_private import inner_schedulers

CLASS = "_class"
"""The key of the scheduler's class."""
_WAY_OUT = "Build the same schedule, or begin this one with --checkpoint.exclude_from_loading=lr_scheduler."
_OF_VERSIONS = {"verbose", "lr_lambdas"}
"""Keys that some versions of torch do not have, or that are empty and missing from older checkpoints."""


class Names(Protocol):
    """Knows the parameters' names."""

    def names_of(self, optimizers: Sequence[Any]) -> list[list[str]]:
        """Return the names of the parameters of each of `optimizers`; none for what is no optimizer of the run."""
        ...


class Unnamed:
    """Knows no name: schedulers are matched in order."""

    def names_of(self, optimizers: Sequence[Any]) -> list[list[str]]:
        return [[] for _ in optimizers]


UNNAMED = Unnamed()


class LRSchedulerWrapper:
    """Any number of schedulers as one `Stateful`; `names` knows the parameters of their optimizers."""

    def __init__(self, lr_schedulers: Sequence[Any], names: Names = UNNAMED) -> None:
        self._schedulers = list(lr_schedulers)
        self._names = names
        self._numbers = list(range(len(self._schedulers)))
        """The number of each scheduler in a checkpoint, where their states differ: that of the loaded one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all schedulers, once if they are in equal states. Any rank."""
        states = self._own_states()
        if all(is_same(state, states[0]) for state in states[1:]):
            return states[0] if states else {}
        of_each = [state | {PARAMETERS: names} for state, names in zip(states, self._own_names(), strict=True)]
        return {str(number): of_each[at] for number, at in sorted(zip(self._numbers, range(len(states)), strict=True))}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointMismatch` if `state_dict` does not fit these schedulers. Changes nothing."""
        self._for_each(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load each scheduler's state. Raises `CheckpointMismatch` before any scheduler changes."""
        states, self._numbers = self._for_each(state_dict)
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    def _own_states(self) -> list[dict[str, Any]]:
        return [dict(each.state_dict()) | {CLASS: class_name(each)} for each in self._schedulers]

    def _own_names(self) -> list[dict[str, bool]]:
        """Return the names of the parameters of each scheduler's optimizer."""
        optimizers = [getattr(each, "optimizer", None) for each in self._schedulers]
        return [dict.fromkeys(names, True) for names in self._names.names_of(optimizers)]

    def _for_each(self, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the state that each scheduler loads, and the number of each."""
        own_states = self._own_states()
        given = _distributed(state_dict, own_states)
        numbers = _matched(
            given, [own | {PARAMETERS: names} for own, names in zip(own_states, self._own_names(), strict=True)]
        )
        return [
            _merged(given[number], own, at if len(own_states) > 1 else None)
            for at, (number, own) in enumerate(zip(numbers, own_states, strict=True))
        ], numbers


def class_name(scheduler: Any) -> str:
    """Return the name of the class of `scheduler`, with those of its inner schedulers."""
    parts = inner_schedulers(scheduler)
    inner = f"({', '.join(map(class_name, parts))})" if parts is not None else ""
    return type(scheduler).__name__ + inner


def is_same(a: Any, b: Any) -> bool:
    """Return whether two nested structures of numbers and tensors are equal, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def _distributed(state_dict: Mapping[str, Any], own_states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    numbered = {key: state for key, state in state_dict.items() if key.isdecimal() and isinstance(state, Mapping)}
    shared = {key: state for key, state in state_dict.items() if key not in numbered}
    own_are_alike = all(is_same(state, own_states[0]) for state in own_states[1:])
    if shared and (own_are_alike or not numbered):
        if not own_are_alike:
            raise _mismatch(f"it has the state of one scheduler, and this run has {len(own_states)} that differ.")
        return [shared] * len(own_states)
    states = [numbered[key] for key in sorted(numbered, key=int)]
    if len(states) == len(own_states):
        return states
    if all(is_same(state, states[0]) for state in states[1:]):
        return states[:1] * len(own_states)
    raise _mismatch(f"it has the states of {len(states)} schedulers that differ, and this run has {len(own_states)}.")


def _matched(stored: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each of `own` the number of the state in `stored` whose optimizer has a parameter of its own.

    Several schedulers of one optimizer are matched by class, then in order. What is left is matched in order, as of
    older checkpoints, which have no names.
    """
    free, found = list(range(len(stored))), {}
    for at, each in enumerate(own):
        of_same = [number for number in free if stored[number].get(PARAMETERS, {}).keys() & each[PARAMETERS].keys()]
        if of_same:
            found[at] = min(of_same, key=lambda number: stored[number].get(CLASS) != each[CLASS])
            free.remove(found[at])
    return [found[at] if at in found else free.pop(0) for at in range(len(own))]


def _merged(stored: Mapping[str, Any], own: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    """Return `stored` without what is not the scheduler's own, and with the keys of `own` that it lacks if older."""
    which = "the scheduler" if number is None else f"scheduler {number}"
    if CLASS in stored:
        if stored[CLASS] != own[CLASS]:
            raise _mismatch(f"{which} was a {stored[CLASS]}, and is a {own[CLASS]} in this run.")
    elif others := sorted(_public(stored) ^ _public(own)):
        raise _mismatch(
            f"{which} was of another class than {own[CLASS]}: only one of the two has {', '.join(map(repr, others))}."
        )
    kept = {key: value for key, value in own.items() if key in _OF_VERSIONS and key not in stored}
    return {key: value for key, value in (dict(stored) | kept).items() if key not in (CLASS, PARAMETERS)}


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if not str(key).startswith("_")} - _OF_VERSIONS


def _mismatch(what: str) -> CheckpointMismatch:
    return CheckpointMismatch("the LR scheduler's state", f"  {what} {_WAY_OUT}")
