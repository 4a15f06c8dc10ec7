"""Small JSON records, each one object in a file that is replaced as a whole, and fields of `manifest.json`.

Each function returns a value of the right type and range, or raises ValueError that names the field and quotes at most
a few words of what it found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from torchtitan_lite.disk.plain_file import is_plain_name, is_plain_path

TOPOLOGY, CONFIG, TENSOR_DIGESTS = "topology", "config", "tensor_digests"
"""Fields of `extra`: the topology in words, the configuration by section, and each tensor's digest by key."""

NAN_IN = "nan_in"
"""Field of `extra`: the keys of weights with NaN, and of optimizer states with NaN or infinity, when they were saved;
absent if none was found."""

NEVER_FINITE = "never_finite"
"""Field of `extra`: the keys of optimizer states that were not finite at the run's first save, so by design, nor at any
since; absent if there are none. They are not in `nan_in`."""

RANKS_DIFFER = "ranks_differ"
"""Field of `extra`: which ranks held other values of what when it was saved, one text each; absent if none was seen."""

DCP_METADATA, LEFT_OUT = "dcp_metadata", "left out"
"""Field of `extra`, and its only value: DCP's readers need `.metadata`, which was not written with the save."""

METRICS = "metrics"
"""Field of `extra`: what the run measured at that step, by name, as finite numbers; absent if it gave none."""

START = "start"
"""Field of `extra`: the id of the start of the job that saved it; absent if that kept no images in memory."""

RESUMED_FROM_MEMORY = "resumed_from_memory"
"""Field of `extra`: the step of the image in memory that its start resumed from; absent if there was none."""

TRAINED_SECONDS = "trained_seconds"
"""Field of `extra`: the seconds that the run had trained, in all its starts; absent in older checkpoints."""

MAX_CONFIG_DEPTH = 8
"""Nesting of containers in one value of the configuration."""

_INT64 = 1 << 63

T = TypeVar("T")


def topology_in_words(recorded: str) -> str:
    """Return the `recorded` topology as a person reads it: a loop of its own records one rank as "1 ranks".

    What is recorded stays, because a resume compares it: other generators would follow from another word.
    """
    return "1 rank" if recorded == "1 ranks" else recorded


def value_of(document: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the field `name`. Raise ValueError if it is not of `kind`."""
    value: object = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = json_type(value) if name in document else "nothing"
        raise ValueError(f"{bare(name)}: expected {kind.__name__}, found {found}")
    return value


def integer_field(document: dict[str, Any], name: str, low: int) -> int:
    """Return the field `name`, a 64-bit integer of at least `low`."""
    value = value_of(document, name, int)
    if value < low:
        raise ValueError(f"{name}: expected at least {low}, found {value!r:.40}")
    if value >= _INT64:
        raise ValueError(f"{name}: expected a number of 64 bits, found {value!r:.40}")
    return value


def seconds(document: dict[str, Any], name: str) -> float:
    """Return the field `name`, a finite number of seconds."""
    value = value_of(document, name, float)
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected seconds, found {value}")
    return value


def steps_field(document: dict[str, Any], name: str) -> frozenset[int]:
    """Return the field `name`, a list of steps."""
    steps = value_of(document, name, list)
    if not all(type(step) is int and 0 <= step < _INT64 for step in steps):
        raise ValueError(f"{name}: expected a list of steps, found {steps!r:.40}")
    return frozenset(steps)


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raise ValueError for anything else, and for NaN and the infinities in it."""
    document = json.loads(data, parse_constant=refuse_constant)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {json_type(document)}")
    return document


def json_bytes(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the contents of the file."""
    return (json.dumps(document, indent=indent) + "\n").encode()


def table(entries: Any) -> dict[str, Any]:
    """Return `entries`. Raise ValueError if it is not an object of objects with valid text as keys."""
    if not isinstance(entries, dict):
        raise ValueError(f"expected a JSON object, found {json_type(entries)}")
    for key, entry in entries.items():
        if type(entry) is not dict:
            raise ValueError(f"{bare(key)}: expected dict, found {json_type(entry)}")
    _refuse_halves(entries)
    return entries


def file_name(name: str) -> str:
    """Return `name`. Raise ValueError if it is not the name of a file in the checkpoint's folder, which is flat."""
    if not is_plain_name(name):
        raise ValueError(f"files: {shown_text(name)} is not the name of a file")
    return name


def file_path(name: str) -> str:
    """Return `name`. Raise ValueError if it is not the path of a file in a folder, or in one below it, without `..`."""
    if not is_plain_path(name):
        raise ValueError(f"files: {shown_text(name)} is not the path of a file")
    return name


def extra(document: dict[str, Any]) -> dict[str, Any]:
    """Return `extra`: fields that a load uses have their types, others may hold anything."""
    values: dict[str, Any] = value_of(document, "extra", dict)
    expected = ((TOPOLOGY, str), (CONFIG, dict), (TENSOR_DIGESTS, dict), (NAN_IN, list), (METRICS, dict))
    later = ((RANKS_DIFFER, list), (START, str), (RESUMED_FROM_MEMORY, int), (TRAINED_SECONDS, float))
    for name, kind in (*expected, *later, (NEVER_FINITE, list)):
        if name in values and type(values[name]) is not kind:
            raise ValueError(f"extra.{name}: expected {kind.__name__}, found {json_type(values[name])}")
    for section, keys in values.get(CONFIG, {}).items():
        if type(keys) is not dict:
            raise ValueError(f"extra.config.{bare(section)}: expected dict, found {json_type(keys)}")
        if not _is_shallow(keys, MAX_CONFIG_DEPTH):
            raise ValueError(f"extra.config.{bare(section)}: it is nested more than {MAX_CONFIG_DEPTH} deep")
    digests = values.get(TENSOR_DIGESTS, {})
    if not {*map(type, digests.values())} <= {str}:
        raise ValueError("extra.tensor_digests: expected texts, found something else")
    _refuse_halves(digests)
    if not 0 <= values.get(TRAINED_SECONDS, 0.0) < math.inf:
        raise ValueError(f"extra.{TRAINED_SECONDS}: expected seconds, found {values[TRAINED_SECONDS]}")
    metrics = values.get(METRICS, {})
    _refuse_halves(metrics)
    for name, value in metrics.items():
        if type(value) is not float or not math.isfinite(value):
            raise ValueError(f"extra.{METRICS}.{bare(name)}: expected a finite float, found {value!r:.40}")
    return values


def json_type(value: object) -> str:
    """Return the name of the type of `value`."""
    return type(value).__name__


def shown_text(text: str) -> str:
    """Return the beginning of `text`, quoted for a message."""
    return repr(text[:100])


def bare(name: str) -> str:
    """Return the beginning of `name` for a message, without quotes."""
    return shown_text(name)[1:-1]


def refuse_constant(constant: str) -> NoReturn:
    """Raise for NaN and the infinities, which JSON does not have."""
    raise ValueError(f"{constant} is not a JSON number")


def _refuse_halves(entries: dict[str, Any]) -> None:
    """Raise for a key with half a surrogate pair, which is no text and cannot be printed."""
    try:
        "".join(entries).encode()
    except UnicodeEncodeError:
        key = next(key for key in entries if any("\ud800" <= letter <= "\udfff" for letter in key))
        raise ValueError(f"{shown_text(key)} is not valid text") from None


def _is_shallow(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items)
