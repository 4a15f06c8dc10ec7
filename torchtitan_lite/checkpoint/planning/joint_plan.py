"""Who writes what, and where: for all ranks, from their outlines. Coordinator only.

Nothing here grows with ranks x tensors: tensors that are placed alike have one `Spread`, and of each tensor two columns
say which rank writes a part of it, and at which byte. Each rank knows by itself what it alone holds, and writes that;
the answer names those of the others that it writes. DCP's planner has an object for each chunk of each rank, which
would take too long for thousands of ranks; it is the oracle of the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS, Shape
from torchtitan_lite.checkpoint.format.description import Description
from torchtitan_lite.checkpoint.format.shards import box_of, sharding_text
from torchtitan_lite.checkpoint.format.structure import (
    FORM,
    Branch,
    are_pieces,
    branch_of,
    decode_structure,
    is_piece,
    merged_structure,
    paths_of,
    without,
)
from torchtitan_lite.checkpoint.planning.joint_entries import (
    Boxes,
    JointTensor,
    Place,
    RankFiles,
    Section,
    agreeing,
    balance,
)
from torchtitan_lite.checkpoint.planning.placement import Holders, Numbers, Spread
from torchtitan_lite.checkpoint.planning.rank_summary import Digest, Outline, PlanAnswer
from torchtitan_lite.checkpoint.planning.shared_items import Member, Patterns
from torchtitan_lite.checkpoint.state.optimizer_state import (
    OWNER_KEYS,
    SETTINGS,
    STATE,
    OwnerRanks,
    StateOwner,
    owner_of,
    split_state_key,
)
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.log import listed

_SHOWN = 4
_MODEL, _OPTIMIZER = "model", "optimizer"
_STATES = f"{_OPTIMIZER}.{STATE}."
_WHOLE = re.compile(
    r"optimizer\.param_groups\..+|optimizer\.optimizers\.[^.]+\.(whole|global|other)|model\.(.+\.)?_extra_state"
)
"""Containers that all come from one rank: settings, state of an optimizer without a parameter, what a module adds."""
KEPT_ALIKE = "Keep the same entries on each rank that has the state"
KEPT_ALL = "Keep such a state on each rank that has the parameter"
OF_OWNER = "Have state_owner name the rank that keeps the state, or return None for what each rank keeps"


class JointPlan:
    """Plans what all ranks save together; with `of_lowest` all that ranks share comes from the lowest of them."""

    def __init__(self, *, of_lowest: bool = False, state_owner: StateOwner | None = None) -> None:
        self._of_lowest, self._state_owner = of_lowest, state_owner
        self._outlines: Sequence[Outline] = ()
        self._sections: dict[Digest, Section] = {}
        self.description: Description | None = None
        """Of the checkpoint, after `answers`."""
        self.odd_containers: dict[str, int] = {}
        """Lists and settings that ranks have with other entries, and the rank whose are saved."""
        self.owners: dict[str, str] = {}
        """Which ranks have an optimizer state that others lack, as the coordinator saves it, by key."""

    def ask(self, outlines: Sequence[Outline]) -> list[tuple[Digest, ...]]:
        """Return which of its pieces the coordinator asks of each rank."""
        self._outlines = outlines
        known: set[Digest] = set()
        asked = []
        for rank, outline in enumerate(outlines):
            for digest in outline.sections:
                self._sections.setdefault(digest, Section()).ranks.append(rank)
            wanted = dict.fromkeys((*outline.sections, outline.root, *outline.containers))
            asked.append(tuple(digest for digest in wanted if digest not in known))
            known.update(wanted)
        return asked

    def answers(self, pieces: Sequence[Mapping[Digest, bytes]]) -> list[PlanAnswer]:
        """Return the answer to each rank, whose `pieces` are the wanted ones.

        Raises ValueError if the parts of a tensor do not make it up, or if states do not fit together, and RanksDiffer
        for a state of a parameter that only some of its holders have.
        """
        texts = {digest: text for of_rank in pieces for digest, text in of_rank.items()}
        num_entries = 0
        for digest, section in self._sections.items():
            section.fill(texts[digest], num_entries)
            num_entries += len(section.entries)
        places: dict[str, list[Place]] = {}
        for section in self._sections.values():
            for number, entry in enumerate(section.entries):
                places.setdefault(entry.key, []).append((section, number))
        of_sections = self._sections.keys()
        documents = {digest: json.loads(text) for digest, text in texts.items() if digest not in of_sections}
        containers = {digest: document and decode_structure(document) for digest, document in documents.items()}
        optimizers = self._optimizers(containers)
        owned = owners_by_absence(optimizers, lambda name, rank: self._has_part(places, name, rank))
        if self._state_owner is not None and len(self._outlines) > 1:
            by_hook = self._take_from_owners(optimizers, places)
            owned = {key: ranks for key, ranks in owned.items() if (key[0], "") not in by_hook} | by_hook
        self._note(owned, places)
        structure = self._structure(self._branches(containers), optimizers, places)
        if self.odd_containers:
            places = _within(structure, places)
        kept: list[tuple[int, Numbers]] = []
        tensors, objects, odd = self._keys(places)
        for key in objects:
            for section, number in places[key]:
                section.is_decided[number] = 1
            section, number = min(places[key], key=lambda place: place[0].ranks[0])
            kept.append((section.first + number, section.column[:1]))
        balance(tensors, len(self._outlines))
        for tensor in tensors:
            if tensor.is_decided:
                for (section, number), boxes in tensor.by_place():
                    section.is_decided[number] = 1
                    kept.append((section.first + number, tensor.spread.ranks[tensor.writers[boxes]]))
        self.description = Description(self._laid_out(tensors), [*objects, *self.owners], self._with_owners(structure))
        members, num_groups = self._shared(tensors)
        packed = {digest: section.packed() for digest, section in self._sections.items()}
        by_rank = _by_rank(kept, len(self._outlines))
        return [
            PlanAnswer(tuple(packed[digest] for digest in outline.sections), of_rank, of_members, num_groups, odd)
            for outline, of_rank, of_members in zip(self._outlines, by_rank, members, strict=True)
        ]

    def _keys(self, places: Mapping[str, list[Place]]) -> tuple[list[JointTensor], list[str], str]:
        """Return the tensors and the names of the objects, and what contradicts the lowest rank's tensors.

        Such a tensor of a parameter or an optimizer state has no place in a checkpoint; of any other state the lowest
        rank's is saved. A rank that contradicts holds nothing of that name.
        """
        spreads: dict[tuple[object, ...], Spread] = {}
        tensors, objects, odd = [], [], []
        for key, of_key in places.items():
            if len(of_key) > 1:
                of_key = sorted(of_key, key=lambda place: place[0].ranks[0])
            lowest = of_key[0][0].entries[of_key[0][1]]
            if len(of_key) > 1:
                of_key, contradicting = agreeing(lowest, of_key)
                odd += contradicting
            if not lowest.dtype:
                objects.append(key)
                continue
            try:
                spread = self._spread(lowest.shape, of_key, spreads)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            entries = [section.entries[at] for section, at in of_key]
            is_lowest_ranks = self._of_lowest or any(each.is_lowest_ranks for each in entries)
            is_lowest_ranks |= of_key[0][0].is_of_owner
            tensors.append(JointTensor(spread, is_lowest_ranks, key, lowest.dtype, of_key))
        return tensors, objects, listed(odd, most=_SHOWN)

    def _spread(self, shape: Shape, places: Sequence[Place], spreads: dict[tuple[object, ...], Spread]) -> Spread:
        alike = (shape, *((section.first, *section.ranks[:1], *section.entries[at][4:]) for section, at in places))
        if alike not in spreads:
            spreads[alike] = Spread(shape, [self._holders(*place) for place in places])
        return spreads[alike]

    def _holders(self, section: Section, number: int) -> Holders:
        entry = section.entries[number]
        if entry.mesh < 0:
            return Holders(section.column)
        if entry.mesh not in section.coordinates:
            of_ranks = [self._outlines[rank].places[entry.mesh] for rank in section.ranks]
            section.coordinates[entry.mesh] = np.array(of_ranks, dtype=np.int64)
        return Holders(section.column, section.meshes[entry.mesh], entry.placements, section.coordinates[entry.mesh])

    def _laid_out(self, tensors: Sequence[JointTensor]) -> dict[str, dict[str, object]]:
        """Place all parts in the files, and return the entries of the tensors in the manifest's table.

        Parts of cut tensors come first, and of these the ones that no other rank has: so equal parts begin at the same
        byte of every rank's file, and the manifest needs one run for all of them (chunk_runs.py).
        """
        parts: list[list[tuple[int, JointTensor, Boxes]]] = [[], [], []]
        num_parts = dict.fromkeys((tensor.key for tensor in tensors), 0)
        for tensor in tensors:
            for (section, number), boxes in tensor.by_place():
                for order, chosen in self._by_order(tensor, boxes):
                    parts[order].append((section.first + number, tensor, chosen))
                    num_parts[tensor.key] += 1
        files = RankFiles(len(self._outlines))
        begun: dict[str, Numbers] = {}
        entries: dict[str, dict[str, object]] = {tensor.key: {} for tensor in tensors}
        for of_order in parts:
            for _, tensor, boxes in sorted(of_order, key=lambda part: part[0]):
                at = files.place(tensor, boxes)
                if num_parts[tensor.key] > 1:
                    num_parts[tensor.key] -= 1
                    begun.setdefault(tensor.key, np.zeros(len(tensor.writers), dtype=np.int64))[boxes] = at
                    continue
                if (whole := begun.pop(tensor.key, None)) is not None:
                    whole[boxes] = at
                entries[tensor.key] = tensor.entry(at if whole is None else whole)
        return entries

    def _by_order(self, tensor: JointTensor, boxes: Boxes) -> Iterator[tuple[int, Boxes]]:
        """Yield those of `boxes` that come first in their files, second, or last."""
        is_cut = tensor.spread.is_cut[boxes]
        if len(self._outlines) < LEAST_CHUNKS or not is_cut.any():
            yield 2, boxes
        elif is_cut.all():
            yield int(tensor.is_decided), boxes
        else:
            numbers = np.arange(len(tensor.writers))[boxes]
            yield int(tensor.is_decided), numbers[is_cut]
            yield 2, numbers[~is_cut]

    def _shared(self, tensors: Sequence[JointTensor]) -> tuple[list[list[Member]], int]:
        """Find the pattern of each entry; return the places of each rank in groups, and the number of groups."""
        patterns = Patterns()
        known: dict[Spread, int] = {}
        for tensor in tensors:
            spread = tensor.spread
            if not spread.largest_shared or any(s.entries[at].is_lowest_ranks for s, at in tensor.places):
                continue
            if spread not in known:
                known[spread] = patterns.number_of(spread.ranks, spread.counts)
            for section, at in tensor.places:
                section.patterns[at] = known[spread]
        return patterns.members(len(self._outlines))

    def _optimizers(self, containers: Mapping[Digest, Branch | None]) -> list[HeldBy]:
        """Return the different containers of optimizer states, each with the ranks that have it."""
        found: dict[Digest, list[int]] = {}
        for rank, outline in enumerate(self._outlines):
            root = containers[outline.root]
            if outline.containers and root is not None and _OPTIMIZER in root.keys:
                found.setdefault(outline.containers[list(root.keys).index(_OPTIMIZER)], []).append(rank)
        held = [(ranks, containers[digest]) for digest, ranks in found.items()]
        return [(ranks, branch) for ranks, branch in held if branch is not None]

    def _take_from_owners(self, optimizers: Sequence[HeldBy], places: dict[str, list[Place]]) -> Owned:
        """Have all state of a parameter for which `state_owner` names a rank come from that rank alone; return which.

        What is sharded is on each rank, and no rank's alone.
        """
        names = {name for _, branch in optimizers for name in _parameters_in(branch)}
        keys: dict[str, list[str]] = {}
        for key in places:
            if key.startswith(_STATES):
                keys.setdefault(split_state_key(key.removeprefix(_STATES), names)[0], []).append(key)
        owned: Owned = {}
        for name, of_name in keys.items():
            owner = owner_of(self._state_owner, name, len(self._outlines))
            if owner is None or any(self._is_sharded(key, places) for key in of_name):
                continue
            owned[name, ""] = [owner]
            for key in of_name:
                places[key] = _places_of_owner(key, places[key], owner)
        return owned

    def _is_sharded(self, key: str, places: Mapping[str, list[Place]]) -> bool:
        entries = [section.entries[at] for section, at in places[key]]
        return is_piece(key) or any(split.dim >= 0 for entry in entries for split in entry.placements)

    def _note(self, owned: Owned, places: Mapping[str, list[Place]]) -> None:
        """Note which ranks have each state, and of one in shards, how its parameter is sharded."""
        keys = [key for key in places if owned and key.startswith(_STATES)]
        sharded = [f"{key.removeprefix(_STATES)}." for key in keys if self._is_sharded(key, places)]
        for (name, key), ranks in owned.items():
            state, sharding = f"{name}.{key}" if key else name, ""
            if any(each.startswith(f"{state}.") for each in sharded):
                of_parameter = places.get(f"{_MODEL}.{name}", places.get(name))
                if not of_parameter:
                    found = f"{_STATES}{state} is in shards on some ranks, and its parameter is made of other tensors"
                    raise RanksDiffer(found, KEPT_ALL)
                section, number = of_parameter[0]
                entry = section.entries[number]
                sharding = sharding_text(section.meshes.get(entry.mesh, ()), entry.placements)
            self.owners[OWNER_KEYS + state] = str(OwnerRanks((*ranks,), len(self._outlines), sharding))

    def _with_owners(self, structure: Branch) -> Branch:
        """Return `structure` with the entries that say which ranks have a state."""
        keys = [key.removeprefix(f"{_OPTIMIZER}.") for key in self.owners]
        children = [
            branch_of(child.kind, [*child.keys, *keys], [*child.children, *[None] * len(keys)])
            if name == _OPTIMIZER and child is not None
            else child
            for name, child in zip(structure.keys, structure.children, strict=True)
        ]
        return branch_of(structure.kind, structure.keys, children) if keys else structure

    def _has_part(self, places: Mapping[str, list[Place]], parameter: str, rank: int) -> bool:
        """Return whether `rank` has elements of `parameter`, of the model or of another module of the state."""
        for section, number in places.get(f"{_MODEL}.{parameter}", places.get(parameter, [])):
            if rank in section.ranks:
                entry = section.entries[number]
                if entry.mesh < 0:
                    return 0 not in entry.shape
                coordinate = self._outlines[rank].places[entry.mesh]
                return 0 not in box_of(entry.shape, section.meshes[entry.mesh], entry.placements, coordinate).sizes
        # One that is made of other tensors has its form there.
        form = f"{parameter}.{FORM}"
        return any(rank in section.ranks for section, _ in places.get(f"{_MODEL}.{form}", places.get(form, [])))

    def _structure(
        self, branches: Sequence[Branch], optimizers: Sequence[HeldBy], places: Mapping[str, list[Place]]
    ) -> Branch:
        """Return the joint structure, and note what in it not all ranks have alike."""
        structure, odd = merged_structure(branches, lambda name: _WHOLE.fullmatch(name) is not None)
        for name in sorted(odd):
            ranks = [s.ranks[0] for key, of_key in places.items() if key.startswith(f"{name}.") for s, _ in of_key]
            self.odd_containers[name] = min(ranks, default=0)
        settings, surplus = odd_settings(optimizers) if len(optimizers) > 1 else ({}, set())
        self.odd_containers |= {f"{_OPTIMIZER}.{name}": rank for name, rank in settings.items()}
        if not surplus:
            return structure
        children = [
            without(child, surplus.__contains__) if key == _OPTIMIZER and child is not None else child
            for key, child in zip(structure.keys, structure.children, strict=True)
        ]
        return branch_of(structure.kind, structure.keys, children)

    def _branches(self, containers: Mapping[Digest, Branch | None]) -> list[Branch]:
        """Return the different structures of ranks."""
        branches = []
        for root, digests in dict.fromkeys((outline.root, outline.containers) for outline in self._outlines):
            branch = containers[root]
            assert branch is not None, "a state is a container"
            branches.append(branch._replace(children=tuple(map(containers.get, digests))) if digests else branch)
        return branches


def _places_of_owner(key: str, places: Sequence[Place], owner: int) -> list[Place]:
    """Return the place of the `owner` among those of `key`; no other rank writes there. Raise RanksDiffer for none."""
    kept = [(section, at) for section, at in places if owner in section.ranks]
    if not kept:
        rank = min(section.ranks[0] for section, _ in places)
        raise RanksDiffer(f"{key} is on rank {rank} and not on rank {owner}, its state_owner", OF_OWNER)
    for section, at in places:
        section.is_decided[at] = 1
    return [(section.of_owner(owner), at) for section, at in kept]


def _within(structure: Branch, places: Mapping[str, list[Place]]) -> dict[str, list[Place]]:
    """Return `places` without those that are not in `structure`; no rank writes these."""
    names = paths_of(structure)
    for key in places.keys() - names.keys():
        for section, number in places[key]:
            section.is_decided[number] = 1  # And is given to no rank.
    return {key: of_key for key, of_key in places.items() if key in names}


def _by_rank(kept: Sequence[tuple[int, Numbers]], num_ranks: int) -> list[bytes]:
    """Return for each rank the numbers of the entries that it writes, 4 bytes each, of `kept` with their writers."""
    if not kept:
        return [b""] * num_ranks
    ranks = np.concatenate([writers for _, writers in kept])
    numbers = np.repeat(np.array([number for number, _ in kept], dtype=np.uint32), [len(each) for _, each in kept])
    order = np.argsort(ranks, kind="stable")
    ends = 4 * np.searchsorted(ranks[order], np.arange(num_ranks + 1))
    packed = numbers[order].tobytes()
    return [packed[begin:end] for begin, end in pairwise(ends.tolist())]


# What of a parameter's state and settings only some of the ranks have whose optimizer has the parameter. Pure.
#
# A load gives a state to every such rank, unless the checkpoint says which of them had it: where only an owner kept it,
# the others would have a state that their optimizer never updates, and the next save would take it from one of them.
# Settings come from the lowest of these ranks, all of them.


HeldBy = tuple[Sequence[int], Branch]
"""The ranks that have one optimizer state, and its containers."""
Owned = dict[tuple[str, str], Sequence[int]]
"""The ranks that alone have a state, by the name of its parameter and its key there; empty for all of its keys."""


def owners_by_absence(optimizers: Sequence[HeldBy], has_part: Callable[[str, int], bool]) -> Owned:
    """Return the ranks with each state that another rank lacks.

    `optimizers` are the different optimizer states, each with the ranks that have it; `has_part` says whether a rank
    has elements of a parameter: a rank without any needs no state. Raises RanksDiffer for a state that is a container
    with other entries on another rank.
    """
    if len(optimizers) < 2:
        return {}
    held = [_parameters_in(branch) for _, branch in optimizers]
    states = [_states_in(branch, names) for (_, branch), names in zip(optimizers, held, strict=True)]
    owned: Owned = {}
    for name in dict.fromkeys(name for state in states for name in state):
        # An optimizer without settings does not say which parameters it has: so each rank that has the parameter does.
        of_settings = [at for at, names in enumerate(held) if name in names] or range(len(held))
        if all(states[at].get(name, {}) == states[of_settings[0]].get(name, {}) for at in of_settings):
            continue
        ranks = {at: next((rank for rank in optimizers[at][0] if has_part(name, rank)), None) for at in of_settings}
        found = [(rank, states[at].get(name, {}), optimizers[at][0]) for at, rank in ranks.items() if rank is not None]
        for key in dict.fromkeys(key for _, state, _ in found for key in state):
            having = sorted((rank, state[key], alike) for rank, state, alike in found if key in state)
            unlike = (rank for rank, child, _ in having if child != having[0][1] and not are_pieces(child))
            if odd := next(unlike, None):
                where = _STATES + (f"{name}.{key}" if key else name)
                raise RanksDiffer(f"{where} has other entries on rank {odd} than on rank {having[0][0]}", KEPT_ALIKE)
            if len(having) < len(found):
                owned[name, key] = sorted(rank for _, _, alike in having for rank in alike)
    return owned


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


def _parameters_in(optimizer: Branch) -> set[str]:
    """Return the names of the parameters of which `optimizer` has settings."""
    prefix = f"{SETTINGS}."
    return {key.removeprefix(prefix).rpartition(".")[0] for key in map(str, optimizer.keys) if key.startswith(prefix)}


def _states_in(optimizer: Branch, names: Collection[str]) -> dict[str, dict[str, Branch | None]]:
    states: dict[str, dict[str, Branch | None]] = {}
    for key, child in zip(map(str, optimizer.keys), optimizer.children, strict=True):
        kind, _, rest = key.partition(".")
        if kind == STATE:
            name, own = (rest, "") if rest in names else split_state_key(rest, names)
            states.setdefault(name, {})[own] = child
    return states
