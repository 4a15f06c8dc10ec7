"""The structure of the state that all ranks save together.

Each rank has a part of the state: its pipeline stages, its random generators under its own key. The joint
structure has each container once, with the keys of all ranks. If one rank has a container and another
an entry under the same name, only one of them could be restored: `merged_structure` refuses that, by name. A list is
never joined, nor what the caller says is whole: with the keys of two ranks it would be a value that no rank had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchtitan_lite.checkpoint.format.structure import LIST, Branch, branch_of


def merged_structure(
    structures: Iterable[Branch], is_whole: Callable[[str], bool] = lambda name: False
) -> tuple[Branch, set[str]]:
    """Return one structure with all containers and keys of `structures`, in the order of their first occurrence.

    A list, and a container whose name `is_whole`, are those of the first structure that has them; also returns the
    names of those that are not equal in all. Raises ValueError, naming the entry, if two of them do not fit together.
    """
    first, *others = structures
    odd: set[str] = set()
    grown = _JointContainer(first, is_whole, odd)
    for structure in others:
        grown.add(structure, "")
    return grown.finished(""), odd


class _JointContainer:
    """A container that takes in the keys of one rank after another, without a new `Branch` for each."""

    def __init__(self, first: Branch, is_whole: Callable[[str], bool], odd: set[str], name: str = "") -> None:
        self._kind = first.kind
        self._is_whole, self._odd = is_whole, odd
        self._keys: dict[Any, Any] = {}
        self._children: dict[Any, _JointContainer | None] = {}
        self._has_branches = False
        self._first = first
        self._last: Branch | None = None
        self.add(first, name)

    def add(self, branch: Branch, name: str) -> None:
        if branch == self._last:  # The usual case: ranks have equal structures.
            return
        if branch.kind != self._kind:
            raise _conflict(name, f"a {self._kind}", f"a {branch.kind}")
        if self._last is not None and (self._kind == LIST or self._is_whole(name)):
            self._odd.add(name)
            return
        self._last = branch
        identities: Any = branch.keys
        if branch.key_reprs:  # 1 and True are the same key in a dict.
            pairs = zip(branch.keys, branch.key_reprs, strict=True)
            identities = [key if type(key) is str else (text,) for key, text in pairs]
        self._keys.update(zip(identities, branch.keys, strict=True))
        if self._has_branches or any(child is not None for child in branch.children):
            self._has_branches = True
            for identity, key, child in zip(identities, branch.keys, branch.children, strict=True):
                self._add_child(identity, child, f"{name}.{key}" if name else str(key))
        else:
            self._children.update(dict.fromkeys(identities))

    def _add_child(self, identity: Any, child: Branch | None, name: str) -> None:
        if identity not in self._children:
            self._children[identity] = (
                None if child is None else _JointContainer(child, self._is_whole, self._odd, name)
            )
            return
        known = self._children[identity]
        if (known is None) != (child is None):
            raise _conflict(name, f"a {known._kind if known else child.kind if child else ''}", "no container")
        if known is not None and child is not None:
            known.add(child, name)

    def finished(self, name: str) -> Branch:
        if not self._has_branches and len(self._first.keys) == len(self._children):
            return self._first
        pairs = zip(self._keys.values(), self._children.values(), strict=True)
        children = [None if child is None else child.finished(f"{name}.{key}") for key, child in pairs]
        try:
            return branch_of(self._kind, list(self._keys.values()), children)
        except ValueError as error:
            raise ValueError(f"{name.removeprefix('.') or 'the state'}: {error}") from None


def _conflict(name: str, one: str, other: str) -> ValueError:
    return ValueError(
        f"{name} is {one} on one rank and {other} on another, and a checkpoint can hold only one of them. "
        "Return a state of the same structure on every rank, or use a name of its own for each rank"
    )
