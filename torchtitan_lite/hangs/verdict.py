"""Which rank hangs, from what every rank's watcher found, and the text that names it. Values only.

When one rank hangs, all others soon wait for it in a collective, and no step of theirs ends either. So the evidence
comes in an order, from what only the cause can show to what a rank that waits may show, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_FRAMES = 12
"""Of a stack, in the text."""
MOST_STACKS = 8
_INNERMOST = 3
"""Frames in which a rank that waits shows torch's collectives. All of a pipeline's frames are below a part of it."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True)
class Evidence:
    """What the watcher of one rank found about it."""

    rank: int
    host: str
    pid: int
    step: int
    """The step that it is in."""
    seconds: float
    """For how long it has been in it; 0 in a pause, such as a save, and right after one."""
    is_stopped: bool = False
    """Whether the system shows the process as stopped."""
    answers: bool = True
    """Whether a thread of it ran Python within a second."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """How many collectives it has begun, by the name of their group."""
    stack: Sequence[str] = ()
    """The frames of the main thread, innermost first."""

    @property
    def waits(self) -> bool:
        """Whether the main thread is in a collective."""
        innermost = self.stack[:_INNERMOST]
        return any("distributed/" in frame and "algorithms/_checkpoint" not in frame for frame in innermost)


@dataclass(frozen=True)
class HangVerdict:
    """The ranks that hang, and how that is known."""

    ranks: tuple[int, ...]
    reason: str


def judge(found: Sequence[Evidence], *, silent: Sequence[int] = ()) -> HangVerdict | None:
    """Return which ranks hang; None if the others wait for one that is in a pause, and which is to end by itself.

    `silent` are ranks whose watchers were there and do not answer any more.
    """
    if stopped := [each for each in found if each.is_stopped]:
        return _verdict_of_ranks(stopped, "is stopped (SIGSTOP, or a debugger)")
    if any(not each.seconds for each in found):
        return None
    held = [each for each in found if not each.answers]
    if held and (len(held) < len(found) or len(found) == 1):
        return _verdict_of_ranks(held, "runs no Python: a call in C holds the GIL, or the system does not return")
    if silent:
        return HangVerdict(tuple(silent), "is silent, and so is its watcher: its host may be down")
    if behind := _behind(found):
        return _verdict_of_ranks(behind, "has begun fewer collectives than ranks that wait for it")
    working = [each for each in found if not each.waits]
    if working and len(working) < len(found):
        return _verdict_of_ranks(working, "is in no collective, and the others wait in one")
    return _verdict_of_ranks(
        found, "does not progress" if len(found) == 1 else "may hang, or wait for another one that does"
    )


def report(verdict: HangVerdict, found: Sequence[Evidence]) -> str:
    """Return the lines that name the ranks of `verdict`, with the stack of each."""
    by_rank = {each.rank: each for each in found}
    lines = []
    for rank in verdict.ranks[:MOST_STACKS]:
        lines += _lines_of(by_rank.get(rank), rank, verdict.reason)
    if len(verdict.ranks) > MOST_STACKS:
        lines.append(f"So does each of {len(verdict.ranks) - MOST_STACKS} more ranks")
    seconds = max(each.seconds for each in found)
    return "\n".join([*lines, f"No step ended for {seconds:.1f} s; all ranks are killed, for the launcher to start"])


def frames_of(dump: str) -> tuple[str, ...]:
    """Return the frames in a `dump` of faulthandler, innermost first, each as "file:line in name"."""
    frames = (_FRAME.match(line) for line in dump.splitlines())
    return tuple(f"{each['file']}:{each['line']} in {each['function']}" for each in frames if each)


def _behind(found: Sequence[Evidence]) -> list[Evidence]:
    """Return the ranks that others wait for and that wait for none: behind in one group, and ahead in no group.

    One that waits for a rank in one of its groups is behind in the others.
    """
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for each in found:
        for group, count in each.collectives.items():
            most[group] = max(count, most.get(group, count))
            least[group] = min(count, least.get(group, count))
    behind = [each for each in found if any(count < most[group] for group, count in each.collectives.items())]
    return [each for each in behind if all(count == least[group] for group, count in each.collectives.items())]


def _verdict_of_ranks(ranks: Sequence[Evidence], reason: str) -> HangVerdict:
    return HangVerdict(tuple(each.rank for each in ranks), reason)


def _lines_of(found: Evidence | None, rank: int, reason: str) -> list[str]:
    if found is None:
        return [f"Rank {rank} hangs:", f"  it {reason}"]
    stack = found.stack[:MOST_FRAMES] or ("no Python: it did not answer the signal",)
    return [
        f"Rank {rank} hangs in step {found.step}:",
        f"  it {reason}",
        f"  host {found.host}, process {found.pid}; last calls, innermost first:",
        *(f"    {'/'.join(frame.split('/')[-3:])}" for frame in stack),
    ]
