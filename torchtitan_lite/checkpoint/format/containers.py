"""The containers of a stored state, found by flat name.

Names are looked up part by part and never made: a small hostile structure could have gigabytes of them.
"""

from __future__ import annotations

from torchtitan_lite.checkpoint.format.structure import Branch


class Containers:
    """The containers in `structure` by flat name, such as `rng.rank0`."""

    def __init__(self, structure: Branch) -> None:
        self._structure = structure
        self._children: dict[int, dict[str, Branch]] = {}

    def find(self, name: str) -> Branch | None:
        """Return the container with this flat name; None if there is none."""
        return self._find(self._structure, name)

    def _find(self, parent: Branch, name: str) -> Branch | None:
        children = self._children_of(parent)
        if (child := children.get(name)) is not None:
            return child
        at = name.find(".")
        while at >= 0:
            child = children.get(name[:at])
            if child is not None and (found := self._find(child, name[at + 1 :])) is not None:
                return found
            at = name.find(".", at + 1)
        return None

    def _children_of(self, parent: Branch) -> dict[str, Branch]:
        if id(parent) not in self._children:
            pairs = zip(parent.keys, parent.children, strict=True)
            self._children[id(parent)] = {str(key): child for key, child in pairs if child is not None}
        return self._children[id(parent)]
