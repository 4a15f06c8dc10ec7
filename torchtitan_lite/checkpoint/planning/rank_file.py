"""What one rank writes: its plan, its file, and in it the objects, which are encoded here.

An object is what is no tensor: counters, settings, positions of loaders. Each becomes an item that
`torch.load(weights_only=True)` accepts, so that plain DCP reads it, and also a JSON value for the manifest if it is
made of plain types. An object that the manifest does not hold is read back by our own reader before it is saved, and
refused by name if it would not come back equal. There may be thousands of objects (the settings of every parameter)
that are the same in every save: these are encoded and checked once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.description import Description, PlacedObject
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.format.flattening import State, difference
from torchtitan_lite.checkpoint.format.plain_value import NotPlain, encoded
from torchtitan_lite.checkpoint.format.torch_item import CALL_OF_BYTES, OBJECT_GRAIN, SafePickle, object_item
from torchtitan_lite.checkpoint.planning.rank_entries import OwnEntries
from torchtitan_lite.checkpoint.planning.rank_summary import HeldPart
from torchtitan_lite.checkpoint.state.optimizer_state import nested_tensors
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.store.described import DESCRIPTION_RATIO

_MAX_IN_MANIFEST_BYTES = 64 << 10
"""An object with a larger item is only in its rank's file: every rank reads the complete manifest."""
_MAX_RATIO = DESCRIPTION_RATIO
"""So is an object whose JSON is more than this many times as long as its item, such as a list that repeats one string:
next to so little data a load would refuse the manifest as too large."""


_CONSTANT = {bool, int, float, str, type(None)}
"""Types whose values, alone or in a tuple such as betas, have a `repr` of their own each."""


@dataclass(frozen=True)
class _Encoded:
    item: bytes
    plain: Any
    is_plain: bool
    is_typed: bool


class ObjectItems:
    """Encodes objects, and keeps the encoded form of immutable ones from the last call."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], _Encoded] = {}
        self._known_before = self._known
        self._readable: dict[str, str] = {}
        """The digest of the item that was read back, by key."""

    def lay_out(self, objects: Mapping[str, Any], file: str, at: int) -> tuple[bytes, list[PlacedObject]]:
        """Return the bytes of `objects`, which start at byte `at` of `file`, and the place of each object.

        Raises TypeError for an object that could not be loaded again, so that the save fails and not the load.
        """
        # Only the last save's are kept, so that values which change at each save do not pile up.
        self._known_before, self._known = self._known, {}
        items: list[bytes] = []
        placed: list[PlacedObject] = []
        for key, value in objects.items():
            made = self._encoded(key, value)
            placed.append(PlacedObject(key, file, at, len(made.item), made.plain, made.is_plain, made.is_typed))
            items.append(made.item)
            at += len(made.item)
        return b"".join(items), placed

    def _encoded(self, key: str, value: Any) -> _Encoded:
        if type(value) not in _CONSTANT and not (type(value) is tuple and {*map(type, value)} <= _CONSTANT):
            return self._encode(key, value)
        known = (type(value), repr(value))
        if known not in self._known:
            self._known[known] = self._known_before.get(known) or self._encode(key, value)
        return self._known[known]

    def _encode(self, key: str, value: Any) -> _Encoded:
        is_typed = False
        try:
            plain, is_typed = encoded(value)
        except NotPlain:
            if any(isinstance(tensor, DTensor) for tensor in nested_tensors(value)):
                raise TypeError(
                    f"{key} is a {type(value).__name__} with DTensors in it, which one rank saves as a whole, so that "
                    "the other ranks would get its shards. Return a list or a dict of them from state_dict"
                ) from None
            item = _saved_by_torch(key, value)
        else:
            item = object_item(plain if is_typed else value)
            if len(item) <= _MAX_IN_MANIFEST_BYTES and len(json.dumps(plain)) <= _MAX_RATIO * len(item):
                return _Encoded(item, plain, True, is_typed)
        self._check_readable(key, value, item, is_typed)
        return _Encoded(item, None, False, is_typed)

    def _check_readable(self, key: str, value: Any, item: bytes, is_typed: bool) -> None:
        """Raise TypeError unless `item` is read back equal to `value`."""
        digest = text_digest([item])
        if self._readable.get(key) == digest:
            return
        try:
            finding = difference(value, load_item(item, is_typed=is_typed), key)
        except (UnsafeItem, RecursionError, RuntimeError) as error:
            # Nested tensors have no shape: RuntimeError.
            raise _not_loadable(key, value, error) from None
        if finding:
            raise _not_loadable(key, value, finding)
        self._readable[key] = digest


def _saved_by_torch(key: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        # Only then, because this pickler is slow.
        if CALL_OF_BYTES in buffer.getvalue():
            buffer = io.BytesIO()
            torch.save(value, buffer, pickle_module=SafePickle)
    except Exception as error:
        raise _not_loadable(key, value, error) from None
    item = buffer.getvalue()
    return item + bytes(-len(item) % OBJECT_GRAIN)


def _not_loadable(key: str, value: Any, reason: Exception | str) -> TypeError:
    first_line = (str(reason).splitlines() or [type(reason).__name__])[0].partition(". Please use")[0]
    return TypeError(f"{key} holds an object that could not be loaded again ({first_line}). {_RETURN_OTHERS}")


_RETURN_OTHERS = (
    "Return tensors, numbers, strings, bytes, paths, times of datetime, NumPy's arrays of numbers and text, and lists, "
    "tuples, deques, sets and dicts from state_dict, and make the object of them in load_state_dict. Such are it.value "
    "of an enum, tuple(it) of a namedtuple, set(it) of a frozenset, dataclasses.asdict(it), and it.tolist() of NumPy's "
    "times, objects and structures"
)


# What one rank writes: its part of the agreed plan, and the bytes of its file.
#
# A `RankPlan` is valid for every state of the same structure. `PlannedSave.file` fills it with the tensors and objects
# of one state. The tensors are live: nothing is copied here.


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes, as the ranks agreed; the same from save to save."""

    file_name: str
    parts: Sequence[HeldPart]
    """Chunks of tensors, in file order."""
    object_keys: Sequence[str]
    layout: FileLayout
    description: Description | None
    """Of the complete checkpoint; coordinator only, None on other ranks."""
    volatile: Set[int] = frozenset()
    """The numbers, in file order, of the tensors that forward may change, not only the optimizer's step."""
    own: OwnEntries | None = None
    """What goes into the record of this rank; None if the manifest has all."""


@dataclass(frozen=True)
class RankFile:
    """The complete file of this rank: live tensors, encoded objects, and where each of them lies."""

    plan: RankPlan
    data: FileData
    objects: Sequence[PlacedObject]


@dataclass(frozen=True)
class PlannedSave:
    """A state and the plan that the ranks agreed on for it."""

    plan: RankPlan
    _flat: State
    _object_items: ObjectItems
    agreed: tuple[int, ...] = ()
    """The maximum over all ranks of each number that came with the state."""
    differs: RanksDiffer | None = None
    """Why a checkpoint cannot have the state: ranks hold different values under one name. The same on all ranks."""
    corruption: str = ""
    """Where ranks differ that were equal before; empty if none does."""

    def file(self) -> RankFile:
        """Return this rank's file, complete. Any rank.

        Raises on this rank only, TypeError for an object that cannot be saved and ValueError for a tensor that is not
        as planned. The saver passes the failure on to the other ranks within the save, which costs no exchange of its
        own.
        """
        plan = self.plan
        objects = {key: self._flat[key] for key in plan.object_keys}
        # Objects become bytes here, while the caller waits: a loader that changes its state later cannot change the
        # save.
        encoded, placed = self._object_items.lay_out(objects, plan.file_name, plan.layout.end)
        values = [self._flat[part.key] for part in plan.parts]
        tensors = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        return RankFile(plan, FileData(plan.layout, tensors, encoded, plan.volatile), placed)
