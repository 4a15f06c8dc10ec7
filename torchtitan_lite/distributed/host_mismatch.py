"""What the hosts of a job must have in common, and a sentence for each thing that they have not.

Each rank makes a `HostView`. One all-reduce of a few numbers says whether all fit, so a start of any number of ranks
costs no more than that. Only if they do not, rank 0's view goes to all, and each rank sends where it differs from that.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import xxhash

from torchtitan_lite import __version__
from torchtitan_lite.config.drift import shared_values
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.tried_torch import minor_version
from torchtitan_lite.errors import FolderNotShared, HostsDiffer
from torchtitan_lite.log import counted, logger

CLOCK_SECONDS = 60.0
"""From this difference on a clock is named: reports and the ages of checkpoints would be wrong."""
WRONG_CLOCK_SECONDS = 900.0
"""From here on stores refuse signed requests, and `keep_for_hours` removes checkpoints too early."""
_NONE = "(none)"
_MOST_PLACES = 4
_MOST_VALUES = 8

T = TypeVar("T")


class Kind(enum.Enum):
    """What a fact is about; the value is the fix where ranks differ in it."""

    VERSION = "Install one version on all hosts"
    BUILD = "Install one build on all hosts, or results may differ in the last bits"
    CONFIG = "Start all ranks with the same file and the same options"
    DATA = "Give all hosts the same files"
    TOKENS = "To make them once, name a folder that all hosts share in --training.tokens_folder"


_SUSPICIOUS = (Kind.BUILD, Kind.TOKENS)
"""What is only a warning: each host may have its own."""

Facts = Mapping[tuple[Kind, str], str]
"""Values that all ranks must have in common, by what they are about and their names."""


@dataclass(frozen=True)
class SharedFolder:
    """A folder of checkpoints as one rank sees it."""

    address: str
    mount: str
    identity: str
    """The same on all ranks that see the same one; empty where a rank does not see rank 0's."""


@dataclass(frozen=True)
class HostView:
    """What one rank knows of its host and its configuration."""

    facts: Facts = field(default_factory=dict)
    folders: Sequence[SharedFolder] = ()
    clock: tuple[float, float] = (0.0, 0.0)
    """Unix seconds between which one and the same moment was on all ranks: `clock_around`."""
    needs_clock: bool = False
    """Whether promises depend on clocks that agree to `WRONG_CLOCK_SECONDS`."""
    host: str = field(default_factory=platform.node)

    def numbers(self) -> tuple[int, ...]:
        """Return numbers of whose maxima over all ranks `_fit` decides; as many for each view."""
        same = [*sorted((kind.name, name, value) for (kind, name), value in self.facts.items())]
        digest = xxhash.xxh3_64_intdigest(repr(same).encode("utf-8", "surrogateescape")) >> 1
        before, after = self.clock
        return not all(each.identity for each in self.folders), digest, -digest, int(before * 1e3), -int(after * 1e3)

    def where_it_differs(self, expected: HostView) -> HostView:
        """Return this view with only those facts that are not `expected`."""
        own = {**dict.fromkeys(expected.facts, _NONE), **self.facts}
        others = {name: value for name, value in own.items() if value != expected.facts.get(name, _NONE)}
        return dataclasses.replace(self, facts=others)


def versions_and_config(config: JobConfig) -> Facts:
    """Return the versions and the configuration of this rank, without which ranks may not even exchange the rest."""
    values = {(Kind.CONFIG, key): value for key, value in shared_values(config).items()}
    torch_version = ".".join(map(str, minor_version(torch.__version__)))
    return {(Kind.VERSION, "torchtitan_lite"): __version__, (Kind.VERSION, "torch"): torch_version, **values}


def build_facts() -> Facts:
    """Return what may differ between hosts, with a warning."""
    return {(Kind.BUILD, "the build of torch"): torch.__version__}


def clock_around(exchange: Callable[[], object], now: Callable[[], float] = time.time) -> tuple[float, float]:
    """Return Unix seconds before and after `exchange`, which no rank leaves before all have entered it. **Collective**.

    So there is a moment that lies between the two on every rank: the clocks of ranks whose spans do not meet differ.
    """
    before = now()
    exchange()
    return before, now()


def alike(make: Callable[[], T], view: Callable[[T], HostView], peers: Peers) -> T:
    """Return what `make` returns on this rank, if the `view` of it fits those of all ranks. **Collective**.

    Without other ranks there is no view. Logs what is only suspicious. Raises on every rank: `FolderNotShared` if that
    is all, `HostsDiffer`, and what `make` or `view` raised on one.
    """
    if peers.world_size == 1:
        return make()
    mine, failure = HostView(), None
    try:
        own = make()
        mine = view(own)
    except Exception as error:
        failure = error
    # One exchange for both: a start of many ranks asks only once.
    has_failed, *maxima = peers.max_over_ranks(failure is not None, *mine.numbers())
    if has_failed:
        peers.raise_together(failure)
    if not _fit(*maxima):
        expected = peers.on_coordinator(lambda: mine)
        refused, suspicious = misfits(expected, peers.gather(mine.where_it_differs(expected)))
        for sentence in suspicious if peers.is_coordinator else ():
            logger.warning("%s", sentence)
        if refused:
            raise _hosts_error(refused, is_reported=peers.is_coordinator)
    return own


def misfits(expected: HostView, found: Sequence[HostView]) -> tuple[list[FolderNotShared | str], list[str]]:
    """Return what is refused, and what is only suspicious: a sentence for each thing in which ranks differ.

    `expected` is the view of rank 0; `found` has each rank's by rank, its facts only where they are others.
    """
    names = dict.fromkeys(name for view in found for name in view.facts)
    wrong = WRONG_CLOCK_SECONDS if expected.needs_clock else math.inf
    clocks = _of_clocks(expected, found)
    refused = [_of_fact(name, expected, found) for name in names if name[0] not in _SUSPICIOUS]
    refused = [*_first_sentences(refused), *(sentence for sentence, seconds in clocks if seconds >= wrong)]
    suspicious = [_of_fact(name, expected, found) for name in names if name[0] in _SUSPICIOUS]
    suspicious += [sentence for sentence, seconds in clocks if seconds < wrong]
    return [*_unseen(expected, found), *refused], suspicious


def _fit(unseen: int, digest: int, negative_digest: int, before: int, negative_after: int) -> bool:
    """Return whether all ranks fit, by the maxima of their numbers."""
    return not unseen and digest == -negative_digest and before + negative_after < CLOCK_SECONDS * 1e3


def _hosts_error(refused: Sequence[FolderNotShared | str], *, is_reported: bool) -> FolderNotShared | HostsDiffer:
    first = refused[0]
    alone = len(refused) == 1 and isinstance(first, FolderNotShared)
    error = first if alone and isinstance(first, FolderNotShared) else HostsDiffer([*map(str, refused)])
    error.reported_elsewhere = not is_reported
    return error


def _of_fact(name: tuple[Kind, str], expected: HostView, found: Sequence[HostView]) -> str:
    kind, words = name
    others = _places(
        _Seen(view.host, before=f"{view.facts[name]} on ") if name in view.facts else None for view in found
    )
    value = expected.facts.get(name, _NONE)
    return f"{words}: expected {value}, as rank 0 on {expected.host} has it, found {', '.join(others)}. {kind.value}."


def _first_sentences(sentences: list[str]) -> list[str]:
    left = len(sentences) - _MOST_VALUES
    return sentences if left <= 0 else [*sentences[:_MOST_VALUES], f"{counted(left, 'more value')}: not listed."]


def _unseen(expected: HostView, found: Sequence[HostView]) -> list[FolderNotShared]:
    """Return an error for each folder of checkpoints that some rank does not see."""
    errors = []
    for number, folder in enumerate(expected.folders):
        # Which folders there are is a fact, too: a rank may have fewer.
        of_ranks = [view.folders[number] if number < len(view.folders) else folder for view in found]
        blind = _places(
            None if each.identity else _Seen(view.host, after=f" ({each.address}{each.mount and f', {each.mount}'})")
            for view, each in zip(found, of_ranks, strict=True)
        )
        if blind:
            errors.append(FolderNotShared(folder.address, expected.host, blind, folder.mount))
    return errors


def _of_clocks(expected: HostView, found: Sequence[HostView]) -> list[tuple[str, float]]:
    """Return a sentence for the ranks of a host whose clock is another one, and the seconds by which it is at least."""
    most: dict[_Seen, float] = {}
    of_ranks: list[_Seen | None] = []
    for view in found:
        ahead, behind = view.clock[0] - expected.clock[1], expected.clock[0] - view.clock[1]
        seen = _Seen(view.host, after=" is ahead of" if ahead > behind else " is behind")
        differs = max(ahead, behind) >= CLOCK_SECONDS
        of_ranks.append(seen if differs else None)
        if differs:
            most[seen] = max(most.get(seen, 0.0), ahead, behind)
    return [
        (
            f"The clock of {place} that of rank 0 on {expected.host} by {seconds:.0f} s, expected less than "
            f"{CLOCK_SECONDS:.0f} s. Synchronise the clocks of all hosts (NTP).",
            seconds,
        )
        for place, seconds in zip(_places(of_ranks, most=len(found)), most.values(), strict=True)
    ]


class _Seen(NamedTuple):
    """What a rank of `host` sees, in words that stand around those for the rank."""

    host: str
    before: str = ""
    after: str = ""


def _places(of_ranks: Iterable[_Seen | None], most: int = _MOST_PLACES) -> list[str]:
    """Return in words which ranks see something, those together that see the same."""
    ranks_in: dict[_Seen, list[int]] = {}
    for rank, seen in enumerate(of_ranks):
        if seen is not None:
            ranks_in.setdefault(seen, []).append(rank)
    places = [f"{seen.before}{_ranks_text(ranks)} on {seen.host}{seen.after}" for seen, ranks in ranks_in.items()]
    left = len(places) - most
    return places if left <= 0 else [*places[:most], f"{counted(left, 'more place')}"]


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{counted(len(ranks), 'rank')} from rank {ranks[0]}"
