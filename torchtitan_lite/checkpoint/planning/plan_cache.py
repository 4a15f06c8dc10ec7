"""Which rank writes what, and where in its file: planned once, and reused while the structure stays the same.

Each rank compares the structure of its state (names, containers, dtypes, shapes, shardings) with that of
the last save, and one all-reduce max says whether it is unchanged on all ranks. If so, the last plan
holds and nothing else travels. If it changed on any rank, all ranks plan again: each rank proves that
its state can be rebuilt, DCP makes its items, and the coordinator assigns each item that several ranks
hold to one of them (replicas.py), balanced, and lays out every file. Planning comes before staging,
while the caller waits, so that a rank stages only what it writes. The same exchange carries what the ranks
need to know whether they hold equal parameters (rank_comparison.py).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.description import Description, PlannedFile
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.file_data import FileLayout, Spec
from torchtitan_lite.checkpoint.format.flattening import State, flatten
from torchtitan_lite.checkpoint.format.joint_structure import joint
from torchtitan_lite.checkpoint.format.kinds import difference, refuse_piece
from torchtitan_lite.checkpoint.format.shards import knows_its_parts, local_of, part_of
from torchtitan_lite.checkpoint.format.structure import Branch, decode, encode, paths_of, rebuild
from torchtitan_lite.checkpoint.planning.balance import balanced
from torchtitan_lite.checkpoint.planning.object_items import ObjectItems
from torchtitan_lite.checkpoint.planning.rank_comparison import OWN_NAMES, RankComparison
from torchtitan_lite.checkpoint.planning.rank_file import PlannedSave, RankPlan
from torchtitan_lite.checkpoint.planning.replicas import SHOWN, Replicas
from torchtitan_lite.checkpoint.planning.shared_items import SharedItems, holders_of, shared_by_rank
from torchtitan_lite.collection import no_collection
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.store import layout


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

    def __init__(
        self, peers: Peers, replicas: Replicas | None = None, comparison: RankComparison | None = None
    ) -> None:
        self._peers = peers
        self._examined: _Examined | None = None
        self._replicas = replicas or Replicas()
        self._comparison = comparison or RankComparison(peers)
        self._contradiction: RanksDiffer | None = None
        """What the present plan leaves out: tensors of another shape than the lowest rank's of the same name."""
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
    ) -> PlannedSave:
        """Return the plan for `state`, whose `file` is this rank's file. **Collective**.

        What fails on one rank, `check` included, is raised on every rank, as is a `failure` that it has already. A call
        with a `check` is for a save or an image: it also compares what must be the same on all ranks, and the plan
        `differs` if a checkpoint cannot have it. The maximum of `numbers` over all ranks comes back with the plan.
        """
        flat: State = {}
        examined: _Examined | None = None
        verdict = _Verdict.FAILED
        report = self._comparison.no_report() if check is not None else ()
        try:
            if failure is not None:
                raise failure
            flat, structure = _flattened(state, check)
            examined = _examined(flat, structure, self._examined)
            is_known = self._plan is not None and examined is self._examined
            verdict = _Verdict.UNCHANGED if is_known else _Verdict.CHANGED
            if verdict is _Verdict.CHANGED:
                _prove(state, flat, examined.structure)
            elif check is not None:
                report = self._comparison.report(flat)
        except Exception as error:
            verdict, failure = _Verdict.FAILED, error
        in_doubt = self._peers.is_group_in_doubt
        highest, is_in_doubt, *maxima = self._peers.max_over_ranks(verdict, in_doubt, *numbers, *report)
        agreed, agreed_numbers = _Verdict(highest), maxima[: len(numbers)]
        reported: list[int] | None = maxima[len(numbers) :]
        if is_in_doubt:
            self._peers.renew_group()
        if agreed is _Verdict.FAILED:
            self._peers.raise_together(failure)
        assert examined is not None, "else all ranks failed together"
        if agreed is _Verdict.CHANGED or self._plan is None:
            self._plan_again(state, flat, examined)
            reported = None
        differs = None if check is None else self._compare(state, flat, examined, reported)
        assert self._plan is not None
        return PlannedSave(self._plan, flat, self._object_items, tuple(agreed_numbers), differs)

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        """Begin to digest the state in a thread, so that the first save need not: see `RankComparison`. **Collective**.

        `get_state` may be collective, and raises on all ranks alike. Nothing is done if nothing is planned or shared.
        """
        if self._comparison.is_due:
            self._comparison.digest_alongside(flatten(get_state())[0])

    def _compare(
        self, state: State, flat: State, examined: _Examined, reported: Sequence[int] | None
    ) -> RanksDiffer | None:
        """Compare the ranks; where they differ, plan again so that all comes from the lowest. **Collective**."""
        if not self._is_compared:
            self._is_compared = True
            self._replicas.compare(state, flat, self._peers)
        took_lowest = self._comparison.takes_lowest
        differs = self._comparison.settle(flat, reported)
        if self._comparison.takes_lowest and not took_lowest:
            self._plan_again(state, flat, examined)
        return self._contradiction or differs

    def _plan_again(self, state: State, flat: State, examined: _Examined) -> None:
        """Replace the plan; keep none if that fails, also not the old one. **Collective**."""
        self._plan = self._examined = None
        self._plan = self._make(state, flat, examined.structure)
        self._examined = examined

    def _make(self, state: State, flat: State, structure: Branch) -> RankPlan:
        local: SavePlan | None = None
        failure: Exception | None = None
        try:
            local = _local_plan(flat, structure)
            local = dataclasses.replace(local, storage_data=self._replicas.of_lowest_rank(state, local.items))
        except Exception as error:
            failure = error
        answers = _Answers(failure or local, of_lowest=self._comparison.takes_lowest)
        with no_collection():  # The coordinator holds an object for each chunk of each rank.
            answer = _Answer(*self._peers.scatter_answers(answers.mine, answers.of_all))
        assert local is not None
        self._comparison.use(answer.shared, answer.num_groups, local.items)
        self._contradiction = answer.contradiction
        return _rank_plan(self._peers.rank, [local.items[number] for number in answer.kept], answers.description, flat)


class _Answer(NamedTuple):
    """What the coordinator answers to the plan of a rank."""

    kept: list[int]
    """The numbers of those of its items that it writes."""
    shared: Sequence[SharedItems] = ()
    num_groups: int = 0
    contradiction: RanksDiffer | None = None


class _Answers:
    """The coordinator's answers to the plans of all ranks. The description stays on the coordinator."""

    def __init__(self, mine: SavePlan | Exception | None, *, of_lowest: bool = False) -> None:
        self.mine = mine
        self._of_lowest = of_lowest
        self.description: Description | None = None

    def of_all(self, plans: list[SavePlan | Exception | None]) -> list[tuple[Any, ...]]:
        """Return the values of each rank's `_Answer`, without those that say nothing. Raises the first rank's failure.

        As a plain tuple: a class has its name in each of the pickled answers.
        """
        whole: list[SavePlan] = []
        for plan in plans:
            if isinstance(plan, Exception):
                raise plan
            assert plan is not None
            whole.append(plan)
        holders, odd = holders_of(whole)
        kept = balanced(whole, holders, of_lowest=self._of_lowest)
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
        shared, num_groups = shared_by_rank(whole, holders)
        contradiction = RanksDiffer(_contradicting(odd), OWN_NAMES) if odd else None
        if not num_groups and contradiction is None:
            return [(numbers,) for numbers in kept]
        return [(*of_rank, num_groups, contradiction) for of_rank in zip(kept, shared, strict=True)]


def _contradicting(odd: Mapping[str, Mapping[int, str]]) -> str:
    """Return the names in `odd`, each with what two of its ranks have."""
    pairs = [(key, *list(of_ranks.items())[:2]) for key, of_ranks in list(odd.items())[:SHOWN]]
    named = [f"{key} ({one} on rank {rank}, {other} on rank {second})" for key, (rank, one), (second, other) in pairs]
    return ", ".join(named) + (f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else "")


def _flattened(state: State, check: Callable[[], None] | None) -> tuple[State, Branch]:
    faults.point("plan")
    if check is not None:
        check()
    return flatten(state)


@torch.no_grad()  # Where `local_of` returns the memory itself.
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
    refuse_piece(key, value)
    local = local_of(value)
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
