"""Every folder that a crash may leave: during a save, a replacement, a removal, a quarantine, a recovery.

Each is recorded on a disk that keeps what was synced and loses any part of the rest (recording.py). Whatever it lost,
whenever: a reader finds the old state or the new one, bit for bit and with the right digests, and after the operation
returned, only the new one.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.disk.sources import bounced
from tests.store.filled import begun, manifest_of, remove_begun, without_token
from tests.store.recording import Contents, Disk, Event, Lost, Recorder, Renaming, Sync, Tree, lay_out
from torchtitan_lite.disk.block_writer import write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage, abandoned_by
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.store import CheckpointStore

ROOT = "checkpoint"
UNSUPPORTED = ("step-2.corrupt", "step-10.bak", "step-abc", "notes")
SIZES = (9000, 5000)
"""Bytes of each rank's file; one write takes 4096 at most."""
Files = dict[str, bytes]
Answer = dict[int, tuple[bool, Files]]
"""What a reader finds, by step: whether all files have their digests, and the files."""
Frozen = frozenset[tuple[str, "bytes | Path | None"]]


class Unsynced(Durable):
    """Makes no syncs: for preparations, which no power cut hits."""

    def fsync_file(self, fd: int) -> None: ...

    def fsync_dir(self, path: Path) -> None: ...

    def write_file(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)


def payload(text: str, num_bytes: int) -> bytes:
    """Return distinguishable bytes, none of them zero."""
    return b"".join(f"{text}:{at};".encode() for at in range(num_bytes // 8))[:num_bytes]


def save(store: CheckpointStore, durable: Durable, step: int, text: str, lineage: Lineage | None = None) -> None:
    """Save the files of two ranks and `.metadata`, and commit, as a run does."""
    files: dict[str, FileRecord] = {}
    staging = begun(store, step)
    for rank, num_bytes in enumerate(SIZES):
        data = payload(f"{text}/{rank}", num_bytes)
        name = layout.data_file(rank, 0)
        files[name] = write_blocks(staging / name, bounced(data), durable=durable)
    durable.write_file(staging / layout.METADATA, b"DCP's description of " + text.encode())
    store.commit(step, manifest(store, step, files, lineage or Lineage("a1")), place=staging.name)


def manifest(store: CheckpointStore, step: int, files: dict[str, FileRecord], lineage: Lineage) -> Manifest:
    abandons = abandoned_by(lineage.run_id, lineage.branch_point, store.intact())
    own = Lineage(lineage.run_id, None, lineage.branch_point, abandons)
    return manifest_of(step, world_size=len(SIZES), files=files, lineage=own)


def read(root: Path) -> Answer:
    """Return what a reader finds in `root`, every byte checked against the digests in the manifest."""
    answer: Answer = {}
    for info in CheckpointStore(root).committed():
        files = {path.name: b"" if path.is_dir() else path.read_bytes() for path in info.path.iterdir()}
        found = Manifest.of_folder(info.path)
        assert found is not None
        is_sound = files.keys() - {layout.MANIFEST} == found.files.keys() and all(
            record.blocks and FileRecord.of(files[name]) == record for name, record in found.files.items()
        )
        answer[info.step] = (is_sound, files)
    return answer


def leftovers(root: Path) -> list[str]:
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return [name for name in names if name.startswith(".") or ".staging" in name]


def foreign(tree: Tree) -> Tree:
    return {path: leaf for path, leaf in tree.items() if path.split("/")[1:2] and path.split("/")[1] in UNSUPPORTED}


Act = Callable[[CheckpointStore, Recorder], object]


@dataclass(frozen=True)
class Scenario:
    """A durable folder, and the operation on it."""

    name: str
    before: Callable[[CheckpointStore], object]
    act: Act
    after: tuple[int, ...]
    """The steps that a reader finds after it."""
    exchanges: bool = True
    keeps: tuple[str, ...] = ()
    """Steps whose folders must exist, complete, under any name."""


def nothing_yet(store: CheckpointStore) -> None:
    pass


def two(store: CheckpointStore) -> None:
    for name in UNSUPPORTED[:-1]:
        (store.root / name).mkdir(parents=True)
    (store.root / UNSUPPORTED[0] / layout.MANIFEST).write_bytes(b"theirs")
    (store.root / UNSUPPORTED[-1]).symlink_to("elsewhere")
    save(store, Unsynced(), 1, "one")
    save(store, Unsynced(), 2, "two")


def three(store: CheckpointStore) -> None:
    two(store)
    save(store, Unsynced(), 3, "three")


def an_attempt_before(store: CheckpointStore) -> None:
    two(store)
    staging = begun(store, 2)
    (staging / "folder").mkdir()
    (staging / layout.data_file(0, 0)).write_bytes(b"of an earlier attempt")


def one_in_the_way(store: CheckpointStore) -> None:
    two(store)
    (store.root / layout.step_dir(3)).mkdir()
    (store.root / layout.step_dir(3) / layout.METADATA).write_bytes(b"theirs")


def a_damaged_one(store: CheckpointStore) -> None:
    two(store)
    path = store.root / layout.step_dir(2) / layout.data_file(1, 0)
    path.write_bytes(bytes(100) + path.read_bytes()[100:])


def all_leftovers(store: CheckpointStore) -> None:
    three(store)
    final, replaced = store.root / layout.step_dir(2), store.root / layout.replaced_dir(2, 1)
    final.rename(replaced)
    shutil.copytree(replaced, store.root / layout.replaced_dir(1, 1))
    shutil.copytree(replaced, store.root / layout.trash_dir(3, 1))
    shutil.copytree(replaced, store.root / layout.staging_dir(2, "1"))


def a_branch_to_be(store: CheckpointStore) -> None:
    for step in (2, 4, 6):
        save(store, Unsynced(), step, f"old {step}")


def a_branch_half_made(store: CheckpointStore) -> None:
    """Prepare the state after a crash between the commit of step 3 and the renames of what it abandons."""
    a_branch_to_be(store)
    save(store, Unsynced(), 3, "new", Lineage("b2", None, 2))
    for step in (4, 6):
        (store.root / layout.abandoned_dir(step, "a1", 1)).rename(store.root / layout.step_dir(step))


def saving(step: int) -> Act:
    return lambda store, recorder: save(store, recorder, step, "new")


def branching(step: int) -> Act:
    return lambda store, recorder: save(store, recorder, step, "new", Lineage("b2", None, 2))


def deleting(step: int) -> Act:
    return lambda store, _: store.empty(store.discard(store.get(step)))


def quarantining(step: int) -> Act:
    return lambda store, _: store.quarantine(step, ["block 0 of a file is not what was committed"])


def recovering(store: CheckpointStore, _: Recorder) -> None:
    store.recover()


SAVES = [
    Scenario("first save", nothing_yet, saving(1), (1,)),
    Scenario("save next to older ones", two, saving(3), (1, 2, 3)),
    Scenario("replacement", two, saving(2), (1, 2)),
    Scenario("replacement, no exchange", two, saving(2), (1, 2), exchanges=False),
    Scenario("replacement after a cut attempt", an_attempt_before, saving(2), (1, 2)),
    Scenario("save over what is not ours", one_in_the_way, saving(3), (1, 2, 3)),
    Scenario("branch", a_branch_to_be, branching(3), (2, 3), keeps=("step-4", "step-6")),
    Scenario("branch that replaces", a_branch_to_be, branching(4), (2, 4), keeps=("step-4", "step-6")),
    Scenario("branch that replaces, no exchange", a_branch_to_be, branching(4), (2, 4), False, ("step-4", "step-6")),
]
SCENARIOS = [
    *SAVES,
    Scenario("purge", three, deleting(1), (2, 3)),
    Scenario("purge with leftovers", all_leftovers, deleting(1), (2, 3)),
    Scenario("quarantine", a_damaged_one, quarantining(2), (1,), keeps=("step-2",)),
    Scenario("purge of a branch half made", a_branch_half_made, deleting(3), (2,), keeps=("step-4", "step-6")),
    Scenario("quarantine of a branch half made", a_branch_half_made, quarantining(3), (2,), keeps=("step-4", "step-6")),
    Scenario("recovery of a branch half made", a_branch_half_made, recovering, (2, 3), keeps=("step-4", "step-6")),
    Scenario("recovery", all_leftovers, recovering, (1, 2, 3)),
]


def named(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


@dataclass
class Recording:
    """The operations of a scenario, and what a reader finds before and after."""

    scenario: Scenario
    start: Disk
    log: list[Event]
    old: Answer
    new: Answer
    kept: list[Files]

    @classmethod
    def of(cls, scenario: Scenario, base: Path) -> Recording:
        root = base / ROOT
        base.mkdir()
        scenario.before(CheckpointStore(root, durable=Unsynced()))
        old = read(root)
        kept = [{path.name: path.read_bytes() for path in (root / name).iterdir()} for name in scenario.keeps]
        recorder = Recorder(base, exchanges=scenario.exchanges)
        scenario.act(CheckpointStore(root, durable=recorder), recorder)
        assert tuple(read(root)) == scenario.after
        return cls(scenario, recorder.start, at_the_same_time(recorder.log), old, read(root), kept)


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


@dataclass(frozen=True)
class Found:
    """What a reader finds in one crash state."""

    answer: Answer
    findings: tuple[str, ...]
    """What is wrong in any case."""


class Examiner:
    """Builds each state once, opens it as the next job does, and returns what it finds."""

    def __init__(self, base: Path, recording: Recording, tally: Tally) -> None:
        self._base, self._recording, self._tally = base, recording, tally
        self._contents = Contents(base / "contents")
        self._theirs = foreign(recording.start.tree({}))
        self._found: dict[Frozen, Found] = {}

    def look(self, tree: Tree) -> Found:
        """Return what a reader finds in `tree`; it must find the same after a recovery, which leaves no leftovers."""
        key = frozenset(tree.items())
        if key not in self._found:
            self._tally.states += 1
            self._contents.lay_out(tree, self._base / "state")
            try:
                self._found[key] = self._open(self._base / "state")
            finally:
                shutil.rmtree(self._base / "state")
        return self._found[key]

    def _open(self, base: Path) -> Found:
        root, findings = base / ROOT, []
        answer = read(root)
        CheckpointStore(root, durable=Unsynced()).recover()
        if read(root) != answer:
            findings.append("the recovery changed what a reader finds")
        if leftovers(root):
            findings.append(f"the recovery left {leftovers(root)}")
        if self._theirs and foreign(Disk.of(base).tree({})) != self._theirs:
            findings.append("a foreign name was touched")
        if self._recording.kept:
            folders = [files_in(folder) for folder in root.iterdir() if folder.name not in UNSUPPORTED]
            findings += ["what is to be kept is nowhere" for kept in self._recording.kept if kept not in folders]
        return Found(answer, tuple(findings))


def files_in(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != layout.FINDINGS}


def crashes(start: Disk, log: Sequence[Event]) -> Iterator[tuple[int, Disk, Lost]]:
    """Yield, for each number of events done, the disk then and each loss that a crash may cause."""
    disk = start.copy()
    for done in range(len(log) + 1):
        if done:
            disk.do(log[done - 1])
        for lost in disk.losses():
            yield done, disk, lost


def in_words(name: str, done: int, log: Sequence[Event], disk: Disk, lost: Lost) -> str:
    last = repr(log[done - 1])[:90] if done else "nothing"
    losses = ", ".join(f"{how} {repr(disk.under_way[at])[:90]}" for at, how in lost.items())
    return f"{name}, crash after event {done} of {len(log)} ({last}), lost: {losses or 'nothing'}"


def failures(recording: Recording, examiner: Examiner) -> Iterator[str]:
    """Yield what is wrong with each crash of `recording`."""
    log, old, new = recording.log, recording.old, recording.new
    must_be_new, before = False, 0
    answers: list[Answer] = []
    for done, disk, lost in crashes(recording.start, log):
        if done != before:
            # Once no crash can bring the old state back, no later one may.
            must_be_new = must_be_new or (old not in answers and old != new)
            answers, before = [], done
        found = examiner.look(disk.tree(lost))
        answers.append(found.answer)
        for finding in wrong(found, [new] if done == len(log) or must_be_new else [old, new]):
            yield f"{in_words(recording.scenario.name, done, log, disk, lost)}: {finding}"


def wrong(found: Found, allowed: Sequence[Answer]) -> list[str]:
    return [*found.findings, *([] if found.answer in allowed else [f"found {describe(found.answer)}"])]


def describe(answer: Answer) -> str:
    parts = [
        f"{step} ({'sound' if is_sound else 'DAMAGED'}, {files.get(layout.METADATA, b'')!r})"
        for step, (is_sound, files) in answer.items()
    ]
    return "steps " + ", ".join(parts) if parts else "nothing"


def report(what: str, tally: Tally) -> None:
    print(f"{what}: {tally.states}, failures: {len(tally.failures)}")
    assert not tally.failures, "\n".join(tally.failures[:20])


def test_a_crash_anywhere_leaves_the_old_or_the_new_checkpoint_bit_for_bit(base: Path) -> None:
    tally = Tally()
    for number, scenario in enumerate(SCENARIOS):
        before = tally.states
        recording = Recording.of(scenario, base / f"{number} recorded")
        tally.failures += failures(recording, Examiner(base / str(number), recording, tally))
        print(f"{scenario.name}: {tally.states - before} states")
    report("crash states", tally)
    assert tally.states >= 1000


def recover(store: CheckpointStore, step: int) -> None:
    store.recover()


def abandon(store: CheckpointStore, step: int) -> None:
    remove_begun(store, step)


@pytest.mark.parametrize("name", ["first save", "replacement, no exchange"])
def test_a_save_killed_anywhere_is_durable_once_it_is_repeated(name: str, base: Path) -> None:
    scenario, tally = named(name), Tally()
    recording = Recording.of(scenario, base / "recorded")
    examiner = Examiner(base / "states", recording, tally)
    for _, disk, lost in crashes(recording.start, recording.log):
        if not lost:
            killed = base / "killed"
            lay_out(disk.tree({}), killed)
            recorder = Recorder(killed, disk.copy(), exchanges=scenario.exchanges)
            store = CheckpointStore(killed / ROOT, durable=recorder)
            store.recover()
            scenario.act(store, recorder)
            shutil.rmtree(killed)
            for lost_at_last in recorder.disk.losses():
                tally.failures += wrong(examiner.look(recorder.disk.tree(lost_at_last)), [recording.new])
    report("crash states after a kill and a save", tally)


@pytest.mark.slow  # every kill, and after each every power cut of the next operation
@pytest.mark.parametrize("then", [recover, abandon])
def test_after_a_kill_anywhere_the_next_operation_is_safe_from_a_power_cut(
    then: Callable[[CheckpointStore, int], None], base: Path
) -> None:
    """What the killed process did not sync is still pending while the next one works."""
    tally = Tally()
    for number, scenario in enumerate(SAVES):
        recording = Recording.of(scenario, base / f"{number} recorded")
        examiner = Examiner(base / str(number), recording, tally)
        for _, disk, lost in crashes(recording.start, recording.log):
            if not lost:
                killed = base / "killed"
                lay_out(disk.tree({}), killed)
                tally.failures += failures_of(then, scenario, recording, examiner, killed, disk.copy())
                shutil.rmtree(killed)
    report(f"crash states after a kill and {then.__name__}", tally)


def failures_of(
    then: Callable[[CheckpointStore, int], None],
    scenario: Scenario,
    recording: Recording,
    examiner: Examiner,
    killed: Path,
    disk: Disk,
) -> Iterator[str]:
    """Yield what is wrong with each crash of `then`, in the folder `killed`, which `disk` has not synced in full."""
    recorder = Recorder(killed, disk, exchanges=scenario.exchanges)
    seen = read(killed / ROOT)
    then(CheckpointStore(killed / ROOT, durable=recorder), max(recording.new))
    assert read(killed / ROOT) == seen
    for done, later, lost in crashes(recorder.start, recorder.log):
        # The next run starts from a recovery, so what that saw must be durable.
        is_final = done == len(recorder.log) and then is recover
        for finding in wrong(examiner.look(later.tree(lost)), [seen] if is_final else [recording.old, recording.new]):
            yield f"{in_words(f'{scenario.name}, killed, {then.__name__}', done, recorder.log, later, lost)}: {finding}"


def of_a_save(step: int) -> list[tuple[str, list[str]]]:
    """Return the syncs before the changes of names in the outer folder."""
    staging = f"{ROOT}/{layout.step_dir(step)}.staging"
    files = [layout.data_file(1, 0), layout.data_file(0, 0), layout.MANIFEST]
    return [*((f"{staging}/{name}", []) for name in files), (staging, [layout.MANIFEST])]


RELIED_ON = {
    "save next to older ones": [*of_a_save(3), (ROOT, ["step-3"])],
    "replacement": [*of_a_save(2), (ROOT, ["step-2", "step-2.staging"])],
    "branch that replaces, no exchange": [*of_a_save(4), (ROOT, [".replaced-step-4-1"]), (ROOT, ["step-4"])],
    "purge": [(ROOT, [".trash-step-1-1"])],
    "quarantine": [(ROOT, ["step-2.corrupt-2"])],
}
"""The synced file or folder, and the last new name in it. `.metadata` is synced twice."""


SLOW = ("replacement", "branch that replaces, no exchange")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RELIED_ON]
)
def test_without_any_one_of_these_syncs_a_crash_loses_something(name: str, base: Path) -> None:
    scenario = named(name)
    recording = Recording.of(scenario, base / "recorded")
    examiner = Examiner(base / "states", recording, Tally())
    relied_on = []
    for at, event in enumerate(recording.log):
        if isinstance(event, Sync):
            log = recording.log[:at] + recording.log[at + 1 :]
            lesser = Recording(scenario, recording.start, log, recording.old, recording.new, recording.kept)
            if next(failures(lesser, examiner), None) is not None:
                names = [done for done in recording.log[:at] if isinstance(done, Renaming) and done.node == event.node]
                last = [without_token(name) for name, _ in names[-1].named] if names else []
                relied_on.append((without_token(event.path), last))
    assert relied_on == RELIED_ON[name]
