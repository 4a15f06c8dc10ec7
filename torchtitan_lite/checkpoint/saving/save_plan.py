"""Which rank writes what, and where in its file: planned once, and reused while the structure stays the same.

Each rank compares the structure of its state (names, containers, dtypes, shapes, shardings) with that of
the last save, and one all-reduce max says whether it is unchanged on all ranks. If so, the last plan
holds and nothing else travels. If it changed on any rank, all ranks plan again: each rank proves that
its state can be rebuilt, DCP makes its items, and the coordinator assigns each item that several ranks
hold to one of them (replicas.py), balanced, and lays out every file. Planning comes before staging,
while the caller waits, so that a rank stages only what it writes.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS
from torchtitan_lite.checkpoint.format.description import Description, PlannedFile
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.file_image import FileLayout, Spec
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.joint_structure import joint
from torchtitan_lite.checkpoint.format.kinds import difference
from torchtitan_lite.checkpoint.format.shards import knows_its_parts, part_of
from torchtitan_lite.checkpoint.format.structure import Branch, decode, encode, paths_of, rebuild
from torchtitan_lite.checkpoint.saving.object_items import ObjectItems
from torchtitan_lite.checkpoint.saving.rank_image import Planned, RankPlan
from torchtitan_lite.checkpoint.saving.replicas import Replicas
from torchtitan_lite.collection import no_collection
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store import layout

State = dict[str, Any]


@dataclass(frozen=True)
class _Examined:
    """The structure of a state; states of equal structure are saved by the same plan."""

    structure: Branch
    entries: Sequence[tuple[Any, ...]]
    """For each entry, in order: its name, and for a tensor what stays the same from save to save."""


class _Verdict(enum.IntEnum):
    """One rank's answer to whether its plan still holds; the maximum over the ranks counts."""

    UNCHANGED = 0
    CHANGED = 1
    FAILED = 2


class PlanCache:
    """Plans saves, and keeps the last plan."""

    def __init__(self, peers: Peers, replicas: Replicas | None = None) -> None:
        self._peers = peers
        self._examined: _Examined | None = None
        self._replicas = replicas or Replicas()
        self._object_items = ObjectItems()
        self._is_compared = False
        self._plan: RankPlan | None = None

    def plan(
        self,
        state: State,
        check: Callable[[], None] | None = None,
        *,
        failure: Exception | None = None,
        numbers: Sequence[int] = (),
    ) -> Planned:
        """Return the plan for `state`, whose `image` is this rank's file. **Collective**.

        What fails on one rank, `check` included, is raised on every rank, as is a `failure` that it has already. The
        first call with a `check`, of the first save or image of a start, also compares the values that must be the same
        on all ranks, and warns where they differ. The maximum of `numbers` over all ranks comes back with the plan.
        """
        flat: State = {}
        examined: _Examined | None = None
        verdict = _Verdict.FAILED
        try:
            if failure is not None:
                raise failure
            flat, structure = _flattened(state, check)
            examined = _examined(flat, structure, self._examined)
            is_known = self._plan is not None and examined is self._examined
            verdict = _Verdict.UNCHANGED if is_known else _Verdict.CHANGED
            if verdict is _Verdict.CHANGED:
                _prove(state, flat, examined.structure)
        except Exception as error:
            verdict, failure = _Verdict.FAILED, error
        in_doubt = self._peers.is_group_in_doubt
        highest, is_in_doubt, *agreed_numbers = self._peers.max_over_ranks(verdict, in_doubt, *numbers)
        agreed = _Verdict(highest)
        if is_in_doubt:
            self._peers.renew_group()
        if agreed is _Verdict.FAILED:
            self._peers.raise_together(failure)
        assert examined is not None, "else all ranks failed together"
        if agreed is _Verdict.CHANGED or self._plan is None:
            self._plan = self._examined = None
            self._plan = self._make(state, flat, examined.structure)
            self._examined = examined
        if check is not None and not self._is_compared:
            self._is_compared = True
            self._replicas.compare(state, flat, self._peers)
        return Planned(self._plan, flat, self._object_items, tuple(agreed_numbers))

    def _make(self, state: State, flat: State, structure: Branch) -> RankPlan:
        local: SavePlan | None = None
        failure: Exception | None = None
        try:
            local = _local_plan(flat, structure)
            local = dataclasses.replace(local, storage_data=self._replicas.of_lowest_rank(state, local.items))
        except Exception as error:
            failure = error
        answers = _Answers(failure or local)
        with no_collection():  # The coordinator holds an object for each chunk of each rank.
            kept: list[int] = self._peers.scatter_answers(answers.mine, answers.of_all)
        assert local is not None
        return _rank_plan(self._peers.rank, [local.items[number] for number in kept], answers.description, flat)


class _Answers:
    """The coordinator's answer to the plans of all ranks. The description stays on the coordinator."""

    def __init__(self, mine: SavePlan | Exception | None) -> None:
        self.mine = mine
        self.description: Description | None = None

    def of_all(self, plans: list[SavePlan | Exception | None]) -> list[list[int]]:
        """Return for each rank the numbers of those of its items that it writes. Raises the first rank's failure."""
        whole: list[SavePlan] = []
        for plan in plans:
            if isinstance(plan, Exception):
                raise plan
            assert plan is not None
            whole.append(plan)
        kept = balanced(whole)
        reduced = [
            dataclasses.replace(plan, items=[plan.items[number] for number in numbers], storage_data=None)
            for plan, numbers in zip(whole, kept, strict=True)
        ]
        # DCP's planner merges the chunks into one metadata and checks that every tensor is complete. The paths of keys
        # come from the structure: DCP's way to join them is quadratic in the number of ranks that have their own keys.
        final, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(reduced)
        structure = joint(plan.planner_data for plan in whole)
        tensors = {
            key for key, of_key in metadata.state_dict_metadata.items() if isinstance(of_key, TensorStorageMetadata)
        }
        paths = paths_of(structure, tensors=tensors)
        if paths.keys() != metadata.state_dict_metadata.keys():
            lost = min(paths.keys() ^ metadata.state_dict_metadata.keys())
            raise ValueError(f"no rank writes {lost}, which a rank has in its state")
        metadata = dataclasses.replace(metadata, planner_data=paths)
        files = [_planned_file(rank, plan.items) for rank, plan in enumerate(final)]
        self.description = Description(metadata, files, structure)
        return kept


def balanced(plans: Sequence[SavePlan]) -> list[list[int]]:
    """Return for each rank the numbers of those of its items that it writes: each item once, the bytes spread evenly.

    An item of only one rank stays there. Objects, and the items whose numbers are in a plan's storage data, go to the
    lowest rank that has them. The others go, the largest first, to the rank with the fewest bytes among their holders
    (Graham's rule: at most 4/3 of the best possible).
    """
    holders: dict[MetadataIndex, list[tuple[int, int]]] = {}
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            holders.setdefault(item.index, []).append((rank, number))
    load = [0] * len(plans)
    alone: list[list[int]] = [[] for _ in plans]
    kept: list[list[int]] = [[] for _ in plans]
    shared: list[tuple[int, list[tuple[int, int]]]] = []
    for held in holders.values():
        rank, number = held[0]
        num_bytes = _num_bytes(plans[rank].items[number])
        is_the_lowest_ranks = any(number in (plans[rank].storage_data or ()) for rank, number in held)
        if len(held) == 1 or num_bytes == 0 or is_the_lowest_ranks:
            load[rank] += num_bytes
            (alone if len(held) == 1 else kept)[rank].append(number)
        else:
            shared.append((num_bytes, held))
    for num_bytes, held in sorted(shared, key=lambda pair: -pair[0]):
        rank, number = min(held, key=lambda place: load[place[0]])
        load[rank] += num_bytes
        kept[rank].append(number)
    if len(plans) < LEAST_CHUNKS:
        return [sorted(alone[rank] + kept[rank]) for rank in range(len(plans))]
    return [_in_file_order(plan.items, alone[rank], kept[rank]) for rank, plan in enumerate(plans)]


def _in_file_order(items: Sequence[WriteItem], alone: list[int], shared: list[int]) -> list[int]:
    """Return the numbers of the `items` that only this rank has and of others that it writes, as they lie in its file.

    Chunks of cut tensors come first, and of these the ones that no other rank has: so equal chunks begin at the same
    byte of every rank's file, and the manifest needs one run for all of them (chunk_runs.py).
    """
    of_cut = [[number for number in sorted(numbers) if _is_cut(items[number])] for numbers in (alone, shared)]
    cut = [*of_cut[0], *of_cut[1]]
    return [*cut, *sorted({*alone, *shared} - {*cut})]


def _is_cut(item: WriteItem) -> bool:
    """Return whether `item` is a chunk with elements, but not with all those of its tensor."""
    return item.tensor_data is not None and 0 < item.tensor_data.chunk.sizes.numel() < item.tensor_data.size.numel()


def _flattened(state: State, check: Callable[[], None] | None) -> tuple[State, Branch]:
    faults.point("plan")
    if check is not None:
        check()
    return flatten(state)


def _examined(flat: State, structure: Branch, last: _Examined | None) -> _Examined:
    """Return what is examined of `flat`: `last` itself, if that is the same. Raises as `_entry`."""
    if last is not None and structure == last.structure and _are_entries_of(flat, last.entries):
        return last
    return _Examined(structure, [_entry(key, value) for key, value in flat.items()])


def _are_entries_of(flat: State, entries: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether `entries` are those of `flat`, without making those of plain tensors. Raises as `_entry`."""
    plain, strided = _PLAIN_TENSORS, torch.strided
    for (key, value), entry in zip(flat.items(), entries, strict=True):
        is_same = (
            type(value) in plain
            and len(entry) == 3
            and value.layout is strided
            and _has_memory(value)
            and value.dtype is entry[1]  # So it is as little quantized as that one.
            and value.shape == entry[2]
            and key == entry[0]
        )
        if not is_same and _entry(key, value) != entry:
            return False
    return True


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _prove(state: State, flat: State, structure: Branch) -> None:
    """Raise TypeError unless `flat` and what the manifest stores of `structure` rebuild `state`."""
    again = rebuild(decode(json.loads(json.dumps(encode(structure)))), flat)
    if finding := difference(state, again, "state"):
        raise TypeError(f"{finding} in a checkpoint. Return dicts and lists of tensors and numbers from state_dict")


def _entry(key: str, value: Any) -> tuple[Any, ...]:
    """Return the name of an entry and what of it the plan depends on.

    Raises TypeError for a tensor whose elements cannot be written as they lie in memory.
    """
    if not isinstance(value, torch.Tensor):
        return (key,)
    local = value._local_tensor if isinstance(value, DTensor) else value
    if local.is_nested or (str(local.dtype).removeprefix("torch.") not in DTYPES and not local.is_quantized):
        what = "nested tensor" if local.is_nested else f"tensor of {local.dtype}"
        raise TypeError(f"{key} is a {what}, which a checkpoint cannot hold. Return dense tensors of other dtypes.")
    if local.layout is not torch.strided or local.is_quantized or not _has_memory(local):
        raise TypeError(
            f"{key} is a {type(local).__name__} of layout {local.layout} on {local.device}, "
            "whose elements cannot be written as they lie. Return plain dense tensors from state_dict."
        )
    if isinstance(value, DTensor):
        return key, value.dtype, value.shape, value.placements, value.device_mesh, local.shape
    return key, value.dtype, value.shape


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has an address, or needs none because it has no elements."""
    try:
        if tensor.data_ptr() != 0:
            return True
    except RuntimeError:  # Of wrapper subclasses over other tensors, and of tensors that functorch is done with.
        pass
    return tensor.numel() == 0 and not tensor.is_meta


def _local_plan(flat: State, structure: Branch) -> SavePlan:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(flat)
    plan = planner.create_local_plan()
    items = [_placed(item, flat[item.index.fqn]) for item in plan.items]
    return dataclasses.replace(plan, items=items, planner_data=structure)


def _placed(item: WriteItem, value: Any) -> WriteItem:
    """Return `item` with the chunk that `value` has in memory. Raises ValueError if its placement contradicts that."""
    if not isinstance(value, DTensor) or knows_its_parts(value):
        return item
    assert item.tensor_data is not None
    part = part_of(item.index.fqn, value)
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.memory.shape)
    return dataclasses.replace(
        item,
        index=MetadataIndex(item.index.fqn, chunk.offsets),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
    )


def _rank_plan(rank: int, items: Sequence[WriteItem], description: Description | None, flat: State) -> RankPlan:
    file = _planned_file(rank, items)
    keys = [item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO]
    volatile = {number for number, item in enumerate(file.items) if not _only_step_changes(item.index.fqn, flat)}
    return RankPlan(file.name, file.items, keys, file.layout, description, volatile)


def _only_step_changes(key: str, flat: State) -> bool:
    fqn = key.removeprefix("model.")
    # A scheduler may change a setting that is a tensor, such as lr.
    return key.startswith("optimizer.state.") or f"optimizer.param_groups.{fqn}.lr" in flat


def _planned_file(rank: int, items: Sequence[WriteItem]) -> PlannedFile:
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    return PlannedFile(layout.data_file(rank, 0), tensors, FileLayout([_spec(item) for item in tensors]))


def _spec(item: WriteItem) -> Spec:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _num_bytes(item: WriteItem) -> int:
    """Return the bytes of a chunk's elements; 0 for an object. (`tensor_storage_size` is of the whole tensor.)"""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
