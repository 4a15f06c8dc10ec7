"""Which rank writes what, and where in its file: planned once, and reused while the structure stays the same.

Each rank compares the structure of its state (names, containers, dtypes, shapes, shardings) with that of the last save,
and one all-reduce max says whether it is unchanged on all ranks. If so, the last plan holds and nothing else travels.
If it changed on any rank, all ranks plan again: each rank proves that its state can be rebuilt and lists its parts,
and of their outlines (rank_summary.py) the coordinator makes one plan (joint_plan.py): what several ranks hold goes to
one of them, balanced, and every file is laid out. Planning comes before staging, while the caller waits, so that a rank
stages only what it writes. The same exchange carries what the ranks need to know whether they hold equal parameters
(rank_comparison.py).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS
from torchtitan_lite.checkpoint.format.description import Description
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.flattening import State, difference, flatten, refuse_piece
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_of
from torchtitan_lite.checkpoint.format.structure import Branch, decode_structure, encode_structure, rebuild
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.joint_plan import JointPlan
from torchtitan_lite.checkpoint.planning.rank_comparison import OWN_NAMES, RankComparison
from torchtitan_lite.checkpoint.planning.rank_entries import Divided, divided
from torchtitan_lite.checkpoint.planning.rank_file import ObjectItems, PlannedSave, RankPlan
from torchtitan_lite.checkpoint.planning.rank_summary import (
    HeldPart,
    Outlined,
    PlanAnswer,
    SectionAnswer,
    entries_of,
    outlined,
    parts_of,
)
from torchtitan_lite.checkpoint.planning.replicated import Replicated
from torchtitan_lite.checkpoint.planning.shared_items import SharedParts
from torchtitan_lite.checkpoint.state.optimizer_state import StateOwner
from torchtitan_lite.collection import no_collection
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.store import layout, rank_records

_Examined = tuple[Branch, list[tuple[Any, ...]]]
"""The containers of a state, and for each entry, in order, its name, and of a tensor what stays the same from save to
save: states of which both are equal are saved by the same plan."""


class _Verdict(enum.IntEnum):
    """One rank's answer to whether its plan still holds; the maximum over the ranks counts."""

    UNCHANGED = 0
    CHANGED = 1
    FAILED = 2


class PlanCache:
    """Plans saves, and keeps the last plan."""

    def __init__(
        self,
        peers: Peers,
        replicated: Replicated | None = None,
        comparison: RankComparison | None = None,
        *,
        states_of_ranks: Collection[str] = (),
        state_owner: StateOwner | None = None,
    ) -> None:
        self._peers = peers
        self._states_of_ranks = states_of_ranks
        """The states of which each rank has its own part, under its number."""
        self._state_owner = state_owner
        self._examined: _Examined | None = None
        self._replicated = replicated or Replicated()
        self._comparison = comparison or RankComparison(peers)
        self._contradiction: RanksDiffer | None = None
        """What the present plan leaves out: tensors of another shape than the lowest rank's of the same name."""
        self._odd_containers: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        """Of the present plan, as in `JointPlan`, on the coordinator."""
        self._object_items = ObjectItems()
        self._is_compared = False
        """Whether the values that must be the same were compared since the structure changed."""
        self._plan: RankPlan | None = None

    def plan(
        self,
        state: State,
        *,
        compares: bool = False,
        failure: Exception | None = None,
        numbers: Sequence[int] = (),
        is_save: bool = False,
        step: int = 0,
    ) -> PlannedSave:
        """Return the plan for `state`, of `step`, whose `file` is this rank's file. **Collective**.

        What fails on one rank is raised on every rank, as is a `failure` that it has already. A plan for a save or an
        image `compares` what must be the same on all ranks, too, for an `is_save` completely if the run watches its
        ranks, and `differs` if a checkpoint cannot have it. The maximum of `numbers` over all ranks comes back with the
        plan.
        """
        flat: State = {}
        examined: _Examined | None = None
        verdict = _Verdict.FAILED
        report = self._comparison.no_report() if compares else ()
        try:
            if failure is not None:
                raise failure
            faults.point("plan")
            flat, structure = flatten(state)
            examined = _examined(flat, structure, self._examined)
            is_known = self._plan is not None and examined is self._examined
            verdict = _Verdict.UNCHANGED if is_known else _Verdict.CHANGED
            if verdict is _Verdict.CHANGED:
                _prove(state, flat, structure)
            elif compares:
                report = self._comparison.report(flat, is_save=is_save)
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
            self._is_compared, reported = False, None
        differs = self._compare(state, flat, examined, reported, step) if compares else None
        assert self._plan is not None
        corruption = self._comparison.corruption if compares else ""
        flat |= self._owners
        return PlannedSave(self._plan, flat, self._object_items, tuple(agreed_numbers), differs, corruption)

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        """Begin to digest the state in a thread, so that the first save need not: see `RankComparison`. **Collective**.

        `get_state` may be collective, and raises on all ranks alike. Nothing is done if nothing is planned or shared.
        """
        if self._comparison.is_due:
            self._comparison.digest_alongside(flatten(get_state())[0])

    def _compare(
        self, state: State, flat: State, examined: _Examined, reported: Sequence[int] | None, step: int
    ) -> RanksDiffer | None:
        """Compare the ranks; where they differ, plan again so that all comes from the lowest. **Collective**."""
        if not self._is_compared:
            self._replicated.compare(state, flat, self._peers, self._odd_containers, self._owners)
            self._is_compared = True
        took_lowest = self._comparison.takes_lowest
        differs = self._comparison.settle(flat, reported, step)
        if self._comparison.takes_lowest and not took_lowest:
            self._plan_again(state, flat, examined)
        return self._contradiction or differs

    def _plan_again(self, state: State, flat: State, examined: _Examined) -> None:
        """Replace the plan; keep none if that fails, also not the old one. **Collective**."""
        self._plan = self._examined = None
        self._plan = self._make(state, flat, examined[0])
        self._examined = examined

    def _make(self, state: State, flat: State, structure: Branch) -> RankPlan:
        rank, world_size = self._peers.rank, self._peers.world_size
        has_record = world_size >= rank_records.FROM_RANKS
        states = self._states_of_ranks if has_record else ()

        def outlined_parts() -> tuple[Divided, Outlined]:
            parts = divided(parts_of(flat), flat, structure, states, rank)
            entries, meshes = entries_of(parts.joint, self._replicated.sameness(state), flat)
            return parts, outlined(entries, meshes, parts.structure)

        parts, own = self._peers.together(outlined_parts)
        joint = JointPlan(of_lowest=self._comparison.takes_lowest, state_owner=self._state_owner)
        with no_collection():  # The coordinator holds some objects for each rank.
            wanted = self._peers.scatter_answers(own.outline, joint.ask)
            answer = self._peers.scatter_answers(own.of(wanted), joint.answers)
        self._odd_containers, self._owners = joint.odd_containers, joint.owners
        kept, shared = own_part(parts.joint, own.sections, answer, world_size)
        self._comparison.use(shared, answer.num_groups, parts.joint)
        self._contradiction = RanksDiffer(answer.contradiction, OWN_NAMES) if answer.contradiction else None
        kept += [HeldPart(key) for key in joint.owners]
        plan = _rank_plan(rank, [*kept, *parts.own], joint.description, flat)
        if not has_record:
            return plan
        return dataclasses.replace(plan, own=parts.entries(rank, plan.parts, plan.layout))


@torch.no_grad()  # Where `local_of` returns the memory itself.
def _examined(flat: State, structure: Branch, last: _Examined | None) -> _Examined:
    """Return what is examined of `flat`: `last` itself, if that is the same. Raises as `_plan_dependencies`."""
    found = structure, [_plan_dependencies(key, value) for key, value in flat.items()]
    return last if last is not None and found == last else found


_TORCH_DTYPES = {*DTYPES.values()}


def _prove(state: State, flat: State, structure: Branch) -> None:
    """Raise TypeError unless `flat` and what the manifest stores of `structure` rebuild `state`."""
    again = rebuild(decode_structure(json.loads(json.dumps(encode_structure(structure)))), flat)
    if finding := difference(state, again, "state"):
        raise TypeError(f"{finding} in a checkpoint. Return dicts and lists of tensors and numbers from state_dict")


def _plan_dependencies(key: str, value: Any) -> tuple[Any, ...]:
    """Return the name of an entry and what of it the plan depends on.

    Raises TypeError for a tensor whose elements cannot be written as they lie in memory.
    """
    if not isinstance(value, torch.Tensor):
        return (key,)
    is_simple = type(value) in PLAIN_TENSORS and value.layout is torch.strided and value.dtype in _TORCH_DTYPES
    if is_simple and not value.is_nested and _has_memory(value) and not hasattr(value, "global_shape"):
        # Nearly all: the checks below take twice as long, for each of thousands at each save.
        return key, value.dtype, value.shape
    refuse_piece(key, value)
    local = local_of(value)
    if local.is_nested or (local.dtype not in _TORCH_DTYPES and not local.is_quantized):
        what = "nested tensor" if local.is_nested else f"tensor of {local.dtype}"
        raise TypeError(f"{key} is a {what}, which a checkpoint cannot hold. Return dense tensors of other dtypes.")
    if local.layout is not torch.strided or local.is_quantized or not _has_memory(local):
        raise TypeError(
            f"{key} is a {type(local).__name__} of layout {local.layout} on {local.device}, "
            "whose elements cannot be written as they lie. Return plain dense tensors from state_dict, or leave out "
            "what is frozen: --checkpoint.save_trained_only."
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


def _rank_plan(rank: int, parts: Sequence[HeldPart], description: Description | None, flat: State) -> RankPlan:
    tensors = [part for part in parts if part.dtype is not None]
    objects = [part.key for part in parts if part.dtype is None]
    volatile = {number for number, part in enumerate(tensors) if not _only_step_changes(part.key, flat)}
    file = FileLayout([(part.dtype, part.sizes) for part in parts if part.dtype is not None])
    return RankPlan(layout.data_file(rank, 0), tensors, objects, file, description, volatile)


def _only_step_changes(key: str, flat: State) -> bool:
    fqn = key.removeprefix("model.")
    # A scheduler may change a setting that is a tensor, such as lr.
    return key.startswith("optimizer.state.") or f"optimizer.param_groups.{fqn}.lr" in flat


def own_part(
    parts: Sequence[HeldPart], sections: Sequence[range], answer: PlanAnswer, world_size: int
) -> tuple[list[HeldPart], list[SharedParts]]:
    """Return what the `answer` has the rank write, in the order of its file (`JointPlan`), and what it shares.

    The rank has `parts`, in these `sections`.
    """
    decided = {*np.frombuffer(answer.kept, dtype=np.uint32).tolist()}
    kept: list[list[HeldPart]] = [[], [], []]
    by_pattern: dict[int, list[int]] = {}
    of_sections = [SectionAnswer(*pickle.loads(zlib.decompress(packed))) for packed in answer.sections]
    for answered, own in sorted(zip(of_sections, sections, strict=True), key=lambda pair: pair[0].first):
        of_own = zip(own, answered.is_decided, answered.patterns, strict=True)
        for number_of_all, (number, is_decided, pattern) in enumerate(of_own, answered.first):
            part = parts[number]
            if number_of_all in decided if is_decided else part.numel:
                is_cut = world_size >= LEAST_CHUNKS and part.is_cut
                kept[is_decided if is_cut else 2].append(_whole_if_empty(part))
            if pattern >= 0 and part.numel:
                by_pattern.setdefault(pattern, []).append(number)
    # By name: other ranks of the group may have them in another order.
    for of_pattern in by_pattern.values():
        of_pattern.sort(key=lambda number: parts[number].key)
    shared = [(member, by_pattern[member.pattern]) for member in answer.members if member.pattern in by_pattern]
    return [part for of_order in kept for part in of_order], shared


def _whole_if_empty(part: HeldPart) -> HeldPart:
    """Return `part` with all of its tensor, if that has no elements."""
    return part._replace(offsets=(0,) * len(part.shape), sizes=part.shape) if 0 in part.shape else part
