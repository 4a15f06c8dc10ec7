"""Whether every rank that has a parameter in its optimizer has the same of that parameter's state and settings. Pure.

A load gives the state in a checkpoint to every such rank. Where only an owner kept it, the others would have a state
that their optimizer never updates, and the next save would take it from one of them. Settings come from the lowest of
these ranks, all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torchtitan_lite.checkpoint.format.structure import Branch
from torchtitan_lite.checkpoint.state.optimizer_state import SETTINGS, STATE, split_key

HeldBy = tuple[Sequence[int], Branch]
"""The ranks that have one optimizer state, and its containers."""
Entries = Mapping[str, Branch | None]
"""The containers of a parameter's state by its keys there; None for an entry."""


def odd_holder(optimizers: Sequence[HeldBy], has_part: Callable[[str, int], bool]) -> str:
    """Return what of which parameter's state one rank has and another one lacks; empty if there is nothing.

    `optimizers` are the different optimizer states, each with the ranks that have it; `has_part` says whether a rank
    has elements of a parameter: a rank without any needs no state.
    """
    if len(optimizers) < 2:
        return ""
    held = [_parameters_in(branch) for _, branch in optimizers]
    states = [_states_in(branch, names) for (_, branch), names in zip(optimizers, held, strict=True)]
    for name in dict.fromkeys(name for state in states for name in state):
        # An optimizer without settings does not say which parameters it has: so each rank that has the parameter does.
        of_settings = [at for at, names in enumerate(held) if name in names] or range(len(held))
        if all(states[at].get(name, {}) == states[of_settings[0]].get(name, {}) for at in of_settings):
            continue
        ranks = {at: next((rank for rank in optimizers[at][0] if has_part(name, rank)), None) for at in of_settings}
        found = sorted((rank, at) for at, rank in ranks.items() if rank is not None)
        for rank, at in found[1:]:
            if text := _difference(
                name, found[0][0], states[found[0][1]].get(name, {}), rank, states[at].get(name, {})
            ):
                return text
    return ""


def odd_settings(optimizers: Sequence[HeldBy]) -> tuple[dict[str, int], set[str]]:
    """Return the settings that not all ranks with the parameter have, each with the lowest of these ranks.

    And those of them that this rank lacks.
    """
    first: dict[str, tuple[int, set[str]]] = {}
    odd: dict[str, int] = {}
    surplus: set[str] = set()
    for ranks, optimizer in optimizers:
        own: dict[str, set[str]] = {}
        for key in map(str, optimizer.keys):
            if key.startswith(f"{SETTINGS}."):
                own.setdefault(key.rpartition(".")[0], set()).add(key)
        for name, keys in own.items():
            rank, known = first.setdefault(name, (ranks[0], keys))
            odd |= dict.fromkeys(sorted(keys ^ known), rank)
            surplus |= keys - known
    return odd, surplus


def _difference(name: str, rank: int, one: Entries, other_rank: int, other: Entries) -> str:
    for key in [*one, *other]:
        where = ".".join(filter(None, ("optimizer", STATE, name, key)))
        if (key in one) != (key in other):
            has, lacks = (rank, other_rank) if key in one else (other_rank, rank)
            return f"{where} is on rank {has} and not on rank {lacks}, whose optimizer has the parameter, too"
        if one[key] != other[key]:
            return f"{where} has other entries on rank {other_rank} than on rank {rank}"
    return ""


def _parameters_in(optimizer: Branch) -> set[str]:
    """Return the names of the parameters of which `optimizer` has settings."""
    prefix = f"{SETTINGS}."
    return {key.removeprefix(prefix).rpartition(".")[0] for key in map(str, optimizer.keys) if key.startswith(prefix)}


def _states_in(optimizer: Branch, names: Collection[str]) -> dict[str, dict[str, Branch | None]]:
    states: dict[str, dict[str, Branch | None]] = {}
    for key, child in zip(map(str, optimizer.keys), optimizer.children, strict=True):
        kind, _, rest = key.partition(".")
        if kind == STATE:
            name, own = (rest, "") if rest in names else split_key(rest, names)
            states.setdefault(name, {})[own] = child
    return states
