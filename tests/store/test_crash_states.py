"""Every folder that a crash may leave: during a save, a replacement, a removal, a quarantine, a start.

Each is recorded on a disk that keeps what was synced and loses any part of the rest (recording.py). Whatever it lost,
whenever: a reader finds the old state or the new one, bit for bit and with the right digests, and after the operation
returned, only the new one.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.examples import mostly_slow
from tests.store.backend import Fault, Seen
from tests.store.crashing import Cut
from tests.store.disk_backend import ERROR, DiskBackend
from tests.store.filled import without_token
from tests.store.recording import Disk, Event, Leaf, Lost, Renaming, Sync, Tree, lay_out
from tests.store.scenarios import (
    OTHERS,
    SAVES,
    Found,
    Promise,
    Scenario,
    a_branch_to_be,
    commit_of,
    purging,
    quarantining,
    save,
    starting,
    three,
    two,
)
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage

ROOT = "checkpoint"


def one_in_the_way(disk: DiskBackend) -> None:
    two(disk)
    (disk.root / layout.step_dir(3)).mkdir()
    (disk.root / layout.step_dir(3) / layout.METADATA).write_bytes(b"theirs")


def all_leftovers(disk: DiskBackend) -> None:
    three(disk)
    one, replaced = disk.root / layout.step_dir(1), disk.root / layout.replaced_dir(2, 1)
    (disk.root / layout.step_dir(2)).rename(replaced)
    shutil.copytree(one, disk.root / layout.replaced_dir(1, 1))
    shutil.copytree(one, disk.root / layout.trash_dir(3, 1))
    shutil.copytree(replaced, disk.root / layout.staging_dir(2, "1"))


def a_branch_half_made(disk: DiskBackend) -> None:
    """Prepare the state after a crash between the commit of step 3 and the renames of what it abandons."""
    a_branch_to_be(disk)
    save(disk, 3, "new", Lineage("b2", None, 2))
    for step in (4, 6):
        (disk.root / layout.aside_dir(step, "abandoned-run0")).rename(disk.root / layout.step_dir(step))


ON_DISK = SAVES | {
    "replacement, no exchange": commit_of(two, 2, (1, 2), exchanges=False),
    "branch that replaces, no exchange": commit_of(a_branch_to_be, 4, (2, 4), (4, 6), branch_point=2, exchanges=False),
    "save over what is not ours": commit_of(one_in_the_way, 3, (1, 2, 3)),
    "replacement after a crash": commit_of(all_leftovers, 2, (1, 2, 3)),
}
SCENARIOS = {
    **ON_DISK,
    **OTHERS,
    "purge with leftovers": Scenario(all_leftovers, purging(1), (2, 3)),
    "purge of a branch half made": Scenario(a_branch_half_made, purging(3), (2,), (4, 6)),
    "quarantine of a branch half made": Scenario(a_branch_half_made, quarantining(3), (2,), (4, 6)),
    "start after a branch half made": Scenario(a_branch_half_made, starting, (2, 3), (4, 6)),
    "start after all": Scenario(all_leftovers, starting, (1, 2, 3)),
}


@dataclass
class Recording:
    """The operations of a scenario, and what a reader finds before and after."""

    scenario: Scenario
    start: Disk
    log: list[Event]
    promise: Promise

    @classmethod
    def of(cls, scenario: Scenario, base: Path) -> Recording:
        prepared = DiskBackend(base, durable=Cut())
        scenario.before(prepared)
        promise = Promise.of(scenario, prepared)
        disk = DiskBackend(base, exchanges=scenario.exchanges)
        disk.staged, recorder = prepared.staged, disk.recorder
        scenario.act(disk)
        return cls(scenario, recorder.start, at_the_same_time(recorder.log), promise.kept_by(disk, scenario))


def at_the_same_time(log: Sequence[Event]) -> list[Event]:
    """Return `log` with the operations of the ranks on their files in turns, not one rank after another."""
    of_ranks: dict[int, list[Event]] = {}
    first, others = len(log), []
    for at, event in enumerate(log):
        created = [node for name, node in getattr(event, "named", ()) if layout.is_data_file(name)]
        node = created[0] if created else event.node
        if created or node in of_ranks:
            of_ranks.setdefault(node, []).append(event)
            first = min(first, at)
        else:
            others.append((at, event))
    in_turns = [event for turn in itertools.zip_longest(*of_ranks.values()) for event in turn if event is not None]
    before, after = ([event for at, event in others if (at < first) is early] for early in (True, False))
    return [*before, *in_turns, *after]


@dataclass
class Tally:
    """Crash states that were checked, and what was wrong with each."""

    states: int = 0
    failures: list[str] = field(default_factory=list)

    def report(self, what: str) -> None:
        print(f"{what}: {self.states}, failures: {len(self.failures)}")
        assert not self.failures, "\n".join(self.failures[:20])


class Examiner:
    """Builds each state once, starts in it as the next job does, cut and again, and returns what a reader finds."""

    def __init__(self, base: Path, promise: Promise, tally: Tally) -> None:
        self._base, self._promise, self._tally = base, promise, tally
        self._found: dict[frozenset[tuple[str, Leaf]], Found] = {}

    def look(self, tree: Tree) -> Found:
        key = frozenset(tree.items())
        if key not in self._found:
            self._tally.states += 1
            lay_out(tree, self._base / "state")
            try:
                # The start is cut as well, by turns at each of its operations and at none.
                turn, number = divmod(self._tally.states, 12)
                cut = Cut(1 + number, power=turn % 2 == 1)
                self._found[key] = self._promise.look(DiskBackend(self._base / "state", durable=cut))
            finally:
                shutil.rmtree(self._base / "state")
        return self._found[key]


def crashes(start: Disk, log: Sequence[Event]) -> Iterator[tuple[int, Disk, Lost]]:
    """Yield, for each number of events done, the disk then and each loss that a crash may cause; first, none."""
    disk = start.copy()
    for done in range(len(log) + 1):
        if done:
            disk.do(log[done - 1])
        for lost in disk.losses():
            yield done, disk, lost


def kills(recording: Recording, killed: Path) -> Iterator[DiskBackend]:
    """Yield the folder `killed` as each kill of `recording` leaves it: what was not synced is still pending."""
    for _, disk, lost in crashes(recording.start, recording.log):
        if not lost:
            lay_out(disk.tree({}), killed)
            yield DiskBackend(killed, exchanges=recording.scenario.exchanges, disk=disk.copy())
            shutil.rmtree(killed)


def in_words(name: str, done: int, log: Sequence[Event], disk: Disk, lost: Lost) -> str:
    last = repr(log[done - 1])[:90] if done else "nothing"
    losses = ", ".join(f"{how} {repr(disk.under_way[at])[:90]}" for at, how in lost.items())
    return f"{name}, crash after event {done} of {len(log)} ({last}), lost: {losses or 'nothing'}"


def failures(name: str, recording: Recording, examiner: Examiner) -> Iterator[str]:
    """Yield what is wrong with each crash of `recording`."""
    log, promise = recording.log, recording.promise
    must_be_new, before = False, 0
    answers: list[Seen] = []
    for done, disk, lost in crashes(recording.start, log):
        if done != before:
            # Once no crash can bring the old state back, no later one may.
            must_be_new = must_be_new or promise.old not in answers
            answers, before = [], done
        found = examiner.look(disk.tree(lost))
        answers.append(found.seen)
        for finding in promise.wrong(found, *([promise.new] if must_be_new or done == len(log) else [])):
            yield f"{in_words(name, done, log, disk, lost)}: {finding}"


@pytest.mark.promise(
    "A folder `step-N` is a complete checkpoint or does not exist; a step that is saved again is the old or "
    "the new one, bit for bit, after a power cut at any disk operation.",
    section="crash",
)
def test_a_crash_anywhere_leaves_the_old_or_the_new_checkpoint_bit_for_bit(base: Path) -> None:
    tally = Tally()
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        before = tally.states
        recording = Recording.of(scenario, base / f"{number} recorded")
        tally.failures += failures(name, recording, Examiner(base / str(number), recording.promise, tally))
        print(f"{name}: {tally.states - before} states")
    tally.report("crash states")
    assert tally.states >= 600


@pytest.mark.promise("A checkpoint that was reported as saved survives every later crash.", section="crash")
@pytest.mark.parametrize("name", ["first save", "replacement, no exchange"])
def test_a_save_killed_anywhere_is_durable_once_it_is_repeated(name: str, base: Path) -> None:
    tally = Tally()
    recording = Recording.of(SCENARIOS[name], base / "recorded")
    examiner = Examiner(base / "states", recording.promise, tally)
    for disk in kills(recording, base / "killed"):
        recorder = disk.recorder
        disk.start()
        recording.scenario.act(disk)
        new = disk.seen()
        for lost in recorder.disk.losses():
            found = examiner.look(recorder.disk.tree(lost))
            tally.failures += recording.promise.wrong(found, new)
    tally.report("crash states after a kill and a save")


def recover(disk: DiskBackend, step: int) -> None:
    disk.start()


def abandon(disk: DiskBackend, step: int) -> None:
    disk.remove_failed(step)


@pytest.mark.promise(
    "After a kill at any disk operation, a power cut at any moment of the recovery loses nothing, either.",
    section="crash",
)
@pytest.mark.slow  # every kill, and after each every power cut of the next operation
@pytest.mark.parametrize("then", [recover, abandon])
def test_after_a_kill_anywhere_the_next_operation_is_safe_from_a_power_cut(
    then: Callable[[DiskBackend, int], None], base: Path
) -> None:
    """What the killed process did not sync is still pending while the next one works."""
    tally = Tally()
    for number, (name, scenario) in enumerate(ON_DISK.items()):
        recording = Recording.of(scenario, base / f"{number} recorded")
        promise = recording.promise
        examiner = Examiner(base / str(number), promise, tally)
        for disk in kills(recording, base / "killed"):
            recorder, seen = disk.recorder, disk.seen()
            then(disk, max(promise.new.steps.keys() - promise.old.steps.keys(), default=2))
            assert disk.seen() == seen
            for done, later, lost in crashes(recorder.start, recorder.log):
                # The next run starts from a recovery, so what that saw must be durable.
                is_final = done == len(recorder.log) and then is recover
                for finding in promise.wrong(examiner.look(later.tree(lost)), *([seen] if is_final else [])):
                    words = in_words(f"{name}, killed, {then.__name__}", done, recorder.log, later, lost)
                    tally.failures.append(f"{words}: {finding}")
    tally.report(f"crash states after a kill and {then.__name__}")


@pytest.mark.parametrize("name", mostly_slow(ON_DISK, kept=("first save", "replacement", "branch that replaces")))
def test_a_disk_that_fails_once_anywhere_leaves_the_old_or_the_new_checkpoint(name: str, base: Path) -> None:
    recording = Recording.of(ON_DISK[name], base / "recorded")
    promise, act = recording.promise, recording.scenario.act
    for at in itertools.count(1):
        lay_out(recording.start.tree({}), base / "failing")
        disk = DiskBackend(base / "failing", exchanges=recording.scenario.exchanges)
        disk.arm(Fault(at, ERROR))
        with contextlib.suppress(OSError):
            act(disk)
        is_over = not disk.has_struck
        disk.arm(None)
        abandon(disk, recording.scenario.after[-1])
        assert set(disk.read()) in (set(promise.old.steps), set(promise.new.steps))
        act(disk)
        seen = disk.seen()
        assert promise.look(disk).findings == () and tuple(seen.steps) == recording.scenario.after
        shutil.rmtree(base / "failing")
        if is_over:
            break


def of_a_save(step: int) -> list[tuple[str, list[str]]]:
    """Return the syncs before the changes of names in the outer folder."""
    staging = f"{ROOT}/{layout.step_dir(step)}.staging"
    files = [layout.data_file(1, 0), layout.data_file(0, 0), layout.MANIFEST]
    return [*((f"{staging}/{name}", []) for name in files), (staging, [layout.MANIFEST])]


RELIED_ON = {
    "save next to older ones": [*of_a_save(3), (ROOT, ["step-3"])],
    "replacement": [*of_a_save(2), (ROOT, ["step-2", "step-2.staging"])],
    "branch that replaces, no exchange": [*of_a_save(4)[2:], (ROOT, [".replaced-step-4-1"]), (ROOT, ["step-4"])],
    "purge": [(ROOT, [".trash-step-1-1"])],
    "quarantine": [(ROOT, ["step-2.corrupt"])],
}
"""The synced file or folder, and the last new name in it. `.metadata` is synced twice."""
SLOW = ("save next to older ones", "replacement", "branch that replaces, no exchange")


@pytest.mark.promise("Every sync is needed: without any one of them, a power cut loses something.", section="crash")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RELIED_ON]
)
def test_without_any_one_of_these_syncs_a_crash_loses_something(name: str, base: Path) -> None:
    recording = Recording.of(SCENARIOS[name], base / "recorded")
    examiner = Examiner(base / "states", recording.promise, Tally())
    relied_on = []
    for at, event in enumerate(recording.log):
        if isinstance(event, Sync):
            lesser = replace(recording, log=recording.log[:at] + recording.log[at + 1 :])
            if next(failures(name, lesser, examiner), None) is not None:
                names = [done for done in recording.log[:at] if isinstance(done, Renaming) and done.node == event.node]
                last = [without_token(name) for name, _ in names[-1].named] if names else []
                relied_on.append((without_token(event.path), last))
    assert relied_on == RELIED_ON[name]
