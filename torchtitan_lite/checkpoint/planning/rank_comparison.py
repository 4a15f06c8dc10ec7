"""Whether the ranks that hold one parameter, or one optimizer state, hold the same values of it.

A checkpoint has one value of each name, and a plan spreads the names over the ranks that hold them. Where these ranks
differ (experts or pipeline stages under equal names, averages that are due, a forgotten DDP) that would be a state that
no rank ever had. So each rank digests all that it shares once a start: alongside the training after the first
step, or in the first save if that comes earlier or has no copies. Every save and image compares what is small and a
sample of the rest, within the exchange of the plan. Where ranks differ, all comes from the lowest rank of each group
of holders from then on: by the last bits, as reductions in no fixed order give them, with one warning; by more, with
`RanksDiffer`.

A run that watches (`digest_tensors` with "ranks") digests all of it again for every save. Once its ranks were equal,
one bit is a difference: a machine or a kernel has changed it, and `RanksDiffer` names where. It digests the live
tensors in the thread that trains: the answer has to come before the save does.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
import xxhash

from torchtitan_lite.checkpoint.format.file_data import elements_digest
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_of
from torchtitan_lite.checkpoint.planning.distances import Distance, joint_distances, relative, squares
from torchtitan_lite.checkpoint.planning.rank_summary import HeldPart
from torchtitan_lite.checkpoint.planning.shared_items import Member, SharedParts
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.disk.threads import in_a_thread, in_threads
from torchtitan_lite.distributed.environment import cores_of_rank
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.log import counted, logger

SMALL_BYTES = 1 << 8
"""Items up to this size are compared at each save: 1,000 take 0.6 ms, where a sample of each would take 5."""
SAMPLED_ITEMS = 64
"""Larger items of a group that a save samples; where there are more, each save takes others."""
OWN_NAMES = (
    "If each rank has its own (experts, stages of a pipeline), give it a name of its own there, as in "
    'nn.ModuleDict({f"rank{rank}": module}), and make the optimizer of that'
)
OTHER_WAYS = (
    "If they are averaged now and then, average parameters and optimizer states before the save. If the lowest rank's "
    "are meant, give the manager ranks_may_differ=True; if one rank keeps each optimizer state, state_owner"
)
AFTER_CORRUPTION = (
    "They were equal before, so memory, a link or a kernel has changed bits. Take the host that is named out of the "
    "job, test it, and start again: the run continues from the latest step whose ranks were equal"
)
DIGESTING_THREADS = 2
"""Of a rank, at most: one reads half as fast as the memory gives."""
PIECE_BYTES = 16 << 20
"""Bytes of a tensor that are copied at once where it has to be copied: off an accelerator, to another rank."""

_NONE = -(1 << 62)
"""What a rank reports for a group that it is not in: below every digest and every negative one."""


class _Group(NamedTuple):
    """What this rank shares with the other ranks of a group."""

    shared: Member
    keys: Sequence[str]
    small: Sequence[Sequence[str]]
    """Those of up to `SMALL_BYTES`, of one dtype and shape together."""
    large: Sequence[str]


class RankComparison:
    """Compares what ranks share. With `may_differ` it compares nothing, and all comes from the lowest ranks."""

    def __init__(self, peers: Peers, *, may_differ: bool = False, watches: bool = False) -> None:
        self._peers = peers
        self._may_differ, self._watches = may_differ, watches
        self.takes_lowest = may_differ
        """Whether all that ranks share comes from the lowest rank of each group. The same on all ranks."""
        self._groups: list[_Group] = []
        self._num_groups = 0
        self._num_compared = 0
        """Counts the exchanges, so that all ranks sample the same items."""
        self._is_complete = False
        """Whether all that is shared was compared in this start, not only samples."""
        self._has_warned = False
        self._equal_at = self._equal_in_full_at = ""
        """Where the ranks were last equal, in what is small and in all."""
        self.corruption = ""
        """Where ranks differ that were equal before, as the last `settle` found; empty if they are equal. The same on
        all ranks."""
        self._digesting: Future[list[int]] | None = None
        forget_in_children(self._forget)

    def use(self, shared: Sequence[SharedParts], num_groups: int, parts: Sequence[HeldPart]) -> None:
        """Compare `shared` from now on, of the `parts` of this rank's new plan. Any rank."""
        self.wait()
        self._digesting = None
        if not self._may_differ:
            self._num_groups = num_groups
            self._groups = [_divided(member, [parts[at] for at in numbers]) for member, numbers in shared]

    @property
    def is_due(self) -> bool:
        """Whether there is something to digest that was not digested in this start. The same on all ranks."""
        return self._num_groups > 0 and not (self._is_complete or self._watches) and self._digesting is None

    def digest_alongside(self, flat: State) -> None:
        """Begin to digest in a thread all of `flat` that is shared, which must not change before `wait` returned.

        Any rank.
        """
        ready = _events(flat)
        future: Future[list[int]] = Future()
        self._digesting = future

        def work() -> None:
            try:
                for event in ready:
                    event.synchronize()
                future.set_result(self._complete_digests(flat))
            except BaseException as error:
                future.set_exception(error)

        # In a thread, once a start: to digest 2 GB takes 0.11 s (by hand, two ranks), too long for every save.
        in_a_thread("compare ranks", work)

    def wait(self) -> None:
        """Wait until the state may change, as far as digests go. Any rank."""
        if self._digesting is not None:
            self._digesting.exception()

    def no_report(self) -> tuple[int, ...]:
        """Return what a rank reports that has nothing to compare: as many numbers as `report` returns."""
        return (_NONE,) * (2 * self._num_groups)

    def report(self, flat: State, *, is_save: bool = False) -> tuple[int, ...]:
        """Return two numbers a group, of which the maximum over the ranks counts: a digest, and minus it.

        It is one of what is small and a sample of the rest.

        Until all was compared, and for a save of a run that watches, it is one of everything. Any rank.
        """
        numbers = [*self.no_report()]
        is_complete = self._is_complete and not (is_save and self._is_watching)
        complete = [] if is_complete else self._digests_of_all(flat)
        for at, group in enumerate(self._groups):
            compared = [*_stacked(flat, group.small), *self._sampled(flat, group.shared, group.large)]
            digest = xxhash.xxh3_64(_joined_bytes(compared).numpy().data)
            if complete:
                digest.update(complete[at].to_bytes(8, "big"))
            # Two bits shorter, so that its negative, too, is above `_NONE`.
            number = digest.intdigest() >> 2
            # One all-reduce max shows whether all are equal: the maxima of d and of -d are opposite only then.
            first = 2 * group.shared.group
            numbers[first : first + 2] = number, -number
        return tuple(numbers)

    def settle(self, flat: State, highest: Sequence[int] | None, step: int) -> RanksDiffer | None:
        """Return what is wrong with `flat`, of `step`, None if a checkpoint can have it. **Collective**.

        `highest` are the maxima of the reports of all ranks; None: they report here. Warns, on the coordinator, the
        first time that ranks differ by rounding.
        """
        if not self._num_groups:
            return None
        if highest is None:
            highest = self._peers.max_over_ranks(*self._peers.together(lambda: self.report(flat, is_save=True)))
        found = None
        self.corruption = ""
        differing = {at // 2 for at in range(0, len(highest), 2) if _NONE < highest[at] != -highest[at + 1]}
        if differing and self._is_complete and self._is_watching:
            _, self.corruption = self._compared(self._by_place(flat, only_samples=False), in_words=True)
            found = RanksDiffer(self.corruption, AFTER_CORRUPTION) if self.corruption else None
        elif differing:
            found = self._looked_at(flat)
        else:
            self._note_equal(step)
        self._num_compared += 1
        self._is_complete, self._digesting = True, None
        return found

    def _note_equal(self, step: int) -> None:
        self._equal_at = f"step {step}"
        if not self._is_complete or self._is_watching:
            # Digests of an earlier moment do not say whether all is equal at this one.
            self._equal_in_full_at = "the first step of this start" if self._digesting is not None else self._equal_at

    def _since(self, differing: Mapping[tuple[int, int], tuple[str, torch.Tensor]]) -> str:
        """Return when what differs was equal; empty if no save of this start has compared it."""
        if all(tensor.nbytes <= SMALL_BYTES for _, tensor in differing.values()):
            return self._equal_at and f", equal at {self._equal_at}"
        return self._equal_in_full_at and (
            f", equal at {self._equal_in_full_at}; of large tensors later saves compare samples, so a checkpoint since "
            "then may have the difference"
        )

    @property
    def _is_watching(self) -> bool:
        # Ranks that differ by rounding are never equal in each bit.
        return self._watches and not self._has_warned

    def _compared(
        self, tensors: Mapping[Place, tuple[str, torch.Tensor]], *, in_words: bool
    ) -> tuple[list[Place], str]:
        """Return which of this rank's `tensors` differ between ranks, and where, `in_words`. **Collective**."""

        def digests() -> Holdings:
            # Thousands of names, and a text of them for each rank, only where someone reads it.
            found = {at: (key if in_words else "", elements_digest(tensor)) for at, (key, tensor) in tensors.items()}
            return platform.node(), found

        answer = partial(disagreements, in_words=in_words)
        return self._peers.scatter_answers(self._peers.together(digests), answer)

    def _looked_at(self, flat: State) -> RanksDiffer | None:
        """Find out which items differ, and how much. **Collective**."""
        only_samples = self._has_warned
        tensors = self._by_place(flat, only_samples=only_samples)
        differing = {place: tensors[place] for place in sorted(self._compared(tensors, in_words=False)[0])}
        if not self._peers.max_over_ranks(len(differing))[0]:
            # Digests were of another moment: a loop changed the state meanwhile.
            return None
        samples = {
            place: (key, _sampled_elements(tensor, PIECE_BYTES // 256)) for place, (key, tensor) in differing.items()
        }
        found, is_far = self._peers.scatter_answers(self._distances(samples), joint_distances)
        if not is_far and not only_samples:
            found, is_far = self._peers.scatter_answers(self._distances(differing), joint_distances)
        self.takes_lowest = True
        since = self._since(differing)
        if is_far:
            return RanksDiffer(f"{found}{since}", f"{OWN_NAMES}. {OTHER_WAYS}")
        if not self._has_warned and self._peers.is_coordinator:
            logger.warning(
                "Ranks hold slightly different values of %s%s. From now on all parameters and optimizer states that "
                "ranks share are saved from the lowest rank that has them. Reductions in no fixed order can be the "
                "cause",
                found,
                since,
            )
        self._has_warned = True
        return None

    def _by_place(self, flat: State, *, only_samples: bool) -> dict[tuple[int, int], tuple[str, torch.Tensor]]:
        """Return name and memory of each item that this rank shares, or samples of some, by group and number in it."""
        found: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
        for shared, keys, *_ in self._groups:
            chosen = self._chosen(keys) if only_samples else range(len(keys))
            tensors = self._sampled(flat, shared, keys) if only_samples else [_local_memory(flat[key]) for key in keys]
            found |= {(shared.group, at): (keys[at], tensor) for at, tensor in zip(chosen, tensors, strict=True)}
        return found

    def _distances(self, tensors: Mapping[tuple[int, int], tuple[str, torch.Tensor]]) -> list[Distance]:
        """Return the distances of this rank's `tensors` from those of the lowest ranks. **Collective**.

        In each group the lowest rank's values go from rank to rank, so no rank sends more than its own.
        """
        groups = {each.shared.group: each.shared for each in self._groups}
        found = []
        # In the same order everywhere, so no two ranks wait in turn.
        for (group, _), (key, tensor) in tensors.items():
            shared = groups[group]
            total = [0.0, 0.0, 0.0]
            for piece in _host_pieces(tensor):
                theirs = self._peers.pass_on(piece, shared.previous, shared.next)
                if shared.previous is not None:
                    total = [a + b for a, b in zip(total, squares(piece, theirs, tensor.dtype), strict=True)]
            if shared.previous is not None:
                found.append(Distance(key, shared.lowest, self._peers.rank, relative(*total)))
        return found

    def _digests_of_all(self, flat: State) -> list[int]:
        if self._digesting is not None and self._digesting.exception() is None:
            return self._digesting.result()
        return self._complete_digests(flat)

    def _complete_digests(self, flat: State) -> list[int]:
        """Return a digest a group, of all that this rank shares."""
        digests = []
        for group in self._groups:
            of_items = _elements_digests([_local_memory(flat[key]) for key in group.keys])
            digests.append(xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "big") for each in of_items)))
        return digests

    def _chosen(self, keys: Sequence[str]) -> range:
        every = max(1, -(-len(keys) // SAMPLED_ITEMS))
        return range(self._num_compared % every, len(keys), every)

    def _sampled(self, flat: State, shared: Member, keys: Sequence[str]) -> list[torch.Tensor]:
        chosen = self._chosen(keys)
        num_bytes = shared.sample_bytes // max(1, len(chosen))
        return [_sampled_elements(_local_memory(flat[keys[at]]), num_bytes) for at in chosen]

    def _forget(self) -> None:
        """Wait for no thread, in a child that was just forked: it belongs to its parent."""
        self._digesting = None


def _divided(shared: Member, parts: Sequence[HeldPart]) -> _Group:
    small: dict[object, list[str]] = {}
    large: list[str] = []
    for part in parts:
        assert part.dtype is not None, "only tensors are shared"
        is_small = part.numel * part.dtype.itemsize <= SMALL_BYTES
        (small.setdefault((part.dtype, part.sizes), []) if is_small else large).append(part.key)
    return _Group(shared, [part.key for part in parts], [*small.values()], large)


@torch.no_grad()
def _stacked(flat: State, small: Sequence[Sequence[str]]) -> Iterator[torch.Tensor]:
    """Yield what is `small`, those of one shape in one tensor: a call for each would take most of the time."""
    for keys in small:
        values = [flat[key] for key in keys]
        if not {*map(type, values)} <= {*PLAIN_TENSORS}:
            values = [*map(_local_memory, values)]
        devices = [value.device for value in values]
        for device in dict.fromkeys(devices):
            of_device = [value for value, its in zip(values, devices, strict=True) if its == device]
            yield torch.stack(of_device).resolve_conj().resolve_neg()


def _local_memory(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `value`."""
    return local_of(value).detach().resolve_conj().resolve_neg()


def _events(flat: State) -> list[torch.cuda.Event]:
    """Return an event for each device with some of `flat`, which is over when what it computes now is."""
    tensors = (value for value in flat.values() if isinstance(value, torch.Tensor))
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of an element: strides and `take` work on them, whatever the dtype."""


_LINE_BYTES = 64


def _sampled_elements(memory: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return elements of `memory` at even distances, about `num_bytes` of them and at least one.

    Where it is contiguous, as many next to each as a line of the processor's cache has: they cost nothing more.
    """
    if memory.is_contiguous():
        run = max(1, _LINE_BYTES // memory.element_size())
        if memory.numel() <= run:
            return memory.reshape(-1)
        return memory.reshape(-1).unfold(0, run, max(run, -(-memory.numel() // max(1, num_bytes // _LINE_BYTES))))
    step = max(1, -(-memory.numel() * memory.element_size() // max(num_bytes, memory.element_size())))
    if (word := _WORDS.get(memory.element_size())) is None:
        return memory.reshape(-1)[::step]
    at = torch.arange(0, memory.numel(), step, device=memory.device)
    # Without the copy of all of it that reshape makes.
    return torch.take(memory.view(word), at).view(memory.dtype)


def _joined_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of `tensors`, one after another, in the host's memory."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(_as_bytes(tensor))
    return torch.cat([torch.cat(of_device).cpu() for of_device in by_device.values()])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _host_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of `tensor` in pieces in the host's memory."""
    for piece in torch.split(_as_bytes(tensor), PIECE_BYTES):
        yield piece.cpu()


def _elements_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each of `tensors`, several at a time."""
    digests = [0] * len(tensors)

    def digest(at: int) -> None:
        digests[at] = elements_digest(tensors[at])

    in_threads(range(len(tensors)), min(DIGESTING_THREADS, cores_of_rank()), lambda: digest)
    return digests


# Which ranks hold other values than the rest: the minority of three holders or more, and of two both. Pure.


Place = tuple[int, int]
"""A group of ranks that hold the same things, and the number of one of these."""
Holdings = tuple[str, Mapping[Place, tuple[str, int]]]
"""The host of a rank, and the name and digest of each thing that it holds."""

_SHOWN = 3


def disagreements(per_rank: Sequence[Holdings], *, in_words: bool) -> list[tuple[list[Place], str]]:
    """Return for each rank the places among its own where ranks hold different things, and a text for all of them.

    It has the ranks, their hosts and what they hold otherwise, and is empty if all is equal, or if not `in_words`.
    """
    holders: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    names: dict[Place, str] = {}
    for rank, (_, held) in enumerate(per_rank):
        for place, (name, digest) in held.items():
            names[place] = name
            holders[place][digest].append(rank)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    differing = {place: by_digest for place, by_digest in holders.items() if len(by_digest) > 1}
    for place, by_digest in differing.items() if in_words else ():
        found[_minority(list(by_digest.values()))].append(names[place])
    text = "; ".join(_disagreement_text(odd, rest, named, per_rank) for (odd, rest), named in sorted(found.items()))
    return [([place for place in held if place in differing], text) for _, held in per_rank]


def _minority(alike: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that are outvoted, and those that are not; all and none where no value has the majority."""
    *others, most = sorted(alike, key=len)
    if len(most) <= sum(map(len, others)):
        return tuple(sorted(rank for ranks in alike for rank in ranks)), ()
    return tuple(sorted(rank for ranks in others for rank in ranks)), tuple(sorted(most))


def _disagreement_text(
    odd: Sequence[int], rest: Sequence[int], names: Sequence[str], per_rank: Sequence[Holdings]
) -> str:
    ranks = ", ".join(f"rank {rank} on {per_rank[rank][0]}" for rank in odd)
    more = f" and {counted(len(names) - _SHOWN, 'other tensor')}" if len(names) > _SHOWN else ""
    what = ", ".join(names[:_SHOWN]) + more
    if not rest:
        return f"{ranks} hold different values of {what}, and none has the majority"
    return f"{ranks} {'holds' if len(odd) == 1 else 'hold'} another {what} than {counted(len(rest), 'other rank')}"
