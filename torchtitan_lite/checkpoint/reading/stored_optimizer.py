"""The optimizer state in a checkpoint, and the memory that a load reads it into.

The checkpoint decides which state is created: a parameter without state in it has none after the load. A
tensor of its parameter's shape is created like the parameter (device, sharding) with the stored dtype. The
state of a parameter whose shape differs from the checkpoint's is never read, whatever the strictness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.contents import Contents, StoredTensor
from torchtitan_lite.checkpoint.format.key_report import KeyReport
from torchtitan_lite.checkpoint.format.shards import sharding_text
from torchtitan_lite.checkpoint.format.structure import FORM, Branch, are_pieces
from torchtitan_lite.checkpoint.reading.entries import Leaf, assembled_entry, at_path, entries, room_for
from torchtitan_lite.checkpoint.reading.load_rules import LoadRules
from torchtitan_lite.checkpoint.state.optimizer_state import (
    LAYOUTS,
    OWNER_KEYS,
    OWNERS,
    SETTINGS,
    STATE,
    OwnerRanks,
    ParameterSlot,
    split_state_key,
)
from torchtitan_lite.checkpoint.state.shared_storage import SHARED, join_targets
from torchtitan_lite.checkpoint.state.stateful import is_same
from torchtitan_lite.checkpoint.state.subclasses import form_difference
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.log import counted

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Settings that schedulers add to a parameter group."""
_OF_THE_KIND = ("decoupled_weight_decay", "amsgrad", "nesterov", "maximize")
"""Settings that make another optimizer: Adam and AdamW differ in the first one only. No schedule changes them."""
_UNKNOWN = object()

Entries = dict[str, dict[Any, list[Leaf]]]
"""The checkpoint's name of a parameter, then the key of its state, to the leaves."""


class RankNumbers(NamedTuple):
    """Which rank loads."""

    rank: int = 0
    num_ranks: int = 1
    num_saved: int = 0
    """The number of ranks that saved; 0 if it is not known."""


class StoredOptimizer:
    """The keys under `optimizer.` of `contents`, for `slots`; `names` maps the model's FQNs to the checkpoint's.

    `owners` has what was read of `optimizer.owners`, by key.
    """

    def __init__(
        self,
        contents: Contents,
        rules: LoadRules,
        names: Mapping[str, str],
        listed: ListedGroups,
        slots: Mapping[str, ParameterSlot],
        numbers: RankNumbers,
        owners: Mapping[str, Any],
    ) -> None:
        self._contents = contents
        self._rules = rules
        self._names = names
        self._listed = listed
        self.slots = slots
        self._owners = {key.removeprefix(OWNER_KEYS): OwnerRanks.parse(text) for key, text in owners.items()}
        self._rank, self._num_ranks, num_saved = numbers
        is_other = num_saved not in (0, numbers.num_ranks)
        fits = f". It fits {counted(num_saved, 'rank')}, which saved it, and this run has {numbers.num_ranks}"
        self._num_saved_text = fits if is_other else ""

    def report(self) -> KeyReport:
        """Return how the checkpoint differs from `slots`. Reads no data."""
        slots = self.slots
        if self._listed.misfit:
            return KeyReport(mismatched={f"optimizer.{SETTINGS}": self._listed.misfit} if slots else {})
        states, settings, _ = self._by_parameter
        missing: list[str] = []
        mismatched: dict[str, str] = {}
        of_others: list[str] = []
        """What of the states this rank does not have: unexpected, if no rank has it."""
        taken: set[str] = set()
        first_of_group: dict[tuple[int, int], str] = {}
        for name, slot in slots.items():
            stored = self._stored_name(slot)
            taken.add(stored)
            if not self._rules.wants(name):
                continue
            if slot.settings and stored not in settings and stored not in states:
                missing.append(f"optimizer.{SETTINGS}.{name}")
                continue
            state = states.get(stored, {})
            misfits = self._misfits(slot, stored, state)
            mismatched |= misfits
            own = state if misfits else self._of_this_rank(slot, stored, state)
            of_others += [leaf.key for key, leaves in state.items() if key not in own for leaf in leaves]
            first = first_of_group.setdefault(slot.group, stored)
            mismatched |= self._other_settings(slot, settings.get(stored, {}), settings.get(first, {}), stored, first)
        unexpected = [leaf.key for stored in states if stored not in taken for leaf in _leaves(states[stored])]
        return KeyReport(missing, [*(key for key in unexpected if self._is_wanted(key)), *of_others], mismatched)

    def other_kinds(self) -> dict[str, tuple[str, Any, Any]]:
        """Return the settings that make another optimizer than `slots` have: a parameter, the value there and here."""
        found: dict[str, tuple[str, Any, Any]] = {}
        for name, _, _, settings, _ in self._fitting:
            own = self.slots[name].settings
            for key in _OF_THE_KIND:
                there = self._plain(settings[key][0]) if settings.get(key) else _UNKNOWN
                if key in own and there is not _UNKNOWN and there != own[key]:
                    found.setdefault(key, (name, there, own[key]))
        return found

    def targets(self) -> dict[str, Any]:
        """Map the checkpoint's keys to the tensors to read into, and to None for objects."""
        targets: dict[str, Any] = {}
        for name, _, state, settings, layouts in self._fitting:
            slot = self.slots[name]
            for key, leaves in state.items():
                found = next((self._plain(leaf) for leaf in layouts.get(str(key), ())), "")
                layout = found if isinstance(found, str) else ""
                for leaf in leaves:
                    tensor = self._contents.tensors.get(leaf.key)
                    live = at_path(slot.state.get(key, slot.first.get(key)), leaf.path)
                    dtype = self._dtype(slot, tensor) if tensor and _form_leaf(leaves) is None else None
                    targets[leaf.key] = tensor and slot.empty(
                        key, torch.Size(tensor.shape), dtype or tensor.dtype, live, layout, leaf.path
                    )
            for key, leaves in settings.items():
                for leaf in leaves:
                    live = slot.settings.get(key)
                    device = live.device if isinstance(live, torch.Tensor) else "cpu"
                    targets[leaf.key] = room_for(self._contents, leaf.key, device)
        for entry, leaves in self._entries.items():
            if entry.startswith(f"{SHARED}.") and leaves:
                join_targets(targets, self._plain(leaves[0]))
        return targets

    def assembled(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat state for the optimizers: the values that were `read`, else the optimizers' own."""
        state: dict[str, Any] = {}
        fitting = set()
        for name, stored, own, settings, _ in self._fitting:
            fitting.add(name)
            below = f"optimizer.{STATE}.{stored}"
            state[f"{STATE}.{name}"] = {
                key: assembled_entry(self._contents, f"{below}.{key}", leaves, read) for key, leaves in own.items()
            }
            if self._num_ranks == 1:  # On several ranks, those that lack a state show it.
                state |= {f"{OWNERS}.{name}.{key}": True for key in own if self._owners_of(stored, key)}
            below = f"optimizer.{SETTINGS}.{stored}"
            for key, leaves in settings.items():
                state[f"{SETTINGS}.{name}.{key}"] = assembled_entry(self._contents, f"{below}.{key}", leaves, read)
        for name, slot in self.slots.items():
            if name not in fitting and slot.state:
                state[f"{STATE}.{name}"] = dict(slot.state)
        return {key: value for key, value in state.items() if not key.startswith(f"{STATE}.") or value != {}}

    @cached_property
    def _fitting(self) -> list[tuple[str, str, Any, Any, Any]]:
        """Return (name, the checkpoint's name, state, settings, layouts) of each parameter that can be loaded.

        These are the parameters that the rules choose and whose shape is the checkpoint's.
        """
        states, settings, layouts = self._by_parameter
        fitting = []
        for name, slot in self.slots.items():
            stored = self._stored_name(slot)
            state = states.get(stored, {})
            if self._rules.wants(name) and not self._misfits(slot, stored, state):
                own = _own_pieces(slot, self._of_this_rank(slot, stored, state))
                fitting.append((name, stored, own, settings.get(stored, {}), layouts.get(stored, {})))
        return fitting

    def _stored_name(self, slot: ParameterSlot) -> str:
        """Return the checkpoint's name of the parameter: of its names here, the one with settings in the checkpoint."""
        stored = [self._names.get(name, name) for name in slot.names]
        return next((name for name in stored if name in self._by_parameter[1]), stored[0])

    @cached_property
    def _by_parameter(self) -> tuple[Entries, Entries, Entries]:
        of_slots = {self._names.get(name, name) for slot in self.slots.values() for name in slot.names}
        known = {*self._names.values(), *of_slots}
        by_kind: dict[str, Entries] = {STATE: {}, SETTINGS: {}, LAYOUTS: {}}
        for entry, leaves in self._entries.items():
            kind, _, rest = entry.partition(".")
            if kind in by_kind:
                container = self._contents.container(f"optimizer.{entry}")
                _sort_in(by_kind[kind], rest, leaves, known, container)
        return by_kind[STATE], by_kind[SETTINGS], by_kind[LAYOUTS]

    @cached_property
    def _entries(self) -> dict[str, list[Leaf]]:
        found: dict[str, list[Leaf]] = {}
        for entry, leaves in entries(self._contents, "optimizer.").items():
            # A state dict that was saved without torch's flattening.
            if entry in (STATE, SETTINGS):
                found |= self._listed.entries(entry, leaves)
            else:
                found[entry] = leaves
        return found

    def _misfits(self, slot: ParameterSlot, stored: str, state: Mapping[str, list[Leaf]]) -> dict[str, str]:
        """Return what of `state` cannot be loaded here, each with the reason."""
        return (
            self._other_shapes(slot, stored, state)
            or self._without_owners(slot, stored, state)
            or self._other_forms(slot, stored, self._of_this_rank(slot, stored, state))
        )

    def _of_this_rank(
        self, slot: ParameterSlot, stored: str, state: Mapping[str, list[Leaf]]
    ) -> Mapping[str, list[Leaf]]:
        """Return what of `state` this rank has."""
        if not self._owners:
            return state
        return {key: state[key] for key in state if self._has(slot, self._owners_of(stored, key))}

    def _without_owners(self, slot: ParameterSlot, stored: str, state: Mapping[str, list[Leaf]]) -> dict[str, str]:
        """Return the keys of `state` that only some ranks had, if it is not known which ranks have them now."""
        owners = {key: self._owners_of(stored, key) for key in state} if self._owners else {}
        return {
            f"optimizer.{STATE}.{stored}.{key}": _without_owners_text(each, self._num_ranks)
            for key, each in owners.items()
            if each is not None and self._has(slot, each) is None
        }

    def _has(self, slot: ParameterSlot, owners: OwnerRanks | None) -> bool | None:
        """Return whether this rank has a state of the parameter that `owners` had; None if that is not known."""
        like = slot.like
        sharding = sharding_text(like.device_mesh.shape, like.placements) if isinstance(like, DTensor) else ""
        return owners is None or owners.include(self._rank, self._num_ranks, slot.owner, sharding)

    def _owners_of(self, stored: str, key: Any) -> OwnerRanks | None:
        """Return which ranks had the state `key`, or all state, of the parameter; None: all that had the parameter."""
        return self._owners.get(f"{stored}.{key}") or self._owners.get(stored)

    def _other_shapes(self, slot: ParameterSlot, stored: str, state: Mapping[str, list[Leaf]]) -> dict[str, str]:
        """Return the tensors of `state` whose parameter had another shape, each with the difference."""
        parameter = self._parameter(stored)
        now = tuple(slot.like.shape)
        if parameter is None or tuple(parameter.shape) == now:
            return {}
        keys = [leaf.key for leaf in _leaves(state) if leaf.key in self._contents.tensors]
        shapes = {key: tuple(self._contents.tensors[key].shape) for key in keys}
        found = {
            key: f"shape {list(shape)} in the checkpoint, {list(now)} expected"
            for key, shape in shapes.items()
            if shape == tuple(parameter.shape)
        }
        return found or {key: f"its parameter has another shape, {list(now)}" for key in keys}

    def lacks_first_states(self, slots: Mapping[str, ParameterSlot]) -> bool:
        """Return whether the checkpoint has a tensor that is made of others where `slots` have no state at all."""
        states, _, _ = self._by_parameter
        return any(
            _form_leaf(leaves) is not None and key not in slot.state
            for slot in slots.values()
            for stored in [self._stored_name(slot)]
            for key, leaves in self._of_this_rank(slot, stored, states.get(stored, {})).items()
        )

    def _other_forms(self, slot: ParameterSlot, stored: str, state: Mapping[str, list[Leaf]]) -> dict[str, str]:
        """Return the tensors of `state` that were made of others, or are here, and not in the same form."""
        found = {}
        for key, leaves in state.items():
            own = slot.state.get(key, slot.first.get(key))
            parts = own if isinstance(own, Mapping) and FORM in own else {}
            is_made = parts or _form_leaf(leaves) is not None
            if is_made and (finding := self._other_form(parts, leaves)):
                found[f"optimizer.{STATE}.{stored}.{key}"] = finding
        return found

    def _other_form(self, own: Mapping[Any, Any], leaves: Sequence[Leaf]) -> str:
        """Return how the tensor of `leaves` differs from the one with the parts `own`, none: a plain one."""
        objects = self._contents.objects
        there = {leaf.path[0]: objects[leaf.key].value for leaf in leaves if leaf.path and leaf.key in objects}
        for name in [name for name in own if name.endswith(FORM)] or [FORM]:
            if finding := form_difference(there.get(name), own.get(name)):
                return finding + self._num_saved_text
        lacks = own.keys() - {leaf.path[0] for leaf in leaves}
        return f"the checkpoint lacks its {min(lacks)}" if lacks else ""

    def _other_settings(
        self, slot: ParameterSlot, own: Mapping[str, Any], first_own: Mapping[str, Any], stored: str, first: str
    ) -> dict[str, str]:
        """Return the settings that belong to another optimizer, or that differ within one of this run's groups."""
        there, here = own.keys() - _OF_SCHEDULERS, slot.settings.keys() - _OF_SCHEDULERS
        # One side alone may have settings that only its version of torch has. Both have some only if it is another
        # optimizer.
        if there - here and here - there:
            more, fewer = ", ".join(sorted(there - here)), ", ".join(sorted(here - there))
            return {f"optimizer.{SETTINGS}.{stored}": f"another optimizer's: it has {more} and lacks {fewer}"}
        found = {}
        for key in own.keys() & first_own.keys():
            if not own[key] or not first_own[key]:
                continue  # An empty container.
            (leaf, *_), (first_leaf, *_) = own[key], first_own[key]
            value, expected = self._plain(leaf), self._plain(first_leaf)
            if value is not _UNKNOWN and expected is not _UNKNOWN and _differ(value, expected):
                found[leaf.key] = f"{value} in the checkpoint, next to {expected} of {first}, which is in its group now"
        return found

    def _parameter(self, stored: str) -> StoredTensor | None:
        """Return the parameter with the checkpoint's name `stored`; torchtitan's folders have no prefix `model.`."""
        tensors = self._contents.tensors
        return tensors.get(f"model.{stored}") or tensors.get(stored)

    def _plain(self, leaf: Leaf) -> Any:
        stored = self._contents.objects.get(leaf.key)
        return _UNKNOWN if stored is None or stored.item is not None or leaf.path else stored.value

    def _dtype(self, slot: ParameterSlot, tensor: StoredTensor) -> torch.dtype:
        """Return the dtype to load a state tensor with: the stored one, unless the rules cast its parameter.

        A tensor (not a scalar) that was stored with the dtype of its parameter then gets the parameter's new dtype.
        """
        parameter = self._parameter(self._stored_name(slot))
        if self._rules.cast and parameter is not None and parameter.dtype == tensor.dtype and tensor.shape:
            return slot.like.dtype
        stored: torch.dtype = tensor.dtype
        return stored

    def _is_wanted(self, key: str) -> bool:
        stored, _ = split_state_key(key.removeprefix(f"optimizer.{STATE}."), set(self._names.values()))
        return any(self._rules.wants(fqn) for fqn in self._rules.renamed([stored]))


def _sort_in(found: Entries, rest: str, leaves: list[Leaf], known: set[str], container: Branch | None) -> None:
    if rest in known:  # Keys that are not plain names are stored one level deeper.
        # Paths have them as text.
        keys = {str(key): key for key in container.keys} if container is not None else {}
        below = found.setdefault(rest, {})
        for key in keys.values():
            below.setdefault(key, [])  # A container may be empty.
        for leaf in leaves:
            if leaf.path:
                key = keys.get(str(leaf.path[0]), leaf.path[0])
                below.setdefault(key, []).append(Leaf(leaf.key, leaf.path[1:]))
        return
    name, key = split_state_key(rest, known)
    head, *inner = key.split(".")
    found.setdefault(name, {}).setdefault(head, [])
    # If torch flattened nested containers, their keys are part of the entry's name.
    for leaf in leaves:
        found[name][head].append(Leaf(leaf.key, (*inner, *leaf.path)))


def _without_owners_text(owners: OwnerRanks, num_ranks: int) -> str:
    if not owners.ranks:
        return "the checkpoint does not say readably which ranks had it: load it with exclude_from_loading=optimizer"
    if owners.sharding:
        return f"only ranks {owners} had it, and this run has others: resume on {owners.num_ranks} in the same shards"
    again = "one" if owners.num_ranks == 1 else f"{owners.num_ranks} or on one"
    return (
        f"only ranks {owners} had it, and this run has {num_ranks}: resume on {again}, or give the CheckpointManager a "
        "state_owner, which says on which rank each state is"
    )


def _form_leaf(leaves: Sequence[Leaf]) -> Leaf | None:
    """Return the leaf with the form of a tensor that is made of the others; None if there is none."""
    return next((leaf for leaf in leaves if leaf.path == (FORM,)), None)


def _differ(value: Any, expected: Any) -> bool:
    try:
        return bool(value != expected) and repr(value) != repr(expected)  # NaN is not equal to itself.
    except ValueError:  # Arrays have no single answer.
        return not is_same(value, expected)


def _own_pieces(slot: ParameterSlot, state: Mapping[str, list[Leaf]]) -> Mapping[str, list[Leaf]]:
    """Return `state`, and of tensors that are made of others the parts that this rank has, too."""
    found = dict(state)
    for key, leaves in state.items():
        own = slot.state.get(key, slot.first.get(key))
        if are_pieces(own):
            found[key] = [leaf for leaf in leaves if leaf.path[0] in own]
    return found


def _leaves(state: Mapping[str, list[Leaf]]) -> list[Leaf]:
    return [leaf for leaves in state.values() for leaf in leaves]


# Parameter groups that a checkpoint has as a list, as plain DCP saves the state dict of an optimizer.
#
# Our checkpoints have settings and state under the name of each parameter. A list has its parameters under `params`:
# by name, as `get_state_dict` returns them, or by number, as the optimizer itself does. Numbers mean what they mean to
# `Optimizer.load_state_dict`: the first one is the first parameter of the first group, and so on.


ReadObjects = Callable[[Sequence[str]], Mapping[str, Any]]
_PARAMS = "params"


class ListedGroups(NamedTuple):
    """The checkpoint's groups: for each the checkpoint's names of its parameters."""

    groups: Sequence[Sequence[str]] = ()
    numbers: Mapping[Any, str] = {}
    """The name of each numbered parameter, by its number as text; empty if parameters have names."""
    misfit: str = ""
    """Why the numbers mean nothing to this run's optimizer."""

    def entries(self, kind: str, leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
        """Return the entries `<kind>.<name>.<key>` for the leaves of the list, or of the states, `kind`."""
        found: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            for name, key, *inner in self._places(kind, leaf):
                found.setdefault(f"{kind}.{name}.{key}", []).append(Leaf(leaf.key, tuple(inner)))
        return found

    def _places(self, kind: str, leaf: Leaf) -> list[tuple[Any, ...]]:
        if len(leaf.path) < 2:
            return []
        first, *rest = leaf.path
        if kind == STATE:
            return [(self.numbers.get(first, first), *rest)]
        if rest == [_PARAMS] or not isinstance(first, int) or first >= len(self.groups):
            return []
        return [(name, *rest) for name in self.groups[first]]


def read_listed_groups(
    contents: Contents, slots: Mapping[str, ParameterSlot], names: Mapping[str, str], peers: Peers, read: ReadObjects
) -> ListedGroups:
    """Return the groups of `contents`; none if they are not a list, or no rank has `slots`. **Collective**.

    `slots` are the run's parameters by name, and `names` maps these names to the checkpoint's. Raises
    `CheckpointMismatch` on every rank if something else than names or numbers is listed.
    """
    keys = _keys_of_params(contents)
    if not keys or not any(peers.gather(bool(slots))):
        return ListedGroups()
    params = read(keys)
    return peers.together(lambda: _groups_of_params(contents.path, params, slots, names))


def _keys_of_params(contents: Contents) -> list[str]:
    """Return the keys of the lists of parameters, by the number of their group."""
    if contents.structure is not None:
        return []
    found = {
        path[2]: key
        for key, path in contents.paths.items()
        if len(path) == 4 and path[:2] == ("optimizer", SETTINGS) and path[3] == _PARAMS and type(path[2]) is int
    }
    return [found[number] for number in sorted(found) if found[number] in contents.objects]


def _groups_of_params(
    path: str, params: Mapping[str, Any], slots: Mapping[str, ParameterSlot], names: Mapping[str, str]
) -> ListedGroups:
    for key, listed in params.items():
        if not isinstance(listed, list) or not all(type(each) in (str, int) for each in listed):
            raise CheckpointMismatch(
                path, f"  {key}: expected the names or numbers of parameters, found {listed!r:.80}"
            )
    lists = [*params.values()]
    if all(isinstance(each, str) for each in chain(*lists)):
        return ListedGroups(lists)
    own: dict[tuple[int, int], list[str]] = {}
    for name, slot in slots.items():
        own.setdefault(slot.group, []).append(names.get(name, name))
    live, stored = [own[group] for group in sorted(own)], [each for each in lists if each]
    if [*map(len, live)] != [*map(len, stored)]:
        sizes, here = (" and ".join(str(len(each)) for each in groups) for groups in (stored, live))
        return ListedGroups(misfit=f"groups of {sizes} numbered parameters in the checkpoint, here groups of {here}")
    numbers = dict(zip(chain(*stored), chain(*live), strict=True))
    # DCP's paths have keys of mappings as text.
    by_text = {str(number): name for number, name in numbers.items()}
    return ListedGroups([[numbers[each] for each in listed] for listed in lists], by_text)
