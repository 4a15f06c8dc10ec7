"""A folder over its complete life: every acknowledged save loads, after any events in any order.

Synchronous saves and saves with a later commit, a fault at any operation, damage, pins, removal by a policy, rolling
back to an earlier step, other numbers of ranks, a second writer, kills and starts. The store is real; the model is what
each rule says should be there, and a reader that checks every byte must find exactly that.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.store.backend import FULL, WEIGHTS, Backend, Fault, Files, Saved, There, Written
from tests.store.purges import to_purge
from torchtitan_lite.errors import CheckpointUnreadable, LeaseLost, SaveFailed
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import KeepLatest

ENDS = st.builds(Fault, st.integers(1, 28), st.integers(0, 5), st.integers(0, 999))
FAULTS = st.none() | ENDS
KINDS = st.sampled_from([FULL, FULL, FULL, WEIGHTS])
DAMAGE = st.sampled_from(["flip", "truncate", "delete", "zero"])
NUMBERS = st.integers(0, 9)


class Life(RuleBasedStateMachine):
    """One folder; `there` is what a reader must find in it. A subclass begins with its `backend`."""

    examples = loads = faults = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.there: There = {}
        self.unsynced: Sequence[There] = ()
        """What a power cut may leave: an operation failed after its renames, which nothing has synced since."""
        self.aside: dict[str, Files] = {}
        self.pinned: frozenset[int] = frozenset()
        self.staged: tuple[Saved, Written] | None = None
        self.lineage = Lineage("run0")
        self.known_good: set[int] = set()
        self.step = self.num_saves = self.num_runs = 0
        self.ranks = 2
        self.one_must_load = False

    def begin(self, backend: Backend) -> None:
        """Start the first job, in `backend`."""
        self.backend = backend
        self.theirs = backend.foreign()
        backend.start()

    @precondition(lambda self: self.staged is None)
    @rule(steps=st.integers(0, 2), kind=KINDS, fault=FAULTS)
    def save(self, steps: int, kind: CheckpointKind, fault: Fault | None) -> None:
        saved = self._next_save(steps, kind)
        self._commit(saved, lambda: self.backend.commit(self._write(saved)), fault)

    @precondition(lambda self: self.staged is None)
    @rule(steps=st.integers(0, 2), kind=KINDS)
    def stage(self, steps: int, kind: CheckpointKind) -> None:
        saved = self._next_save(steps, kind)
        self.staged = saved, self._write(saved)

    @precondition(lambda self: self.staged is not None)
    @rule(fault=FAULTS)
    def commit(self, fault: Fault | None) -> None:
        saved, written = self._take_staged()
        self._commit(saved, lambda: self.backend.commit(written), fault)

    @precondition(lambda self: self.staged is not None)
    @rule(fault=FAULTS)
    def fail(self, fault: Fault | None) -> None:
        _, written = self._take_staged()
        self._try(lambda: self.backend.store.remove_staging(written.step, written.place), [self.there], fault)

    @precondition(lambda self: self.staged is not None)
    @rule(passes=st.integers(0, 3))
    def commit_as_another_takes_over(self, passes: int) -> None:
        """The fence passes `passes` times, and raises at the next call if there is one."""
        saved, written = self._take_staged()
        before, outcome = self.there, self._outcome(saved)
        answers = itertools.count()

        def fence() -> None:
            if next(answers) >= passes:
                self.backend.refuse_changes()
                raise LeaseLost("the folder", "another")

        try:
            self.backend.commit(written, fence)
        except LeaseLost:
            self.backend.arm(None)
            assert self.backend.read() == self.there
            self.settled(self.step, saved, before, outcome, False)
        else:
            self.there = outcome
            self.settled(self.step, saved, before, outcome, True)
        self._restart(None)

    @precondition(lambda self: self.staged is not None)
    @rule()
    def commit_after_another_took_over(self) -> None:
        saved, written = self._take_staged()
        with pytest.raises(LeaseLost):
            self.backend.commit_late(written)
        assert self.backend.read() == self.there
        self.settled(self.step, saved, self.there, self._outcome(saved), False)
        self._restart(None)

    @precondition(lambda self: self.staged is None and self.there)
    @rule(which=NUMBERS, how=DAMAGE, file=NUMBERS)
    def corrupt(self, which: int, how: str, file: int) -> None:
        step = self._one_of(self.there, which)
        info = self.backend.open().get(step)
        # Without its manifest, what it abandons is unknown; other tests cover that.
        files = self.backend.files(info.path)
        names = sorted(name for name in files if name != layout.MANIFEST or not info.lineage.abandons)
        if not names:
            return
        name = names[file % len(names)]
        self.backend.change(info.path, name, damaged(files[name], how))
        found = self.backend.read()
        assert {**found, step: None} == {**self.there, step: None}
        assert step not in found or not found[step].is_sound
        self._adopt([found])
        self.one_must_load = self.one_must_load and how in ("truncate", "delete")

    @precondition(lambda self: self.staged is None)
    @rule(count=st.integers(1, 3), fault=FAULTS)
    def purge(self, count: int, fault: Fault | None) -> None:
        full = sorted(step for step, saved in self.there.items() if saved.kind is FULL and saved.has_its_sizes)
        latest_full = max((step for step, saved in self.there.items() if saved.kind is FULL), default=None)
        stay = {*full[-count:], *[step for step in full if step in self.known_good][-1:], *self.pinned}
        go = [step for step in full if step not in stay]
        before = self.there
        stages = [
            {step: saved for step, saved in before.items() if step not in go[:gone]} for gone in range(len(go) + 1)
        ]
        if self._try(lambda: self._purge(count), stages, fault):
            assert latest_full is None or latest_full in self.there

    @precondition(lambda self: self.there)
    @rule(step=NUMBERS, is_pinned=st.booleans())
    def pin(self, step: int, is_pinned: bool) -> None:
        self.pinned = self.backend.pin(*([step] if is_pinned else []), unpin=None if is_pinned else step)

    @precondition(lambda self: self.staged is None and self.there)
    @rule(which=NUMBERS, fault=FAULTS)
    def quarantine(self, which: int, fault: Fault | None) -> None:
        step = self._one_of(self.there, which)
        rest = {other: saved for other, saved in self.there.items() if other != step}
        self._try(lambda: self.backend.store.quarantine(step, ["a finding"]), [self.there, rest], fault)
        self._adopt([self.there])

    @precondition(lambda self: self.staged is None and self._latest_sound() is not None)
    @rule(which=NUMBERS)
    def roll_back(self, which: int) -> None:
        """Continue from a step as another run, whose first commit abandons what lies beyond it."""
        self.step = self._one_of([step for step, saved in self.there.items() if saved.kind is FULL and saved.is_sound],
                                 which)  # fmt: skip
        self._begin_run(self.step)
        self.known_good = {self.step}

    @rule(ranks=st.integers(1, 3), fault=FAULTS, end=ENDS)
    def start_again(self, ranks: int, fault: Fault | None, end: Fault) -> None:
        self.ranks = ranks
        self.backend.settle(end)
        self._adopt([self.there, *self.unsynced])
        self._restart(fault)

    @invariant()
    def a_reader_finds_what_was_committed(self) -> None:
        assert self.backend.read() == self.there
        assert self.backend.open().pins.read() == self.pinned

    @invariant()
    def one_loads_once_one_was_acknowledged(self) -> None:
        assert not self.one_must_load or self._latest_sound() is not None

    @invariant()
    def what_is_not_ours_or_no_longer_ours_is_untouched(self) -> None:
        assert self.backend.foreign() == self.theirs
        now = self.kept_aside()
        assert {name: now.get(name) for name in self.aside} == self.aside
        self.aside = now

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self._restart(None)
            self._restart(None)  # What was cut just now is kept for a day in an object store.
            self.a_reader_finds_what_was_committed()
            self.backend.close()

    def kept_aside(self) -> dict[str, Files]:
        """Return the files that were set aside. Findings of a job that was killed may be lost later."""
        return {
            place: {name: data for name, data in files.items() if name != layout.FINDINGS}
            for place, files in self.backend.aside().items()
        }

    def settled(self, step: int, saved: Saved, before: There, outcome: There, is_acknowledged: bool) -> None:
        """Take note of the end of a save of `step` that leads from `before` to `outcome`, or would have."""
        if is_acknowledged and saved.kind is FULL:
            self.known_good.add(step)
            self.one_must_load = True
        elif is_acknowledged:
            self.known_good.discard(step)
            self._adopt([self.there])

    def _commit(self, saved: Saved, act: Callable[[], object], fault: Fault | None) -> None:
        # A job that is killed continues at another step.
        step, before, outcome = self.step, self.there, self._outcome(saved)
        self.settled(step, saved, before, outcome, self._try(act, [before, outcome], fault))

    def _one_of(self, steps: Iterable[int], which: int) -> int:
        ordered = sorted(steps)
        return ordered[-1 - which % len(ordered)]

    def _next_save(self, steps: int, kind: CheckpointKind) -> Saved:
        self.step = max(1, self.step + steps)
        self.num_saves += 1
        text = f"save {self.num_saves} of rank "
        files = {layout.data_file(rank, 0): f"{text}{rank};".encode() * (5 + rank) for rank in range(self.ranks)}
        return Saved(self.lineage.run_id, kind, {**files, layout.METADATA: f"of {text}".encode()})

    def _write(self, saved: Saved) -> Written:
        return self.backend.write(self.step, saved.files, kind=saved.kind, lineage=self.lineage)

    def _take_staged(self) -> tuple[Saved, Written]:
        staged, self.staged = self.staged, None
        assert staged is not None
        return staged

    def _outcome(self, saved: Saved) -> There:
        point = self.lineage.branch_point
        stay = {step: other for step, other in self.there.items()
                if point is None or step <= point or other.run_id == saved.run_id}  # fmt: skip
        return stay | {self.step: saved}

    def _purge(self, count: int) -> None:
        committed = self.backend.store.committed()
        for info in to_purge(KeepLatest(count), committed, known_good=self.known_good, is_sound=self._has_its_sizes):
            self.backend.purge(info)

    def _has_its_sizes(self, info: CheckpointInfo) -> bool:
        return not self.backend.store.check_sizes(info)

    def _try(self, act: Callable[[], object], outcomes: Sequence[There], fault: Fault | None) -> bool:
        """Return whether `act` finished, with the last of `outcomes`; else with any, and continue as a run does."""
        self.backend.arm(fault)
        try:
            act()
        except (OSError, SaveFailed, CheckpointUnreadable) as error:
            assert fault is not None
            self.backend.check_error(error)
            self.backend.arm(None)
            self._adopt(outcomes)
            self.backend.remove_failed(self.step)
            is_dead = False
        except self.backend.crash:
            assert fault is not None
            self.backend.arm(None)
            self.backend.settle(fault)
            is_dead = True
        else:
            self.backend.arm(None)
            self.backend.deliver()
            self.there, self.unsynced = outcomes[-1], ()
            return True
        type(self).faults += 1
        self.backend.deliver()
        self._adopt(outcomes)
        if is_dead:
            self._restart(None)
        else:
            self.unsynced = outcomes
        return False

    def _adopt(self, outcomes: Sequence[There]) -> None:
        found = self.backend.read()
        assert found in outcomes
        self.there, self.unsynced = found, ()
        self.one_must_load = self.one_must_load and self._latest_sound() is not None

    def _restart(self, fault: Fault | None) -> None:
        """Recover as a new process, and load the latest undamaged checkpoint."""
        self.staged, self.known_good = None, set()
        self.backend.next_process()
        self._try(self.backend.start, [self.there], fault)
        self.backend.start()  # A leftover that could not be removed is a warning.
        assert not self.backend.leftovers()
        self._load()

    def _load(self) -> None:
        type(self).loads += 1
        expected = self._latest_sound()
        while (info := self.backend.store.latest()) is not None and not self.there[info.step].is_sound:
            aside = self.backend.store.quarantine(info.step, ["a byte is not what was committed"])
            assert layout.FINDINGS in self.backend.files(aside)
            self._adopt([{step: saved for step, saved in self.there.items() if step != info.step}])
        assert (info and info.step) == expected
        if info is None:
            self.step = 0
            self._begin_run(None)
            return
        self.step, self.lineage, self.known_good = info.step, replace(info.lineage, abandons=()), {info.step}
        if info.run_id in {run for other in self.backend.store.intact() for _, run in other.lineage.abandons}:
            # Later steps are abandoned under the id of that run: a run that continues here needs another id.
            self._begin_run(None)

    def _begin_run(self, branch_point: int | None) -> None:
        self.num_runs += 1
        self.lineage = Lineage(f"run{self.num_runs}", branch_point, branch_point)

    def _latest_sound(self) -> int | None:
        return max((step for step, saved in self.there.items() if saved.is_sound and saved.kind is FULL), default=None)


def damaged(data: bytes, how: str) -> bytes | None:
    """Return `data` after damage; None if it is gone."""
    middle = len(data) // 2
    # All saved bytes are ASCII, so a second flip does not undo the first.
    return {
        "delete": None,
        "truncate": data[:middle],
        "zero": bytes(len(data)),
        "flip": data[:middle] + bytes([data[middle] | 128]) + data[middle + 1 :],
    }[how]


def live(life: type[Life], examples: int, caplog: pytest.LogCaptureFixture) -> None:
    """Run the machine `life`, `examples` times."""
    caplog.set_level(logging.CRITICAL, "torchtitan_lite")
    life.examples = life.loads = life.faults = 0
    run_state_machine_as_test(life, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
    print(f"examples: {life.examples}, loads: {life.loads}, faults: {life.faults}")
    assert life.examples >= examples
