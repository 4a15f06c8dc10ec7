"""What of a state is no tensor: counters, settings, positions of loaders.

Each becomes an item that `torch.load(weights_only=True)` takes, so that plain DCP reads it, and a
JSON value for the manifest where it is made of plain types. What the manifest does not hold is read
back, by our own reader, before it is saved: what would not come back is refused now, by name. There
may be thousands of objects (the settings of every parameter) that are the same from save to save:
those are encoded, and proven, once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.description import PlacedObject
from torchtitan_lite.checkpoint.format.kinds import difference
from torchtitan_lite.checkpoint.format.plain_value import NotPlain, encode
from torchtitan_lite.checkpoint.format.torch_item import CALL_OF_BYTES, OBJECT_GRAIN, SafePickle, object_item
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.store.described import DESCRIPTION_RATIO

_MAX_IN_MANIFEST_BYTES = 64 << 10
"""An object whose item is larger stands in its rank's file alone: the manifest is read whole, by every rank."""
_MAX_RATIO = DESCRIPTION_RATIO
"""So does one whose JSON is so many times as long as its item (a list of one string, again and again): beside so little
data the manifest would be refused as too large."""


@dataclass(frozen=True)
class _Encoded:
    item: bytes
    plain: Any
    is_plain: bool


class ObjectItems:
    """Encodes objects, and remembers those of the last time that cannot change unnoticed."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], _Encoded] = {}
        self._known_before = self._known
        self._proven: dict[str, str] = {}
        """Key to the digest of its item, of objects that were read back."""

    def lay_out(self, objects: Mapping[str, Any], file: str, at: int) -> tuple[bytes, list[PlacedObject]]:
        """The bytes of `objects` at byte `at` of `file`, and where each of them lies.

        Raises TypeError for an object that could not be loaded again: now, and not when it is needed.
        """
        self._known_before, self._known = self._known, {}
        items: list[bytes] = []
        placed: list[PlacedObject] = []
        for key, value in objects.items():
            encoded = self._encoded(key, value)
            placed.append(PlacedObject(key, file, at, len(encoded.item), encoded.plain, encoded.is_plain))
            items.append(encoded.item)
            at += len(encoded.item)
        return b"".join(items), placed

    def _encoded(self, key: str, value: Any) -> _Encoded:
        if type(value) not in (bool, int, float, str, type(None)):
            return self._encode(key, value)
        known = (type(value), repr(value))
        if known not in self._known:
            self._known[known] = self._known_before.get(known) or self._encode(key, value)
        return self._known[known]

    def _encode(self, key: str, value: Any) -> _Encoded:
        try:
            plain = encode(value)
        except NotPlain:
            item = _saved_by_torch(key, value)
        else:
            item = object_item(value)
            if len(item) <= _MAX_IN_MANIFEST_BYTES and len(json.dumps(plain)) <= _MAX_RATIO * len(item):
                return _Encoded(item, plain, True)
        self._prove(key, value, item)
        return _Encoded(item, None, False)

    def _prove(self, key: str, value: Any, item: bytes) -> None:
        """Raises TypeError unless `item` is read back as what `value` is."""
        digest = text_digest([item])
        if self._proven.get(key) == digest:
            return
        try:
            finding = difference(value, load_item(item), key)
        except (UnsafeItem, RecursionError) as error:
            raise _not_kept(key, error) from None
        if finding:
            raise _not_kept(key, finding)
        self._proven[key] = digest


def _saved_by_torch(key: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        if CALL_OF_BYTES in buffer.getvalue():  # This pickler is a slow one.
            buffer = io.BytesIO()
            torch.save(value, buffer, pickle_module=SafePickle)
    except Exception as error:
        raise _not_kept(key, error) from None
    return buffer.getvalue() + bytes(-buffer.tell() % OBJECT_GRAIN)


def _not_kept(key: str, reason: Exception | str) -> TypeError:
    told = (str(reason).splitlines() or [type(reason).__name__])[0].partition(". Please use")[0]
    return TypeError(
        f"{key} holds an object that could not be loaded again ({told}). "
        "Return tensors, numbers, strings, bytes, and lists, tuples, sets and dicts of these from state_dict"
    )
