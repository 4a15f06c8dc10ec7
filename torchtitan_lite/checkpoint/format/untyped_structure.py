"""Rebuild a nested state from a checkpoint that does not store its structure.

DCP's own checkpoints, and what is converted from them, have only a path of strings and list positions for each entry:
keys that are not strings became strings, every mapping became a dict, and empty containers are not stored.
The state of the live object supplies most of what is missing. If it does not, and a wrong guess would
restore a wrong state, `retyped` raises `Untyped` instead of guessing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.structure import Branch, Path, branch_of, empty_like, rebuild

MAX_MISSING = 100_000
"""Missing positions in one list, which stand for empty mappings that the checkpoint does not store."""
_MAX_DEPTH = 500
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
        if not 0 < len(path) <= _MAX_DEPTH:
            raise ValueError(f"{name}: expected a path of 1 to {_MAX_DEPTH} keys to an entry, found {len(path)} keys")
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
