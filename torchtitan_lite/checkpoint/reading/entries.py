"""Assemble the entries of a stored state dict from the flat keys of a checkpoint.

A value of nested containers is stored leaf by leaf. An entry consists of all leaves under one key of the
state dict (an FQN, or a key of the optimizer's flat state).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.plain_value import MAX_DEPTH
from torchtitan_lite.checkpoint.format.structure import Path, are_pieces, rebuild, without
from torchtitan_lite.errors import CheckpointDamaged


class Leaf(NamedTuple):
    """One stored tensor or object."""

    key: str
    """The checkpoint's flat key."""
    path: Path
    """Its path in the entry; empty if the leaf is the complete entry."""


def entries(contents: Contents, prefix: str, keys: Iterable[str] | None = None) -> dict[str, list[Leaf]]:
    """Return the leaves of each entry below `prefix` ("optimizer.", or "" for a state without a name).

    They are in the order of the state that was saved, where the checkpoint has its structure.
    """
    found: dict[str, list[Leaf]] = {}
    depth = 1 if prefix else 0
    for key in contents if keys is None else keys:
        if not key.startswith(prefix):
            continue
        path = contents.paths.get(key, ())
        if len(path) > MAX_DEPTH:
            raise CheckpointDamaged(contents.path, f"{key} is in {len(path)} containers, expected at most {MAX_DEPTH}")
        if len(path) > depth and (not prefix or f"{path[0]}." == prefix):
            found.setdefault(str(path[depth]), []).append(Leaf(key, tuple(path[depth + 1 :])))
        else:
            found.setdefault(key.removeprefix(prefix), []).append(Leaf(key, ()))
    parent = contents.container(prefix[:-1]) if prefix else contents.structure
    for key, child in zip(parent.keys, parent.children, strict=True) if parent else ():
        if child is not None:
            found.setdefault(str(key), [])  # A container may be empty.
    order = [str(key) for key in parent.keys] if parent else ()
    return {key: found[key] for key in order if key in found} | found


def assembled_entry(contents: Contents, name: str, leaves: Sequence[Leaf], values: Mapping[str, Any]) -> Any:
    """Return the entry with the flat name `name`, made of `leaves`, whose values are in `values` by flat key.

    A checkpoint before format 3 does not store the types of containers: those with numbered keys become lists, all
    others dicts.
    """
    if len(leaves) == 1 and not leaves[0].path:
        return values[leaves[0].key]
    container = contents.container(name)
    if container is not None and are_pieces(container):
        names = {leaf.path[0] for leaf in leaves}
        container = without(container, lambda each: each not in names)
    if container is not None:
        return rebuild(container, values, f"{name}.")
    return _nest([(leaf.path, values[leaf.key]) for leaf in leaves])


def at_path(nest: Any, path: Path) -> Any:
    """Return the value at `path` in nested dicts and lists; None if there is none."""
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
    # Keys 0, 1, 2 ... are the positions of a list.
    if all(type(step) is int for step in values) and sorted(values) == list(range(len(values))):
        return [values[at] for at in range(len(values))]
    return values
