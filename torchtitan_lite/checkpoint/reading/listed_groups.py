"""Parameter groups that a checkpoint has as a list, as plain DCP saves the state dict of an optimizer.

Our checkpoints have settings and state under the name of each parameter. A list has its parameters under `params`:
by name, as `get_state_dict` returns them, or by number, as the optimizer itself does. Numbers mean what they mean to
`Optimizer.load_state_dict`: the first one is the first parameter of the first group, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.reading.entries import Leaf
from torchtitan_lite.checkpoint.state.optimizer_state import SETTINGS, STATE, ParameterSlot
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch

ReadObjects = Callable[[Sequence[str]], Mapping[str, Any]]
_PARAMS = "params"


class ListedGroups(NamedTuple):
    """The checkpoint's groups: for each the checkpoint's names of its parameters."""

    groups: Sequence[Sequence[str]] = ()
    numbers: Mapping[Any, str] = {}
    """The name of each numbered parameter, by its number as text; empty if parameters have names."""
    misfit: str = ""
    """Why the numbers mean nothing to this run's optimizer."""

    def entries(self, kind: str, leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
        """Return the entries `<kind>.<name>.<key>` for the leaves of the list, or of the states, `kind`."""
        found: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            for name, key, *inner in self._places(kind, leaf):
                found.setdefault(f"{kind}.{name}.{key}", []).append(Leaf(leaf.key, tuple(inner)))
        return found

    def _places(self, kind: str, leaf: Leaf) -> list[tuple[Any, ...]]:
        if len(leaf.path) < 2:
            return []
        first, *rest = leaf.path
        if kind == STATE:
            return [(self.numbers.get(first, first), *rest)]
        if rest == [_PARAMS] or not isinstance(first, int) or first >= len(self.groups):
            return []
        return [(name, *rest) for name in self.groups[first]]


def read_listed_groups(
    contents: Contents, slots: Mapping[str, ParameterSlot], names: Mapping[str, str], peers: Peers, read: ReadObjects
) -> ListedGroups:
    """Return the groups of `contents`; none if they are not a list, or no rank has `slots`. **Collective**.

    `slots` are the run's parameters by name, and `names` maps these names to the checkpoint's. Raises
    `CheckpointMismatch` on every rank if something else than names or numbers is listed.
    """
    keys = _keys_of_params(contents)
    if not keys or not any(peers.gather(bool(slots))):
        return ListedGroups()
    params = read(keys)
    return peers.together(lambda: _groups_of_params(contents.path, params, slots, names))


def _keys_of_params(contents: Contents) -> list[str]:
    """Return the keys of the lists of parameters, by the number of their group."""
    if contents.structure is not None:
        return []
    found = {
        path[2]: key
        for key, path in contents.paths.items()
        if len(path) == 4 and path[:2] == ("optimizer", SETTINGS) and path[3] == _PARAMS and type(path[2]) is int
    }
    return [found[number] for number in sorted(found) if found[number] in contents.objects]


def _groups_of_params(
    path: str, params: Mapping[str, Any], slots: Mapping[str, ParameterSlot], names: Mapping[str, str]
) -> ListedGroups:
    for key, listed in params.items():
        if not isinstance(listed, list) or not all(type(each) in (str, int) for each in listed):
            raise CheckpointMismatch(
                path, f"  {key}: expected the names or numbers of parameters, found {listed!r:.80}"
            )
    lists = [*params.values()]
    if all(isinstance(each, str) for each in chain(*lists)):
        return ListedGroups(lists)
    own: dict[tuple[int, int], list[str]] = {}
    for name, slot in slots.items():
        own.setdefault(slot.group, []).append(names.get(name, name))
    live, stored = [own[group] for group in sorted(own)], [each for each in lists if each]
    if [*map(len, live)] != [*map(len, stored)]:
        sizes, here = (" and ".join(str(len(each)) for each in groups) for groups in (stored, live))
        return ListedGroups(misfit=f"groups of {sizes} numbered parameters in the checkpoint, here groups of {here}")
    numbers = dict(zip(chain(*stored), chain(*live), strict=True))
    # DCP's paths have keys of mappings as text.
    by_text = {str(number): name for number, name in numbers.items()}
    return ListedGroups([[numbers[each] for each in listed] for listed in lists], by_text)
