"""Entries of a stored state dict, put together from the flat keys that a checkpoint has of them.

A value that is a nest of containers is stored leaf by leaf; an entry is all leaves under one key of the
state dict (an FQN, or a key of the optimizer's flat state).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.structure import Path, find, rebuild
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.plain_value import MAX_DEPTH


class Leaf(NamedTuple):
    """One stored tensor or object."""

    key: str
    """The checkpoint's flat key."""
    path: Path
    """Where it is in its entry; empty if it is all of it."""


def entries(contents: Contents, prefix: str) -> dict[str, list[Leaf]]:
    """Return the leaves of each entry below `prefix` ("optimizer.", or "" for a state without a name)."""
    found: dict[str, list[Leaf]] = {}
    depth = 1 if prefix else 0
    for key in contents:
        if not key.startswith(prefix):
            continue
        path = contents.paths.get(key, ())
        if len(path) > MAX_DEPTH:
            raise CheckpointDamaged(contents.path, f"{key} lies in {len(path)} containers, more than any state has")
        if len(path) > depth and (not prefix or f"{path[0]}." == prefix):
            found.setdefault(str(path[depth]), []).append(Leaf(key, tuple(path[depth + 1 :])))
        else:
            found.setdefault(key.removeprefix(prefix), []).append(Leaf(key, ()))
    parent = contents.structure and (find(contents.structure, prefix[:-1]) if prefix else contents.structure)
    for key, child in zip(parent.keys, parent.children, strict=True) if parent else ():
        if child is not None:
            found.setdefault(str(key), [])  # A container may be empty.
    return found


def assembled(contents: Contents, name: str, leaves: Sequence[Leaf], values: Mapping[str, Any]) -> Any:
    """Return the entry with the flat name `name`, made of `leaves`, whose values are in `values` by flat key.

    Before format 3 a checkpoint does not say what its containers were: whatever is numbered is a list, the rest dicts.
    """
    container = contents.structure and find(contents.structure, name)
    if container:
        return rebuild(container, values, f"{name}.")
    return _nest([(leaf.path, values[leaf.key]) for leaf in leaves])


def at_path(nest: Any, path: Path) -> Any:
    """Return what is at `path` in a nest of dicts and lists; None if there is nothing."""
    for step in path:
        try:
            nest = nest[step]
        except (KeyError, IndexError, TypeError):
            return None
    return nest


def _nest(items: list[tuple[Path, Any]]) -> Any:
    for path, value in items:
        if not path:
            return value
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in items:
        below.setdefault(path[0], []).append((path[1:], value))
    values = {step: _nest(inner) for step, inner in below.items()}
    # Numbers are places in lists.
    if all(type(step) is int for step in values) and sorted(values) == list(range(len(values))):
        return [values[at] for at in range(len(values))]
    return values
