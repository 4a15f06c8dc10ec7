"""Totals of a checkpoint's contents: by part, by file, and of tensors that are alike.

Pure: everything follows from `Contents`, no file is opened.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torchtitan_lite.checkpoint.format.contents import Contents, Shape, StoredTensor

_RANK = re.compile(r"^rank\d+$")


@dataclass
class StatePart:
    """A top-level part of the state: everything up to the first dot of its keys."""

    name: str
    num_tensors: int = 0
    num_elements: int = 0
    num_objects: int = 0
    nbytes: int = 0
    """Of its tensors."""
    dtypes: Counter[str] = field(default_factory=Counter)
    """Number of tensors of each dtype."""


@dataclass(frozen=True)
class Row:
    """Tensors that are alike; where their keys differ, `name` has `*`."""

    name: str
    dtype: str
    shape: Shape
    num_tensors: int
    nbytes: int
    """Of all of them."""


def state_parts(contents: Contents) -> list[StatePart]:
    """Return the parts in the order in which they are stored."""
    parts: dict[str, StatePart] = {}
    for key, tensor in contents.tensors.items():
        part = parts.setdefault(part_name(key), StatePart(part_name(key)))
        part.num_tensors += 1
        part.num_elements += math.prod(tensor.shape)
        part.nbytes += tensor.nbytes
        part.dtypes[str(tensor.dtype)] += 1
    for key in contents.objects:
        parts.setdefault(part_name(key), StatePart(part_name(key))).num_objects += 1
    return list(parts.values())


def bytes_by_file(contents: Contents) -> dict[str, Counter[str]]:
    """Return for each file how many bytes of each part's tensors it holds."""
    files: dict[str, Counter[str]] = {name: Counter() for name in sorted(contents.files)}
    for key, tensor in contents.tensors.items():
        part, itemsize = part_name(key), tensor.dtype.itemsize
        for chunk in tensor.chunks:
            files[chunk.file if chunk.item is None else chunk.item.file][part] += chunk.numel * itemsize
    return files


def matching(tensors: Mapping[str, StoredTensor], glob: str) -> dict[str, StoredTensor]:
    """Return the tensors whose complete key matches `glob`; a dot is a letter like any other."""
    return {key: tensor for key, tensor in tensors.items() if fnmatchcase(key, glob)}


def rows_of(tensors: Mapping[str, StoredTensor], *, folded: bool) -> list[Row]:
    """Return the rows of a table of `tensors`: one for each, or with `folded` one for all that are alike.

    Alike are tensors of one dtype and shape whose keys differ in numbers and in the last word only, and scalars of one
    part with the same last word. The name of their row is a glob that matches them.
    """
    groups: dict[tuple[str, str, Shape], list[str]] = {}
    for key, tensor in tensors.items():
        name = _pattern(key, tensor.shape) if folded else key
        groups.setdefault((name, str(tensor.dtype), tensor.shape), []).append(key)
    if folded:
        groups = _without_last_words(groups)
    return [
        Row(name if len(keys) > 1 else keys[0], dtype, shape, len(keys), sum(tensors[key].nbytes for key in keys))
        for (name, dtype, shape), keys in groups.items()
    ]


def _without_last_words(groups: Mapping[tuple[str, str, Shape], list[str]]) -> dict[tuple[str, str, Shape], list[str]]:
    joined: dict[tuple[str, str, Shape], list[tuple[str, list[str]]]] = {}
    for (name, dtype, shape), keys in groups.items():
        joined.setdefault((name.rpartition(".")[0], dtype, shape), []).append((name, keys))
    return {
        (of_all[0][0] if len(of_all) == 1 else f"{begin}.*", dtype, shape): [key for _, keys in of_all for key in keys]
        for (begin, dtype, shape), of_all in joined.items()
    }


def part_name(key: str) -> str:
    """Return the part that the tensor or object `key` is in."""
    return key.partition(".")[0]


def _pattern(key: str, shape: Shape) -> str:
    words = key.split(".")
    if not shape and len(words) > 3:
        # The counters of an optimizer: as many as there are parameters, and each says little.
        return f"{words[0]}.*.{words[-1]}"
    return ".".join(_RANK.sub("rank*", "*" if word.isdecimal() else word) for word in words)
