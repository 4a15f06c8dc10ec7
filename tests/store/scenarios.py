"""What is cut: operations on a folder, on a disk and in an object store alike. And what must hold after any crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.store.backend import Backend, Files, Seen
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage

SIZES = (5000, 900)
"""Bytes of each rank's file; one write takes 4096 at most."""
Act = Callable[[Backend], object]


@dataclass(frozen=True)
class Scenario:
    """An operation, after `before`."""

    before: Act
    act: Act
    after: tuple[int, ...]
    """The steps that a reader finds after it."""
    keeps: tuple[int, ...] = ()
    """Steps whose checkpoints must stay, complete, under any name."""
    exchanges: bool = True
    """Whether a disk swaps two names in one step."""


def save(backend: Backend, step: int, text: str, lineage: Lineage | None = None) -> None:
    """Save the files of two ranks as a run does."""
    backend.commit(backend.write(step, files_of(text), lineage=lineage))


def files_of(text: str) -> Files:
    """Return distinguishable bytes, none of them zero."""
    files = {
        layout.data_file(rank, 0): b"".join(f"{text}/{rank}:{at};".encode() for at in range(size // 8))[:size]
        for rank, size in enumerate(SIZES)
    }
    return {**files, layout.METADATA: b"DCP's description of " + text.encode()}


def nothing_yet(backend: Backend) -> None:
    backend.start()


def two(backend: Backend) -> None:
    backend.crowd()
    backend.start()
    save(backend, 1, "one")
    save(backend, 2, "two")


def three(backend: Backend) -> None:
    two(backend)
    save(backend, 3, "three")


def an_attempt_before(backend: Backend) -> None:
    two(backend)
    backend.write(2, files_of("an earlier attempt"))


def a_damaged_one(backend: Backend) -> None:
    two(backend)
    place, name = backend.open().get(2).path, layout.data_file(1, 0)
    backend.change(place, name, bytes(100) + files_of("two")[name][100:])


def a_branch_to_be(backend: Backend) -> None:
    backend.start()
    for step in (2, 4, 6):
        save(backend, step, f"old {step}")


def save_of(before: Act, step: int, after: tuple[int, ...], keeps: tuple[int, ...] = (), **about: Any) -> Scenario:
    """Return a complete save of `step`, of a branch if `about` has its `branch_point`."""
    lineage = Lineage("run0") if (point := about.pop("branch_point", None)) is None else Lineage("b2", None, point)

    def act(backend: Backend) -> None:
        written = backend.staged or backend.write(step, files_of("new"), lineage=lineage)
        backend.staged = None
        backend.commit(written)

    def written_before(backend: Backend) -> None:
        before(backend)
        backend.staged = backend.write(step, files_of("new"), lineage=lineage)

    return Scenario(written_before if about.pop("is_written", False) else before, act, after, keeps, **about)


def commit_of(before: Act, step: int, after: tuple[int, ...], keeps: tuple[int, ...] = (), **about: Any) -> Scenario:
    """Return the commit of a save whose files are written: to write them is the same in each save."""
    return save_of(before, step, after, keeps, is_written=True, **about)


def purging(step: int) -> Act:
    return lambda backend: backend.purge(backend.store.get(step))


def quarantining(step: int) -> Act:
    return lambda backend: backend.store.quarantine(step, ["block 0 of a file is not what was committed"])


def starting(backend: Backend) -> None:
    backend.start()


SAVES = {
    "first save": save_of(nothing_yet, 1, (1,)),
    "save next to older ones": save_of(two, 3, (1, 2, 3)),
    "replacement": save_of(two, 2, (1, 2)),
    "replacement after a cut attempt": commit_of(an_attempt_before, 2, (1, 2)),
    "branch": commit_of(a_branch_to_be, 3, (2, 3), (4, 6), branch_point=2),
    "branch that replaces": commit_of(a_branch_to_be, 4, (2, 4), (4, 6), branch_point=2),
}
OTHERS = {
    "purge": Scenario(three, purging(1), (2, 3)),
    "quarantine": Scenario(a_damaged_one, quarantining(2), (1,), keeps=(2,)),
    "start": Scenario(an_attempt_before, starting, (1, 2)),
}


@dataclass(frozen=True)
class Found:
    """What a reader finds after a crash."""

    seen: Seen
    findings: tuple[str, ...]
    """What is wrong in any case."""


@dataclass(frozen=True)
class Promise:
    """What a crash of an operation must leave: the state before it or after it, and all that is not to be removed."""

    old: Seen
    new: Seen
    theirs: object
    kept: Sequence[Files]
    had_leftovers: bool

    @classmethod
    def of(cls, scenario: Scenario, before: Backend) -> Promise:
        """Return the promise of `scenario`, whose state after it is not known yet."""
        old = before.seen()
        kept = [before.files(info.path) for info in before.open().intact() if info.step in scenario.keeps]
        assert len(kept) == len(scenario.keeps)
        kept += before.aside().values()
        for files in kept:
            files.pop(layout.MANIFEST, None)  # In an object store it names the attempt.
        return cls(old, old, before.foreign(), kept, bool(before.leftovers()))

    def kept_by(self, after: Backend, scenario: Scenario) -> Promise:
        """Return the complete promise, with the state after `scenario`, which no crash cut: it leaves nothing."""
        new = after.seen()
        assert tuple(new.steps) == scenario.after
        assert self.had_leftovers or not after.leftovers()
        return replace(self, new=new)

    def look(self, backend: Backend, cut_start: Callable[[], object] = lambda: None) -> Found:
        """Return what a reader finds in `backend`, which the next start must not change; `cut_start` may arm a fault.

        A start that is cut and the one after it change nothing for a reader, leave nothing, and touch nothing foreign.
        """
        seen, findings = backend.seen(), list[str]()
        backend.next_process()
        cut_start()
        try:
            backend.start()
        except backend.crash:
            if backend.seen() != seen:
                findings.append("a start that was cut changed what a reader finds")
            backend.next_process()
            backend.start()
        if backend.seen() != seen:
            findings.append("the start changed what a reader finds")
        if left := backend.leftovers():
            findings.append(f"the start left {left}")
        if backend.foreign() != self.theirs:
            findings.append("a foreign name was touched")
        if self.kept:
            there = [*backend.aside().values(), *(backend.files(info.path) for info in backend.open().intact())]
            findings += ["what is to be kept is nowhere" for kept in self.kept if not _has(there, kept)]
        return Found(seen, tuple(findings))

    def wrong(self, found: Found, *allowed: Seen) -> list[str]:
        """Return what is wrong with `found`, which must be one of `allowed`; without them, the old or the new state."""
        is_allowed = found.seen in (allowed or (self.old, self.new))
        return [*found.findings, *([] if is_allowed else [f"found {found.seen.in_words()}"])]


def _has(there: Sequence[Files], files: Files) -> bool:
    return any(files.items() <= each.items() for each in there)
