"""The containers of a nested state, without their entries and without torch.

The structure of a state is the tree of its containers with their types, the types and order of their keys, and the
empty containers. `flattening` splits a live state into its structure and flat entries; `rebuild` joins the two and
returns an equal state of the same types. The manifest holds the structure as JSON; from any input `decode_structure`
builds only `Branch`es, and no more of them than the length of the JSON allows.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format import plain_value

Path = tuple[str | int, ...]

MAX_DEPTH = 100
"""Levels of nested containers; the JSON parser's own limit is not far above."""

MAX_BRANCHES = 1_000_000
"""Containers in one state."""

LIST = "list"
_MAKERS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{
        f"defaultdict({kind.__name__})": partial(defaultdict, kind)
        for kind in (list, dict, set, tuple, int, float, bool, str)
    },
}
"""The constructor of each kind of mapping. Factories are looked up by name: nothing in a checkpoint is called."""

_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


FORM = "__tensor_flatten__"
"""The name of the form of a tensor that is made of others, next to these (subclasses.py)."""
_PIECE = re.compile(r"\.shard[\d_]*$")
"""What ends the name of a piece of a shard of one."""


class Branch(NamedTuple):
    """A container. Equal branches have equal kinds, and keys of equal types."""

    kind: str
    """A key of `_MAKERS`, or `list`."""
    keys: Sequence[Any]
    """The keys in order; the positions of a list."""
    key_reprs: tuple[str, ...]
    """The keys' `repr`, which shows their types (1 is not True); empty for a list and if all keys are strings."""
    children: tuple[Branch | None, ...]
    """The child for each key; None for an entry of the flat state, which is not a container."""


def are_pieces(parts: Any) -> bool:
    """Return whether `parts`, or their container, are of a tensor made of others of which each rank has its own."""
    names = parts if isinstance(parts, Mapping) else getattr(parts, "keys", ())
    return FORM in names and any(is_piece(str(name)) for name in names)


def is_piece(name: str) -> bool:
    """Return whether `name` is that of a piece of a shard."""
    return _PIECE.search(name) is not None


def rebuild(structure: Branch, flat: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the nested state with the containers of `structure` and the entries of `flat`, named after `prefix`."""
    values = (
        flat[f"{prefix}{key}"] if child is None else rebuild(child, flat, f"{prefix}{key}.")
        for key, child in zip(structure.keys, structure.children, strict=True)
    )
    if structure.kind == LIST:
        return list(values)
    container = _MAKERS[structure.kind]()
    for key, value in zip(structure.keys, values, strict=True):
        container[key] = value
    return container


def paths_of(
    structure: Branch, expected: Container[str] | None = None, tensors: Container[str] | None = None
) -> dict[str, Path]:
    """Map the flat name of every entry to DCP's path for it. Raises ValueError for a name that occurs twice.

    With `expected` it also raises for a name that is not in it; names are made one by one, so `expected` bounds the
    memory. With `tensors`, the names of all tensors, the positions in a list without tensors and without non-empty
    containers become strings: DCP stores only the objects of such a list, not its empty mappings, and its tools
    would take the list that they build for an entry.
    """
    found: dict[str, Path] = {}
    _add_paths(structure, (), found, expected, tensors)
    return found


def without(structure: Branch, leave_out: Callable[[str], bool]) -> Branch:
    """Return the container without those of its direct children for whose name `leave_out` returns True."""
    kept = [at for at, key in enumerate(structure.keys) if not leave_out(str(key))]
    children = [structure.children[at] for at in kept]
    return branch_of(structure.kind, [structure.keys[at] for at in kept], children)


def empty_like(value: Mapping[Any, Any]) -> Any:
    """Return an empty mapping of the kind of `value`; a dict if checkpoints do not support its kind."""
    return _MAKERS[container_kind(value) or "dict"]()


def encode_structure(structure: Branch) -> dict[str, Any]:
    """Return `structure` as JSON."""
    children = [child and encode_structure(child) for child in structure.children]
    document: dict[str, Any] = {"kind": structure.kind}
    if structure.kind != LIST:
        document["keys"] = [plain_value.encode_value(key) for key in structure.keys]
    if structure.kind == LIST or any(children):
        document["children"] = children
    return document


def decode_structure(document: object) -> Branch:
    """Return the structure that `encode_structure` made `document` from. Raises ValueError for any other document."""
    return _Decoder().branch(document, 1)


def branch_of(kind: str, keys: Sequence[Any], children: Sequence[Branch | None]) -> Branch:
    """Return a container of this kind. Raises ValueError if two keys are equal, as a dict compares them."""
    if kind == LIST:
        return Branch(kind, range(len(children)), (), tuple(children))
    if len(dict.fromkeys(keys)) < len(keys):
        raise ValueError("two keys of one mapping are equal")
    is_text = {*map(type, keys)} <= {str}
    return Branch(kind, tuple(keys), () if is_text else tuple(map(repr, keys)), tuple(children))


def container_kind(value: Mapping[Any, Any]) -> str | None:
    """Return the kind of the container `value`, a key of `_MAKERS`; None if checkpoints do not support it."""
    if type(value) is not defaultdict:
        return _KINDS.get(type(value))
    factory = value.default_factory
    kind = "defaultdict" if factory is None else f"defaultdict({getattr(factory, '__name__', '')})"
    return kind if kind in _MAKERS and _MAKERS[kind]().default_factory is factory else None


def type_name(value: object) -> str:
    """Return the type of `value` by its full name."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Decoder:
    def __init__(self) -> None:
        self._num_branches = 0

    def branch(self, document: object, depth: int) -> Branch:
        self._num_branches += 1
        if depth > MAX_DEPTH or self._num_branches > MAX_BRANCHES:
            raise ValueError(f"expected at most {MAX_BRANCHES} containers, nested at most {MAX_DEPTH} deep")
        if not isinstance(document, dict):
            raise ValueError(f"expected an object for a container, found {type_name(document)}")
        kind, keys, children = document.get("kind"), document.get("keys"), document.get("children")
        if type(kind) is not str or (kind != LIST and kind not in _MAKERS):
            raise ValueError(f"expected the kind of a container, found {kind!r:.100}")
        if kind == LIST:
            return branch_of(kind, (), self._children(children, depth))
        if type(keys) is not list:
            raise ValueError(f"expected the keys of a {kind}, found {type_name(keys)}")
        decoded = [key if type(key) is str else self._key(key) for key in keys]
        branches = [None] * len(keys) if children is None else self._children(children, depth)
        if len(branches) != len(keys):
            raise ValueError(f"expected {len(keys)} children of a {kind}, found {len(branches)}")
        return branch_of(kind, decoded, branches)

    def _children(self, children: object, depth: int) -> list[Branch | None]:
        if type(children) is not list:
            raise ValueError(f"expected a list of children, found {type_name(children)}")
        return [None if child is None else self.branch(child, depth + 1) for child in children]

    def _key(self, document: object) -> Any:
        key = plain_value.decode_value(document)
        try:
            hash(key)
        except TypeError:
            raise ValueError(f"a {type_name(key)} cannot be a key of a mapping") from None
        str(key)  # Raises ValueError for a number of thousands of digits.
        return key


def _add_paths(
    structure: Branch,
    path: Path,
    found: dict[str, Path],
    expected: Container[str] | None,
    tensors: Container[str] | None,
) -> None:
    """Add the entries of the container at `path` to `found`, as `paths_of` returns them."""
    is_list = structure.kind == LIST
    if is_list and tensors is not None:
        is_list = any(
            _has_entries(child) if child else ".".join(map(str, (*path, number))) in tensors
            for number, child in enumerate(structure.children)
        )
    prefix: str | None = None  # Made with the first entry: above it there may be names of any length.
    for key, child in zip(structure.keys, structure.children, strict=True):
        text = str(key)
        below = (*path, key if is_list else text)
        if child is not None:
            _add_paths(child, below, found, expected, tensors)
            continue
        if prefix is None:
            prefix = "".join(f"{step}." for step in path)
        name = prefix + text
        if name in found:
            raise ValueError(f"two entries of the state have the name {name!r}")
        if expected is not None and name not in expected:
            raise ValueError(f"{name[:200]!r} is not in the tables")
        found[name] = below


def _has_entries(structure: Branch) -> bool:
    return any(child is None or _has_entries(child) for child in structure.children)


class Containers:
    """The containers in `structure` by flat name, such as `rng.rank0`."""

    def __init__(self, structure: Branch) -> None:
        self._structure = structure
        self._children: dict[int, dict[str, Branch]] = {}

    def find(self, name: str, parent: Branch | None = None) -> Branch | None:
        """Return the container with this flat name, within `parent`; None if there is none."""
        children = self._children_of(parent or self._structure)
        if (child := children.get(name)) is not None:
            return child
        at = name.find(".")
        while at >= 0:
            child = children.get(name[:at])
            if child is not None and (found := self.find(name[at + 1 :], child)) is not None:
                return found
            at = name.find(".", at + 1)
        return None

    def _children_of(self, parent: Branch) -> dict[str, Branch]:
        if id(parent) not in self._children:
            pairs = zip(parent.keys, parent.children, strict=True)
            self._children[id(parent)] = {str(key): child for key, child in pairs if child is not None}
        return self._children[id(parent)]


# The structure of the state that all ranks save together.
#
# Each rank has a part of the state: its pipeline stages, its random generators under its own key. The joint structure
# has each container once, with the keys of all ranks. If one rank has a container and another an entry under the same
# name, only one of them could be restored: `merged_structure` refuses that, by name. A list is never joined, nor what
# the caller says is whole: with the keys of two ranks it would be a value that no rank had.


def merged_structure(
    structures: Iterable[Branch], is_whole: Callable[[str], bool] = lambda name: False
) -> tuple[Branch, set[str]]:
    """Return one structure with all containers and keys of `structures`, in the order of their first occurrence.

    A list, and a container whose name `is_whole`, are those of the first structure that has them; also returns the
    names of those that are not equal in all. Raises ValueError, naming the entry, if two of them do not fit together.
    """
    odd: set[str] = set()
    return _merged(structures, is_whole, odd, ""), odd


def _merged(branches: Iterable[Branch], is_whole: Callable[[str], bool], odd: set[str], name: str) -> Branch:
    first, *others = (branch for branch, _ in groupby(branches))
    if not others:  # The usual case: ranks have equal structures.
        return first
    for other in others:
        if other.kind != first.kind:
            raise _conflict(name, f"a {first.kind}", f"a {other.kind}")
    if first.kind == LIST or is_whole(name):
        odd.add(name)
        return first
    keys: dict[Any, Any] = {}
    below: dict[Any, list[Branch | None]] = {}
    for branch in (first, *others):
        # 1 and True are the same key in a dict.
        texts = branch.key_reprs or branch.keys
        for text, key, child in zip(texts, branch.keys, branch.children, strict=True):
            identity = key if type(key) is str else (text,)
            keys[identity] = key
            below.setdefault(identity, []).append(child)
    children = [
        _merged_child(of_key, is_whole, odd, f"{name}.{key}" if name else str(key))
        for key, of_key in zip(keys.values(), below.values(), strict=True)
    ]
    try:
        return branch_of(first.kind, [*keys.values()], children)
    except ValueError as error:
        raise ValueError(f"{name or 'the state'}: {error}") from None


def _merged_child(
    children: Sequence[Branch | None], is_whole: Callable[[str], bool], odd: set[str], name: str
) -> Branch | None:
    branches = [child for child in children if child is not None]
    if branches and len(branches) < len(children):
        raise _conflict(name, f"a {branches[0].kind}", "no container")
    return _merged(branches, is_whole, odd, name) if branches else None


def _conflict(name: str, one: str, other: str) -> ValueError:
    return ValueError(
        f"{name} is {one} on one rank and {other} on another, and a checkpoint can hold only one of them. "
        "Return a state of the same structure on every rank, or use a name of its own for each rank"
    )
