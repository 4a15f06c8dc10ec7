"""A run's objects as `Stateful`s: the model, the optimizers and the LR schedulers, and the protocol itself."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_lite.checkpoint.state.first_step import refuse_without_first_step, states_of_others
from torchtitan_lite.checkpoint.state.fsdp1 import is_fsdp1
from torchtitan_lite.checkpoint.state.model_wrapper import ModelWrapper
from torchtitan_lite.checkpoint.state.names import named_parameters, reshard_modules, with_clean_names
from torchtitan_lite.checkpoint.state.optimizer_owner import (
    Fsdp1Owner,
    Owner,
    PlainOwner,
    WholeOwner,
    has_torchs_form,
    parameters_of,
)
from torchtitan_lite.checkpoint.state.optimizer_state import (
    OF_OPTIMIZERS,
    OWNERS,
    PARAMETERS,
    OptimizerState,
    OwnerRanks,
    ParameterSlot,
    StateOwner,
    by_name,
    flat_optimizer_state,
    owner_of,
)
from torchtitan_lite.distributed.groups import world_size
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch, ConfigError
from torchtitan_lite.torch_private import inner_schedulers

K = TypeVar("K")

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


# The LR schedulers of a rank as one state.
#
# One scheduler has the keys `lr_scheduler.<key>`. So have several schedulers in equal states, such as those of pipeline
# stages, with their number: any number of equal schedulers resumes from them, and that many with other functions, which
# no state has. Schedulers in different states have the keys `lr_scheduler.<number>.<key>`, and a resume needs the same
# number of them. Each of these has the names of its optimizer's parameters, so that it finds its scheduler in a list of
# another order, and on another rank. Each state has the scheduler's class, because attributes of one class mean nothing
# to another.


CLASS = "_class"
"""The key of the scheduler's class."""
NUMBER = "_number"
"""The key of the number of schedulers that have one state; a state of one scheduler has none."""
_WAY_OUT = "Build the same schedule, or start a new one with --checkpoint.exclude_from_loading=lr_scheduler."
_OF_VERSIONS = {"verbose", "lr_lambdas"}
"""Keys that some versions of torch do not have, or that are empty and missing from older checkpoints."""


class LRSchedulerWrapper:
    """Any number of schedulers as one `Stateful`; `optimizers` knows the parameters of their optimizers.

    Without it schedulers are matched in order.
    """

    may_differ_between_ranks: ClassVar[tuple[str, ...]] = (NUMBER,)

    def __init__(self, lr_schedulers: Sequence[Any], optimizers: OptimizerWrapper | None = None) -> None:
        self._schedulers = list(lr_schedulers)
        self._optimizers = OptimizerWrapper([], []) if optimizers is None else optimizers
        self._numbers = list(range(len(self._schedulers)))
        """The number of each scheduler in a checkpoint, where their states differ: that of the loaded one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all schedulers, once if they are in equal states. Any rank."""
        states = self._own_states()
        if all(is_same(state, states[0]) for state in states[1:]):
            return (states[0] if states else {}) | ({NUMBER: len(states)} if len(states) > 1 else {})
        of_each = [state | {PARAMETERS: names} for state, names in zip(states, self._own_names(), strict=True)]
        return {str(number): of_each[at] for number, at in sorted(zip(self._numbers, range(len(states)), strict=True))}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `CheckpointMismatch` if `state_dict` does not fit these schedulers. Changes nothing."""
        self._for_each(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load each scheduler's state. Raises `CheckpointMismatch` before any scheduler changes."""
        states, self._numbers = self._for_each(state_dict)
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))  # Several may have the same one.

    def _own_states(self) -> list[dict[str, Any]]:
        return [dict(each.state_dict()) | {CLASS: class_name(each)} for each in self._schedulers]

    def _own_names(self) -> list[dict[str, bool]]:
        """Return the names of the parameters of each scheduler's optimizer."""
        optimizers = [getattr(each, "optimizer", None) for each in self._schedulers]
        return [dict.fromkeys(names, True) for names in self._optimizers.names_of(optimizers)]

    def _for_each(self, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the state that each scheduler loads, and the number of each."""
        own_states = self._own_states()
        given = _distributed(state_dict, own_states)
        own = [state | {PARAMETERS: names} for state, names in zip(own_states, self._own_names(), strict=True)]
        numbers = _matched(dict(enumerate(given)), range(len(given)), own)
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
    """Return whether two nested structures of numbers, arrays and tensors are equal, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, np.ndarray):
        held = (repr(each.tolist()) if each.dtype.hasobject else each.tobytes() for each in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and next(held) == next(held)
    return bool(a == b)


def _distributed(state_dict: Mapping[str, Any], own_states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    numbered = {key: state for key, state in state_dict.items() if key.isdecimal() and isinstance(state, Mapping)}
    shared = {key: state for key, state in state_dict.items() if key not in numbered}
    own_are_alike = all(is_same(state, own_states[0]) for state in own_states[1:])
    if shared and (own_are_alike or not numbered):
        if not own_are_alike and shared.get(NUMBER) != len(own_states):
            raise _mismatch(f"it has the state of one scheduler, and this run has {len(own_states)} that differ.")
        return [shared] * len(own_states)
    states = [numbered[key] for key in sorted(numbered, key=int)]
    if len(states) == len(own_states):
        return states
    if all(is_same(state, states[0]) for state in states[1:]):
        return states[:1] * len(own_states)
    raise _mismatch(f"it has the states of {len(states)} schedulers that differ, and this run has {len(own_states)}.")


def _matched(stored: Mapping[K, Mapping[str, Any]], numbers: Iterable[K], own: Sequence[Mapping[str, Any]]) -> list[K]:
    """Return for each of `own` which of `numbers` the state in `stored` has whose optimizer has one of its parameters.

    Several schedulers of one optimizer are matched by class, then in order. What is left is matched in order, as of
    older checkpoints, which have no names.
    """
    free, found = [*numbers], {}
    for at, each in enumerate(own):
        names = each[PARAMETERS].keys()
        of_same = [number for number in free if stored.get(number, {}).get(PARAMETERS, {}).keys() & names]
        if of_same:
            found[at] = min(of_same, key=lambda number: stored[number].get(CLASS) != each.get(CLASS))
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
    return {key: value for key, value in (dict(stored) | kept).items() if key not in (CLASS, NUMBER, PARAMETERS)}


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if not str(key).startswith("_")} - _OF_VERSIONS


def _mismatch(what: str) -> CheckpointMismatch:
    return CheckpointMismatch("the LR scheduler's state", f"  {what} {_WAY_OUT}")


# The optimizers of a rank as one flat state dict, by parameter name.
#
# A save creates no state: a parameter without state has no keys, and a load gives it none. A load creates the state
# that the checkpoint has, sharded like its parameter. `optimizer_state` defines the keys, and `optimizer_owner` reads
# and replaces the state of one optimizer.


_NOT_OF_ONE_RANK = (
    "its state_dict() does not have the form of torch.optim (state by number of the parameter, and param_groups), and "
    "its parameters are sharded or in several model parts: no rank's state dict would be the state of all. "
    "Use it in one process or with DDP, or use an optimizer with torch.optim's form."
)


class OptimizerWrapper:
    """Any number of optimizers over the parameters of `model_parts`, and of further `modules` by name of their state.

    Raises ConfigError for a parameter that belongs to no module or to two optimizers, for an optimizer whose state dict
    has a special form while ranks hold different parts of the model, and for a `state_owner` that returns no rank.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        modules: Mapping[str, nn.Module] | None = None,
        state_owner: StateOwner | None = None,
    ) -> None:
        self._parts = list(model_parts)
        self._state_owner = state_owner
        self._modules = dict(modules or {})
        self._optimizers = list(optimizers)
        self._names: dict[torch.Tensor, tuple[str, ...]] = {}
        self._refresh_names()
        for names in self._names.values() if state_owner is not None else ():
            owner_of(state_owner, names[0], world_size())  # Raises what a save would.
        self._owners = [_owner(number, each, self._parts, self._names) for number, each in enumerate(optimizers)]
        self._owned: set[str] = set()
        """What was loaded that only some ranks had, on a run of one rank, as in a checkpoint."""
        self._numbers = [str(number) for number in range(len(self._owners))]
        """The number of each optimizer in a checkpoint: that of the loaded one, if this one is in another order."""

    def __bool__(self) -> bool:
        """Return whether there is an optimizer."""
        return bool(self._owners)

    def state_dict(self) -> dict[str, Any]:
        """Return the flat state, with the keys of `optimizer_state`. **Collective** with FSDP1."""
        self._refresh_names()
        whole: dict[str, Any] = {}
        of_optimizers: dict[str, Any] = {}
        for number, owner in zip(self._numbers, self._owners, strict=True):
            state = owner.read()
            whole |= dict(flat_optimizer_state(state)) | owner.layouts(state)
            if self._state_owner is not None or self._owned:
                whole |= self._owners_alone(state)
            if state.rest:
                (names,) = self.names_of([owner.optimizer])
                of_optimizers[number] = dict(state.rest) | {PARAMETERS: dict.fromkeys(names, True)}
        return whole | ({OF_OPTIMIZERS: of_optimizers} if of_optimizers else {})

    def _owners_alone(self, state: OptimizerState) -> dict[str, str]:
        """Return who has each state that other numbers of ranks would not have on each: the only rank, if it is one."""
        if world_size() > 1:
            return {}
        given = {name for name in state.states if owner_of(self._state_owner, name, 1) is not None}
        found = [(name, f"{OWNERS}.{name}.{key}") for name, own in state.states.items() for key in own]
        return {key: str(OwnerRanks((0,), 1)) for name, key in found if name in given or key in self._owned}

    def names_of(self, optimizers: Sequence[Any]) -> list[list[str]]:
        """Return the names of the parameters of each of `optimizers`; none for what has no parameter groups."""
        self._refresh_names()
        held = [parameters_of(each) if hasattr(each, "param_groups") else () for each in optimizers]
        return [[self._names[each][0] for each in parameters if each in self._names] for parameters in held]

    def slots(self) -> dict[str, ParameterSlot]:
        """Return for each parameter, by name, what a load needs to know. **Collective** with FSDP1."""
        self._refresh_names()
        aliases = {names[0]: names for names in self._names.values()}
        slots: dict[str, ParameterSlot] = {}
        for number, owner in enumerate(self._owners):
            state, likes, first = owner.read(), owner.likes(), owner.first_states()
            for at, group in enumerate(state.groups):
                for name in group.names:
                    slots[name] = ParameterSlot(
                        aliases.get(name, (name,)),
                        (number, at),
                        likes[name],
                        group.settings,
                        state.states.get(name, {}),
                        first.get(name, {}),
                        owner_of(self._state_owner, name, world_size()),
                    )
        return slots

    def make_first_states(self) -> None:
        """Have `slots` return what first steps of the optimizers would make, until the next load. Changes nothing.

        Raises ConfigError for an optimizer that makes no state so.
        """
        for owner in self._owners:
            owner.make_first_states()

    def has_states_of_others(self) -> bool:
        """Return whether an optimizer has a state of a class that is made of other tensors. Any rank."""
        return any(True for owner in self._owners for _ in states_of_others(owner.optimizer))

    def refuse_without_first_step(self) -> None:
        """Raise ConfigError for states of classes of others that a new optimizer could not make. Any rank."""
        for owner in self._owners:
            if isinstance(owner.optimizer, Optimizer):
                refuse_without_first_step(owner.optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all state by the flat state; a parameter without keys loses its state. **Collective** with FSDP1.

        Settings (`param_groups.*`) that are not in it do not change, nor state of no parameter without `OF_OPTIMIZERS`.
        """
        self._owned = {key for key in state_dict if key.startswith(f"{OWNERS}.")}
        of_optimizers = state_dict.get(OF_OPTIMIZERS, {})
        own_names = [{PARAMETERS: dict.fromkeys(names)} for names in self.names_of(self._optimizers)]
        num_stored = max((int(number) + 1 for number in of_optimizers if number.isdecimal()), default=0)
        self._numbers = _matched(of_optimizers, map(str, range(max(len(own_names), num_stored))), own_names)
        for number, owner in zip(self._numbers, self._owners, strict=True):
            own = owner.read()
            names = {name for group in own.groups for name in group.names}
            states, settings = by_name(state_dict, names)
            rest = of_optimizers.get(number, {}) if OF_OPTIMIZERS in state_dict else own.rest
            owner.take(states, settings, rest)

    def refuse_where_parts_differ(self, peers: Peers) -> None:
        """Raise ConfigError on every rank if a state dict is saved unchanged and ranks have different models.

        **Collective**.
        """
        whole = [owner.optimizer for owner in self._owners if isinstance(owner, WholeOwner)]
        names = hashlib.blake2b("\n".join(sorted(names[0] for names in self._names.values())).encode()).hexdigest()
        gathered = peers.gather((type(whole[0]).__name__ if whole else "", names))
        kind = next((kind for kind, _ in gathered if kind), "")
        if kind and len({names for _, names in gathered}) > 1:
            raise ConfigError(f"{kind}: {_NOT_OF_ONE_RANK}")

    def with_state(self) -> set[torch.Tensor]:
        """Return the parameters that have optimizer state. Any rank."""
        return {
            parameter
            for owner in self._owners
            for parameter in parameters_of(owner.optimizer)
            if getattr(owner.optimizer, "state", {}).get(parameter)
        }

    def has_state(self) -> bool:
        """Return whether every trained parameter has optimizer state, from a step or a load. Any rank."""
        held = chain.from_iterable(parameters_of(owner.optimizer) for owner in self._owners)
        return {parameter for parameter in held if parameter.requires_grad} <= self.with_state()

    def _refresh_names(self) -> None:
        """Read the names of the present parameters: a model may change after the manager was made."""
        reshard_modules(self._parts)
        self._names.clear()
        self._names.update(named_parameters(self._parts))
        of_model = {name for names in self._names.values() for name in names} if self._modules else set()
        held = {parameter for each in self._optimizers for parameter in parameters_of(each)}
        for state, module in self._modules.items():
            for name, parameter in with_clean_names(module, dict(module.named_parameters())).items():
                own = f"{state}.{name}"
                if own in of_model and parameter not in self._names and parameter in held:
                    raise ConfigError(
                        f"states: {state!r} has the parameter {name!r}, and the model has one that is called {own!r}: "
                        "their optimizer states would have one name in a checkpoint. Give the state another name."
                    )
                self._names.setdefault(parameter, (own,))
        _refuse_unknown_parameters(self._optimizers, self._names)


def _owner(
    number: int, optimizer: Optimizer, parts: Sequence[nn.Module], names: Mapping[torch.Tensor, Sequence[str]]
) -> Owner:
    held = set(parameters_of(optimizer))
    for part in parts:
        if is_fsdp1(part) and held & set(part.parameters()):
            return Fsdp1Owner(optimizer, part)
    if has_torchs_form(optimizer):
        return PlainOwner(optimizer, names)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in held)
    if is_sharded or len(parts) > 1:
        raise ConfigError(f"optimizers[{number}] ({type(optimizer).__name__}): {_NOT_OF_ONE_RANK}")
    return WholeOwner(optimizer)


def _refuse_unknown_parameters(optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, Sequence[str]]) -> None:
    holders: dict[torch.Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        which = f"optimizers[{number}] ({type(optimizer).__name__})"
        parameters = list(parameters_of(optimizer))
        strangers = [at for at, parameter in enumerate(parameters) if parameter not in names]
        if strangers:
            shape = list(parameters[strangers[0]].shape)
            raise ConfigError(
                f"{which}: {len(strangers)} of its {len(parameters)} parameters (the first has shape {shape}) do not "
                "belong to the model, so their values would not be saved. If it was made before the model "
                "was sharded, wrapped or moved, make it afterwards; pass a module of its own, such as a loss with "
                "parameters, among the states: {'loss': loss}."
            )
        for parameter in parameters:
            other = holders.setdefault(parameter, number)
            if other != number:
                raise ConfigError(
                    f"{which}: optimizers[{other}] has the parameter {names[parameter][0]!r} too, and only one of "
                    "their states could be saved. Give each optimizer parameters of its own."
                )
