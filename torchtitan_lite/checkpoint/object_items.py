"""What of a state is no tensor: counters, settings, positions of loaders.

Each becomes an item that `torch.load(weights_only=True)` takes, so that plain DCP reads it, and a
JSON value for the manifest where it is made of plain types. There may be thousands of them (the
settings of every parameter) that are the same from save to save: those are encoded once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_lite.checkpoint.description import PlacedObject
from torchtitan_lite.checkpoint.plain_value import NotPlain, encode
from torchtitan_lite.checkpoint.torch_item import OBJECT_GRAIN, object_item

_MAX_IN_MANIFEST_BYTES = 64 << 10
"""An object whose item is larger stands in its rank's file alone: the manifest is read whole, by every rank."""


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
            return _encode(key, value)
        known = (type(value), repr(value))
        if known not in self._known:
            self._known[known] = self._known_before.get(known) or _encode(key, value)
        return self._known[known]


def _encode(key: str, value: Any) -> _Encoded:
    try:
        plain = encode(value)
    except NotPlain:
        return _Encoded(_saved_by_torch(key, value), None, False)
    item = object_item(value)
    fits = len(item) <= _MAX_IN_MANIFEST_BYTES
    return _Encoded(item, plain if fits else None, fits)


def _saved_by_torch(key: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{key} holds an object that could not be loaded again ({str(error).splitlines()[0]}). "
            "Return tensors, numbers, strings, lists and dicts from state_dict."
        ) from None
    return buffer.getvalue() + bytes(-buffer.tell() % OBJECT_GRAIN)
