"""Assemble the entries of a stored state dict from the flat keys of a checkpoint.

A value of nested containers is stored leaf by leaf. An entry consists of all leaves under one key of the
state dict (an FQN, or a key of the optimizer's flat state).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.structure import (
    MAX_DEPTH,
    Branch,
    Path,
    are_pieces,
    branch_of,
    empty_like,
    rebuild,
    without,
)
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
    ordered: dict[str, list[Leaf]] = {}
    for key, child in zip(parent.keys, parent.children, strict=True) if parent else ():
        if str(key) in found or child is not None:
            ordered[str(key)] = found.get(str(key), [])  # A container may be empty.
    return ordered | found


def assembled_entry(contents: Contents, name: str, leaves: Sequence[Leaf], values: Mapping[str, Any]) -> Any:
    """Return the entry with the flat name `name`, made of `leaves`, whose values are in `values` by flat key.

    A checkpoint of plain DCP does not store the types of containers: those with numbered keys become lists, all others
    dicts.
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


def room_for(contents: Contents, key: str, device: str | torch.device = "cpu") -> torch.Tensor | None:
    """Return new memory for the stored tensor `key`; None if that is an object."""
    stored = contents.tensors.get(key)
    return None if stored is None else torch.empty(stored.shape, dtype=stored.dtype, device=device)


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


# A nested state from a checkpoint that does not store its structure.
#
# DCP's own checkpoints, and what is converted from them, have only a path of strings and list positions for each entry:
# keys that are not strings became strings, every mapping became a dict, and empty containers are not stored.
# The state of the live object supplies most of what is missing. If it does not, and a wrong guess would
# restore a wrong state, `retyped` raises `Untyped` instead of guessing.


MAX_MISSING = 100_000
"""Missing positions in one list, which stand for empty mappings that the checkpoint does not store."""
_MOST_KEYS = 500
_NOTHING = branch_of("dict", (), ())
_MAX_KEY_LETTERS = 64
"""Characters. A longer key is taken for a string."""


class Untyped(ValueError):
    """The checkpoint does not store the type of a key, and the live object does not show it either."""


def retyped(name: str, entries: Mapping[Path, Any], live: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state `name` made of `entries`, keyed by path, with the types of keys and containers of `live`.

    Raises `Untyped`, naming the entry, and ValueError for paths that contradict each other.
    """
    for path in entries:
        if not 0 < len(path) <= _MOST_KEYS:
            raise ValueError(f"{name}: expected a path of 1 to {_MOST_KEYS} keys to an entry, found {len(path)} keys")
    state = dict(_mapping(_by_first_key(entries), live, name))
    # A mapping of the live object without any entry in the checkpoint was empty when it was saved.
    return {key: {} for key, value in live.items() if key not in state and isinstance(value, Mapping)} | state


_Tree = dict[str | int, dict[Path, Any]]
"""The keys, or list positions, of a container, each with the entries below it by the rest of their paths."""


def _by_first_key(entries: Mapping[Path, Any]) -> _Tree:
    tree: _Tree = {}
    for (first, *rest), value in entries.items():
        tree.setdefault(first, {})[tuple(rest)] = value
    return tree


def _typed_value(entries: Mapping[Path, Any], live: Any, name: str) -> Any:
    if () in entries:
        if len(entries) > 1:
            raise ValueError(f"{name} is both an entry and a container")
        return entries[()]
    tree = _by_first_key(entries)
    if {*map(type, tree)} == {int}:
        return _typed_list(tree, live if isinstance(live, list) else [], name)
    return _mapping(tree, live if isinstance(live, Mapping) else {}, name)


def _typed_list(tree: _Tree, live: list[Any], name: str) -> list[Any]:
    length = 1 + max(map(int, tree))
    if min(map(int, tree)) < 0 or length - len(tree) > MAX_MISSING:
        raise ValueError(f"{name}: {len(tree)} entries do not make a list of {length}")
    present = [live[i] if i < len(live) else None for i in range(length)]
    items = [
        _typed_value(tree[i], own, f"{name}.{i}") if i in tree else rebuild(_empty_structure(own) or _NOTHING, {})
        for i, own in enumerate(present)
    ]
    for own in live[length:]:
        if (structure := _empty_structure(own)) is None:
            break
        items.append(rebuild(structure, {}))
    return items


def _mapping(tree: _Tree, live: Mapping[Any, Any], name: str) -> Any:
    if not {*map(type, tree)} <= {str}:
        raise ValueError(f"{name} is both a mapping and a list")
    keys = {_typed_key(text, live, name): text for text in map(str, tree)}
    values = {key: _typed_value(tree[text], live.get(key), f"{name}.{text}") for key, text in keys.items()}
    for key, own in live.items():
        if key not in values and (structure := _empty_structure(own)) is not None:
            values[key] = rebuild(structure, {})
    ordered = [key for key in live if key in values]
    made = empty_like(live)
    for key in dict.fromkeys([*ordered, *values]):
        made[key] = values[key]
    return made


def _typed_key(text: str, live: Mapping[Any, Any], name: str) -> Any:
    """Return the key whose string form is `text`."""
    found = [key for key in live if str(key) == text]
    if len(found) == 1:
        return found[0]
    kinds = {*map(type, live)}
    other = _other_value(text)
    if not found and (other is None or kinds == {str}):
        return text
    if not found and kinds == {int} and type(other) is int:
        return other
    raise Untyped(
        f"{name} has the key {text!r}, and its checkpoint does not store whether that is a string or "
        f"{f'a {type(other).__name__}' if other is not None else 'something else'}; the {name} of this run has no "
        "such key to compare with. Give it such a key before the load, or leave its state out "
        "(--checkpoint.exclude_from_loading)."
    )


def _other_value(text: str) -> Any:
    """Return the number, boolean, tuple or bytes whose string form is `text`; None if there is none."""
    if len(text) > _MAX_KEY_LETTERS or not text.isascii():
        return None
    try:
        value = ast.literal_eval(text)  # Evaluates literals only; runs no code.
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return value if type(value) in (int, float, bool, tuple, bytes) and str(value) == text else None


def _empty_structure(own: Any) -> Branch | None:
    """Return the structure of `own` if it is a container without any entry; else None."""
    if not isinstance(own, Mapping | list):
        return None
    try:
        flat, structure = flatten({"": own})
    except (TypeError, ValueError):
        return None
    return None if flat else structure.children[0]
