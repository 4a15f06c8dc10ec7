"""The path of each flat key in the nested state, made at each use. Without torch.

Thousands of keys lie in one container: the table keeps for each only its container.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.format.structure import LIST, Branch, Path, paths_of


@dataclass(frozen=True, eq=False)
class _Container:
    path: Path
    is_list: bool
    prefix: str
    """What the flat names of its entries begin with."""

    def path_of(self, key: str) -> Path:
        last = key[len(self.prefix) :]
        return (*self.path, int(last) if self.is_list else last)


class KeyPaths(Mapping[str, Path]):
    """Paths by flat key: of each key in `containers` through its container, of all others as they are."""

    def __init__(self, containers: Mapping[str, _Container], others: Mapping[str, Path]) -> None:
        self._containers = containers
        self._others = others

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> KeyPaths:
        """Return `paths` in this form: itself, if it is one."""
        return paths if isinstance(paths, cls) else cls({}, paths)

    def __getitem__(self, key: str) -> Path:
        container = self._containers.get(key)
        return self._others[key] if container is None else container.path_of(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the path of `key`, or `default`, without an exception for each of thousands of keys without one."""
        container = self._containers.get(key)
        return self._others.get(key, default) if container is None else container.path_of(key)

    def __iter__(self) -> Iterator[str]:
        yield from self._containers
        yield from self._others

    def __len__(self) -> int:
        return len(self._containers) + len(self._others)

    def longer_than(self, length: int) -> frozenset[str]:
        """Return the keys whose path is longer than `length`."""
        deep = {container for container in {*self._containers.values()} if len(container.path) >= length}
        below = [key for key, container in self._containers.items() if container in deep] if deep else []
        return frozenset([*below, *(key for key, path in self._others.items() if len(path) > length)])


def key_paths(structure: Branch, tensors: Collection[str], objects: Collection[str]) -> KeyPaths:
    """Return the paths through `structure` to the keys `tensors` and `objects`.

    Raises ValueError unless each of them is in it exactly once, and nothing else is. Memory: that of these keys,
    whatever the structure.
    """
    walk = _KeyWalk(sum(map(len, tensors)) + sum(map(len, objects)))
    num_keys = len(tensors) + len(objects)
    if walk.descend(structure, (), "") and walk.num_found == len(walk.found) == num_keys:
        has = walk.found.__contains__
        if all(map(has, tensors)) and all(map(has, objects)) and not any(key in tensors for key in objects):
            return KeyPaths(walk.found, {})
    return KeyPaths({}, _checked(structure, {*tensors}, {*objects}))


class _KeyWalk:
    """Finds the container of each key; `room` is the length of all names that it may make."""

    def __init__(self, room: int) -> None:
        self.found: dict[str, _Container] = {}
        self.num_found = 0
        self._room = room

    def descend(self, branch: Branch, path: Path, prefix: str) -> bool:
        """Add the keys below `branch`, in their order. Return whether there was room for all."""
        container = _Container(path, branch.kind == LIST, prefix)
        texts = [*map(str, branch.keys)] if branch.kind == LIST or branch.key_reprs else branch.keys
        if not any(branch.children):
            return self._add(texts, container)
        for text, child in zip(texts, branch.children, strict=True):
            if child is None:
                is_done = self._add([text], container)
            elif len(prefix) + len(text) > self._room:
                return False  # Not even the name of one entry in it.
            else:
                is_done = self.descend(child, container.path_of(prefix + text), f"{prefix}{text}.")
            if not is_done:
                return False
        return True

    def _add(self, texts: Collection[str], container: _Container) -> bool:
        self._room -= len(container.prefix) * len(texts) + sum(map(len, texts))
        if self._room < 0:
            return False
        prefix = container.prefix
        self.found |= dict.fromkeys([prefix + text for text in texts], container)
        self.num_found += len(texts)
        return True


def _checked(structure: Branch, tensors: set[str], objects: set[str]) -> Mapping[str, Path]:
    """Return the same paths, made one by one. Raises ValueError that names the first key that does not fit."""
    paths = paths_of(structure, expected=tensors | objects)
    if len(paths) < len(tensors) + len(objects):
        missing = (tensors | objects) - paths.keys() or tensors & objects
        raise ValueError(f"it does not have {min(missing)!r} exactly once")
    return paths
