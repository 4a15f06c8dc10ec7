"""Reads and replaces the state of one optimizer.

Only the optimizer's own `state_dict` and `load_state_dict` are called, with all their hooks, and never
its `step`: to read the state changes nothing, and a parameter that never had a gradient has no state.
There are three kinds of owners: for a state dict as `torch.optim` makes it, for an optimizer over FSDP1's
flat parameters, and for any other object. The last one saves the state dict unchanged, which works only
if it is the same on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_lite.checkpoint.format.structure import FORM, are_pieces
from torchtitan_lite.checkpoint.state import fsdp1
from torchtitan_lite.checkpoint.state.first_step import first_states
from torchtitan_lite.checkpoint.state.names import clean_names, with_clean_names
from torchtitan_lite.checkpoint.state.optimizer_state import (
    OF_OPTIMIZERS,
    SETTINGS,
    STATE,
    Group,
    OptimizerState,
    flat_layouts,
    nested_tensors,
    refuse_unsharded,
)
from torchtitan_lite.checkpoint.state.shared_storage import SHARED, NamedTensor, may_share, shared_pairs, tensors_below
from torchtitan_lite.checkpoint.state.subclasses import fill, is_made_of_others, with_parts
from torchtitan_lite.errors import CheckpointMismatch, ConfigError

_NOT_SETTINGS = ("params", "param_names")
GLOBAL, OTHER, EMPTY_GROUPS, WHOLE = "global", "other", "empty_groups", "whole"
"""Keys of `OptimizerState.rest`: state that belongs to no parameter, further keys of the state dict, settings of groups
without parameters, and a complete state dict."""


class Owner:
    """Reads and replaces the state of one `optimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def likes(self) -> dict[str, torch.Tensor]:
        """Return for each parameter, by name, a tensor that is sharded as its state is."""
        return {}

    def read(self) -> OptimizerState:
        """Return the current state: live tensors where the optimizer's own state dict has such, else copies.

        A load may read into either, because `take` gets what was read.
        """
        raise NotImplementedError

    def make_first_states(self) -> None:
        """Make the states that the optimizer's first step would, for `first_states` and `take`. Any rank."""
        return

    def first_states(self) -> dict[str, Mapping[Any, Any]]:
        """Return what `make_first_states` made, as `read` returns states; none if it was not called since `take`."""
        return {}

    def layouts(self, state: OptimizerState) -> dict[str, Any]:
        """Return how tensors of `state` are sharded, by flat key, if they are not sharded like their parameters.

        Also returns which of them are the same. Raises TypeError for a tensor that a checkpoint cannot hold, because
        its value may differ between ranks, or because it is a part of another one.
        """
        return {}

    def take(self, states: Mapping[str, Any], settings: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Replace the state; `states` and `settings` are by parameter name. A missing setting does not change."""
        raise NotImplementedError


class PlainOwner(Owner):
    """An optimizer whose state dict has `state`, by the parameter's number, and `param_groups`."""

    def __init__(self, optimizer: Any, names: Mapping[torch.Tensor, Sequence[str]]) -> None:
        super().__init__(optimizer)
        self._names = names
        self._first: Mapping[str, Mapping[Any, Any]] = {}

    def likes(self) -> dict[str, torch.Tensor]:
        return {self._names[parameter][0]: parameter for parameter in parameters_of(self.optimizer)}

    @torch.no_grad()  # As in `with_parts_apart`.
    def read(self) -> OptimizerState:
        # Not torch's `get_optimizer_state_dict`, which makes missing state by a step with learning rate 0: the user's
        # hooks run, an average moves, and if the step raises, the rate stays 0.
        own = self._state_dict()
        names = self._numbered(own)
        states = {
            names[number]: with_parts(f"optimizer.{STATE}.{names[number]}", state)
            for number, state in own["state"].items()
            if number in names
        }
        groups = [
            Group([names[number] for number in group["params"]], _group_settings(group))
            for group in own["param_groups"]
        ]
        rest = {
            GLOBAL: {key: state for key, state in own["state"].items() if key not in names},
            OTHER: {key: value for key, value in own.items() if key not in ("state", "param_groups")},
            EMPTY_GROUPS: {str(at): dict(group.settings) for at, group in enumerate(groups) if not group.names},
        }
        return OptimizerState(states, groups, {kind: held for kind, held in rest.items() if held})

    def layouts(self, state: OptimizerState) -> dict[str, Any]:
        likes = self.likes()
        if any(isinstance(like, DTensor) for like in likes.values()):
            for tensor in nested_tensors(state.rest):
                if tensor.numel() > 1 and not isinstance(tensor, DTensor):
                    raise TypeError(
                        f"{type(self.optimizer).__name__} has a tensor of shape {list(tensor.shape)} that belongs to "
                        "no parameter, while its parameters are sharded: its value may differ between ranks. "
                        "Keep it in the state of a parameter."
                    )
        # A setting that is a tensor is in it once for each group.
        settings = chain.from_iterable(nested_tensors(group.settings) for group in state.groups)
        is_rare = may_share(chain(nested_tensors(state.states), settings, nested_tensors(state.rest), likes.values()))
        shared = shared_pairs(self._held(state), likes) if is_rare else {}
        return dict(flat_layouts(state, likes)) | {f"{SHARED}.{name}": pairs for name, pairs in shared.items()}

    def _held(self, state: OptimizerState) -> Iterator[NamedTensor]:
        """Yield the tensors of `state`. A setting that is a tensor is the same one for all parameters of its group."""
        for name, own in state.states.items():
            # Pieces of shards have names of each rank, and are filled where they are.
            whole = {key: value for key, value in own.items() if not are_pieces(value)}
            yield from tensors_below(f"{STATE}.{name}", whole, name)
        groups: dict[int, str] = {}
        for group in state.groups:
            for key, value in group.settings.items():
                if not isinstance(value, torch.Tensor):
                    continue
                is_first = groups.setdefault(id(value), group.names[0] if group.names else "") in group.names[:1]
                for name in group.names[:1] if is_first else group.names:
                    yield from tensors_below(f"{SETTINGS}.{name}.{key}", value, name)
        yield from tensors_below(OF_OPTIMIZERS, state.rest, "")

    def take(self, states: Mapping[str, Any], settings: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        refuse_unsharded(states, self.likes())
        own = self.optimizer.state_dict()
        names = self._numbered(own)
        live = {name: own["state"].get(number, {}) for number, name in names.items()}
        wholes = {name: self._wholes(name, state, live.get(name, {})) for name, state in states.items()}
        new = {number: {**states[name], **wholes[name]} for number, name in names.items() if name in states}
        empty_groups = rest.get(EMPTY_GROUPS, {})
        groups = []
        for at, group in enumerate(own["param_groups"]):
            groups.append(_with_settings(group, names, settings) or group | dict(empty_groups.get(str(at), {})))
        whole = (
            own
            | self._placed(rest.get(OTHER, {}), own)
            | {"state": new | self._placed(rest.get(GLOBAL, {}), own["state"]), "param_groups": groups}
        )
        with exact_dtypes(self.optimizer, whole):
            self.optimizer.load_state_dict(whole)
        self._put_in(wholes)

    def make_first_states(self) -> None:
        made = first_states(self.optimizer)
        self._first = {self._names[parameter][0]: state for parameter, state in made.items()}

    def first_states(self) -> dict[str, Mapping[Any, Any]]:
        return {name: with_parts(f"optimizer.{STATE}.{name}", state) for name, state in self._first.items()}

    def _wholes(self, name: str, state: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
        """Return the tensors of `state` that are made of others, each with the parts that were read for it."""
        found = {}
        for key, value in state.items():
            if isinstance(value, Mapping) and FORM in value:
                made = own.get(key, self._first.get(name, {}).get(key))
                assert is_made_of_others(made), "the report refuses a form that nothing here has"
                fill(made, value, f"optimizer.{STATE}.{name}.{key}")
                found[key] = made
        return found

    def _put_in(self, wholes: Mapping[str, Mapping[Any, torch.Tensor]]) -> None:
        """Have the optimizer hold `wholes` themselves: torch loads a copy, which the class may make in its own way."""
        self._first = {}
        for parameter in parameters_of(self.optimizer) if any(wholes.values()) else ():
            state = self.optimizer.state.get(parameter, {})
            of_parameter = wholes.get(self._names[parameter][0], {})
            state.update({key: made for key, made in of_parameter.items() if key in state})

    def _state_dict(self) -> dict[str, Any]:
        try:
            own: dict[str, Any] = self.optimizer.state_dict()
        except KeyError as error:
            if {id(key) for key in self.optimizer.state} - {id(each) for each in parameters_of(self.optimizer)}:
                raise ConfigError(
                    f"{type(self.optimizer).__name__} has a state for parameters that are in none of its param_groups, "
                    "so torch cannot make its state_dict. Delete these from optimizer.state with their group."
                ) from error
            raise
        return own

    def _numbered(self, own: Mapping[str, Any]) -> dict[Any, str]:
        """Return the name of each parameter by its number in the state dict `own`."""
        names: dict[Any, str] = {}
        for group, live in zip(own["param_groups"], self.optimizer.param_groups, strict=True):
            for number, parameter in zip(group["params"], live["params"], strict=True):
                names[number] = self._names[parameter][0]
        return names

    def _placed(self, values: Mapping[Any, Any], live: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return `values` on the devices of `live`; values that are not in `live` go to the parameters' device."""
        device = next((parameter.device for parameter in parameters_of(self.optimizer)), torch.device("cpu"))
        return {key: _on_devices_of(value, live.get(key), device) for key, value in values.items()}


class Fsdp1Owner(Owner):
    """An optimizer over the parameters of a module that FSDP1 shards, all state like its parameters.

    Its methods are **collective**.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer)
        self._module = module

    def likes(self) -> dict[str, torch.Tensor]:
        with fsdp1.sharded_state_dicts(self._module):
            named = self._module.state_dict().items()
            tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        return with_clean_names(self._module, tensors)

    def read(self) -> OptimizerState:
        with fsdp1.sharded_state_dicts(self._module):
            own = self._own()
        states = with_clean_names(self._module, own["state"])
        not_contiguous = [name for name, is_contiguous in fsdp1.flat_names(self._module).items() if not is_contiguous]
        in_another_order = set(clean_names(self._module, not_contiguous).values())
        for name, state in states.items():
            if name in in_another_order and any(tensor.dim() > 0 for tensor in nested_tensors(state)):
                raise ConfigError(
                    f"optimizer.state.{name}: its parameter is in another memory format, such as channels_last, and "
                    "FSDP1 loads the state of such a parameter in the wrong order. Make the parameter contiguous."
                )
            if any(tensor.dim() > 0 and tensor.numel() == 0 for tensor in nested_tensors(state)):
                raise ConfigError(
                    f"optimizer.state.{name}: its parameter has no elements, and FSDP1 loads no state of such a "
                    "parameter. Leave it out of the optimizer, or use fully_shard."
                )
        groups = []
        for group in own["param_groups"]:
            names = clean_names(self._module, group["params"])
            groups.append(Group([names[raw] for raw in group["params"]], _group_settings(group)))
        return OptimizerState(states, groups)

    def take(self, states: Mapping[str, Any], settings: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        with fsdp1.sharded_state_dicts(self._module):
            own = self._own()
            raw_names = [raw for group in own["param_groups"] for raw in group["params"]]
            names = clean_names(self._module, raw_names)
            groups = [_with_settings(group, names, settings) or group for group in own["param_groups"]]
            new = {"state": {raw: states[names[raw]] for raw in raw_names if names[raw] in states}}
            loadable = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module, self.optimizer, new | {"param_groups": groups}
            )
        with exact_dtypes(self.optimizer):
            self.optimizer.load_state_dict(loadable)

    def _own(self) -> dict[str, Any]:
        try:
            return FullyShardedDataParallel.optim_state_dict(self._module, self.optimizer)
        except RuntimeError as error:
            if "is not in the optimizer state" not in str(error):
                raise
            # FSDP1 handles the state of all parameters in a flat one together.
            raise ConfigError(
                f"{type(self.optimizer).__name__}: FSDP1 returns an optimizer's state only if that has one for each "
                f"trained parameter of a wrapped module, but {error} Use one optimizer for each wrapped module, "
                "with state for each parameter, or fully_shard."
            ) from error


class WholeOwner(Owner):
    """An optimizer whose state dict has a special form, and is saved unchanged."""

    def read(self) -> OptimizerState:
        return OptimizerState({}, [], {WHOLE: self.optimizer.state_dict()})

    def take(self, states: Mapping[str, Any], settings: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        if WHOLE not in rest:
            kind = type(self.optimizer).__name__
            raise CheckpointMismatch(
                "the optimizer's state dict", f"  it has no state dict of {kind}, which has a special form"
            )
        self.optimizer.load_state_dict(rest[WHOLE])


def has_torchs_form(optimizer: Any) -> bool:
    """Return whether the state dict of `optimizer` has the form of `torch.optim`, with parameters by number."""
    try:
        own = optimizer.state_dict()
    except Exception:  # A save meets it again, and raises it.
        return True
    groups = own.get("param_groups") if isinstance(own, Mapping) else None
    if not isinstance(groups, list) or not isinstance(own.get("state"), Mapping):
        return False
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(each, list) for each in numbers):
        return False
    if [len(each) for each in numbers] != [len(group["params"]) for group in optimizer.param_groups]:
        return False
    return all(isinstance(own["state"].get(number, {}), Mapping) for number in chain.from_iterable(numbers))


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of `optimizer`, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _on_devices_of(value: Any, live: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        there = next(nested_tensors(live), None)
        return value.to(there.device if there is not None else device if value.dim() else value.device)
    if isinstance(value, dict):
        of_key = live.get if isinstance(live, Mapping) else lambda _: None
        return {key: _on_devices_of(inner, of_key(key), device) for key, inner in value.items()}
    if isinstance(value, list):
        return [_on_devices_of(inner, live, device) for inner in value]
    return value


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    for key in group:
        if not isinstance(key, str) or "." in key:
            raise ConfigError(
                f"an optimizer's parameter group has a setting {key!r}. Expected names that are strings without dots, "
                "because a checkpoint has settings under them. Give the setting another name."
            )
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def _with_settings(
    group: dict[str, Any], names: Mapping[Any, str], settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return `group` with the settings of the first of its parameters that has some; None if none has."""
    given = (settings[names[each]] for each in group["params"] if names[each] in settings)
    return next((group | dict(of_parameter) for of_parameter in given), None)


# Keep the dtypes of an optimizer's state while the optimizer loads it.
#
# `torch.optim.Optimizer` casts state to its parameter's dtype, which loses bits of moments in a higher precision, and
# turns integers into floating-point numbers and strings into descriptions of generators. Hooks around its
# `load_state_dict` put back what was given.


@contextmanager
def exact_dtypes(optimizer: Any, state_dict: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within this context, have `optimizer.load_state_dict` keep the dtypes of the state that it loads.

    So do the optimizers that it wraps. The hooks run only within torch's own method: what an optimizer's own
    `load_state_dict` does after that holds. A `load_state_dict` that never calls torch's may cast as torch does: then
    tensors whose dtype in the optimizer's new state dict is not that of `state_dict` are put back.
    """
    given: dict[int, Mapping[str, Any]] = {}

    def note(loading: Optimizer, state_dict: dict[str, Any]) -> None:
        given[id(loading)] = dict(state_dict)

    def restore(loaded: Optimizer) -> None:
        for _, own, key, value in _loaded_entries(loaded, given[id(loaded)]):
            if key != "step":
                own[key] = _with_dtypes_of(value, own[key])

    handles = []
    for each in (optimizer, *vars(optimizer).values()):
        # Some have no hooks: wrappers that do not call Optimizer.__init__.
        with suppress(AttributeError):
            if isinstance(each, Optimizer):
                # The first after the user's own pre-hooks, the second before the user's own post-hooks.
                handles.append(each.register_load_state_dict_pre_hook(note))
                handles.append(each.register_load_state_dict_post_hook(restore, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if state_dict is not None and isinstance(optimizer, Optimizer) and not given:
        _put_back(optimizer, state_dict)


def _put_back(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Put tensors of `given` in place of those that `optimizer` has, and returns in a state dict, in another dtype."""
    returned = optimizer.state_dict()["state"]
    for number, own, key, value in _loaded_entries(optimizer, given):
        if own[key] is returned.get(number, {}).get(key):
            own[key] = _with_dtypes_of(value, own[key])


def _loaded_entries(optimizer: Optimizer, given: Mapping[str, Any]) -> Iterator[tuple[Any, dict[Any, Any], Any, Any]]:
    """Yield the number of a parameter, its live state, a key of that, and what the state dict `given` has there."""
    numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        own = optimizer.state.get(parameter, {})
        yield from ((number, own, key, value) for key, value in given["state"].get(number, {}).items() if key in own)


def _with_dtypes_of(given: Any, loaded: Any) -> Any:
    """Return `loaded`, with the tensors of `given` in place of those that have another dtype there.

    Strings, and the kinds of mappings, are also those of `given`: torch makes other strings, and dicts of all mappings.
    """
    if isinstance(given, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(given, dict) and isinstance(loaded, dict):
        same = copy.copy(given)
        same.clear()
        same.update({key: _with_dtypes_of(given.get(key), value) for key, value in loaded.items()})
        return same
    if type(given) in (list, tuple) and type(given) is type(loaded) and len(given) == len(loaded):
        return type(given)(_with_dtypes_of(*pair) for pair in zip(given, loaded, strict=True))
    return given if isinstance(given, str) and isinstance(loaded, str) else loaded
