"""A folder over its complete life: every acknowledged save loads, whatever happens, in whatever order.

Synchronous saves and saves with a later commit, kills and power cuts at any operation, failing disks, damage, removal
by a policy, rolling back to an earlier step, other numbers of ranks, a second writer. The store is real, on real files;
the disk is that of recording.py. The model is what each rule says should be there; a reader that checks every byte
must find exactly that.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.disk.sources import bounced
from tests.store.crashing import Crash
from tests.store.filled import begun, manifest_of
from tests.store.purges import to_purge
from tests.store.recording import DROPPED, Disk, Lost, Recorder, lay_out
from torchtitan_lite.disk.block_writer import write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage, abandoned_by
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore

UNSUPPORTED = ("notes", "step-2.bak", "step-007", "step-3.corrupted")
ASIDE = (".corrupt", ".abandoned-", ".foreign", ".weights")
IN_MEMORY = Path("/dev/shm")
FULL = CheckpointKind.FULL


@dataclass(frozen=True)
class Fault:
    """An event at the `at`-th operation from now; `seed` decides what a power cut loses."""

    at: int
    kind: str
    seed: int


FAULTS = st.none() | st.builds(
    Fault, st.integers(1, 28), st.sampled_from(["kill", "power cut", "error"]), st.integers(0, 999)
)
KINDS = st.sampled_from([FULL, FULL, FULL, CheckpointKind.WEIGHTS_ONLY])
DAMAGE = st.sampled_from(["flip", "truncate", "delete", "zero"])


@dataclass(frozen=True)
class Saved:
    """A checkpoint as a reader must find it."""

    run_id: str
    kind: CheckpointKind
    files: dict[str, bytes]
    """Its files but the manifest."""
    is_sound: bool = True
    has_its_sizes: bool = True


There = dict[int, Saved]


@dataclass(frozen=True)
class Staged:
    """A save whose files are written and that is not committed yet."""

    step: int
    place: str
    manifest: Manifest
    outcome: There


def read(root: Path) -> There:
    """Return what a reader finds, every byte checked against the digests in the manifest."""
    found: There = {}
    store = CheckpointStore(root)
    for info in store.committed():
        manifest = Manifest.of_folder(info.path)
        assert manifest is not None
        files = {path.name: path.read_bytes() for path in info.path.iterdir() if path.name != layout.MANIFEST}
        found[info.step] = Saved(
            info.run_id,
            info.kind,
            files,
            files.keys() == manifest.files.keys()
            and all(FileRecord.of(files[name]) == record for name, record in manifest.files.items()),
            not store.check_sizes(info),
        )
    return found


class Life(RuleBasedStateMachine):
    """One folder; `there` is what a reader must find in it."""

    examples = 0
    loads = 0
    crashes = 0

    def __init__(self) -> None:
        super().__init__()
        Life.examples += 1
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None)
        self.base = Path(self.folder.name) / "outputs"
        self.root = self.base / "checkpoint"
        self.there: There = {}
        self.aside: dict[str, dict[str, bytes]] = {}
        self.staged: Staged | None = None
        self.lineage = Lineage("run0")
        self.known_good: set[int] = set()
        self.step = self.num_saves = self.num_runs = 0
        self.ranks = 2
        self.one_must_load = False

    @initialize(exchanges=st.booleans(), crowded=st.booleans())
    def start(self, exchanges: bool, crowded: bool) -> None:
        self.exchanges = exchanges
        self.base.mkdir()
        for name in UNSUPPORTED if crowded else ():
            (self.root / name).mkdir(parents=True)
            (self.root / name / layout.METADATA).write_bytes(b"theirs")
        self.theirs = self._foreign()
        self._attach(Disk.of(self.base))

    @precondition(lambda self: self.staged is None)
    @rule(steps=st.integers(0, 2), kind=KINDS, fault=FAULTS)
    def save(self, steps: int, kind: CheckpointKind, fault: Fault | None) -> None:
        self.step = max(1, self.step + steps)
        if self._try(lambda: self._stage(kind), [self.there], fault):
            self.commit(fault)

    @precondition(lambda self: self.staged is None)
    @rule(steps=st.integers(0, 2), kind=KINDS)
    def stage(self, steps: int, kind: CheckpointKind) -> None:
        self.step = max(1, self.step + steps)
        self._stage(kind)

    @precondition(lambda self: self.staged is not None)
    @rule(fault=FAULTS)
    def commit(self, fault: Fault | None) -> None:
        staged = self._take_staged()
        outcome = self._outcome(staged)
        if self._try(
            lambda: self.store.commit(staged.step, staged.manifest, place=staged.place),
            [self.there, outcome],
            fault,
            staged,
        ):
            self._acknowledge(staged, outcome)

    @precondition(lambda self: self.staged is not None)
    @rule(fault=FAULTS)
    def fail(self, fault: Fault | None) -> None:
        staged = self._take_staged()
        self._try(lambda: self.store.remove_staging(staged.step, staged.place), [self.there], fault)

    @precondition(lambda self: self.staged is not None)
    @rule(passes=st.integers(0, 3), takes_over_first=st.booleans())
    def commit_as_another_takes_over(self, passes: int, takes_over_first: bool) -> None:
        """The fence passes `passes` times, and raises at the next call if there is one."""
        staged = self._take_staged()
        outcome = self._outcome(staged)
        if takes_over_first:
            passes = 0
            CheckpointStore(self.root, durable=self.recorder).recover()
        answers = itertools.count()

        def fence() -> None:
            if next(answers) >= passes:
                self.recorder.before = refuse
                raise LeaseLost(str(self.root), "another")

        def refuse(_: int) -> NoReturn:
            raise AssertionError("something was done after the folder was lost")

        try:
            self.store.commit(staged.step, staged.manifest, fence, place=staged.place)
        except LeaseLost:
            self.recorder.before = lambda _: None
            assert read(self.root) == self.there
        else:
            assert not takes_over_first
            self._acknowledge(staged, outcome)
        self._restart(None)

    @precondition(lambda self: self.staged is None and self.there)
    @rule(which=st.integers(0, 9), how=DAMAGE, file=st.integers(0, 9))
    def corrupt(self, which: int, how: str, file: int) -> None:
        steps = sorted(self.there)
        step = steps[-1 - which % len(steps)]
        info = CheckpointStore(self.root).get(step)
        # Without its manifest, what it abandons is unknown; other tests cover that.
        names = sorted(
            path.name for path in info.path.iterdir() if path.name != layout.MANIFEST or not info.lineage.abandons
        )
        if names:
            self.recorder.disk.do_all()
            self._damage(info.path / names[file % len(names)], how)
            found = read(self.root)
            assert {**found, step: None} == {**self.there, step: None}
            assert step not in found or not found[step].is_sound
            self.there = found
            self._attach(Disk.of(self.base))
            self.one_must_load = (
                self.one_must_load and how in ("truncate", "delete") and self._latest_sound() is not None
            )

    @precondition(lambda self: self.staged is None)
    @rule(count=st.integers(1, 3), fault=FAULTS)
    def purge(self, count: int, fault: Fault | None) -> None:
        full = sorted(step for step, saved in self.there.items() if saved.kind is FULL and saved.has_its_sizes)
        latest_full = max((step for step, saved in self.there.items() if saved.kind is FULL), default=None)
        stay = {*full[-count:], *[step for step in full if step in self.known_good][-1:]}
        go = [step for step in full if step not in stay]
        before = self.there
        stages = [
            {step: saved for step, saved in before.items() if step not in go[:gone]} for gone in range(len(go) + 1)
        ]
        if self._try(lambda: self._purge(count), stages, fault):
            self.there = stages[-1]
            assert latest_full is None or latest_full in self.there

    @precondition(lambda self: self.staged is None and self._latest_sound() is not None)
    @rule(which=st.integers(0, 9))
    def roll_back(self, which: int) -> None:
        steps = sorted(step for step, saved in self.there.items() if saved.kind is FULL and saved.is_sound)
        self.step = steps[which % len(steps)]
        self.num_runs += 1
        self.lineage = Lineage(f"run{self.num_runs}", self.step, self.step)
        self.known_good = {self.step}

    @rule(ranks=st.integers(1, 3), fault=FAULTS, is_power_cut=st.booleans(), seed=st.integers(0, 999))
    def die_and_resume(self, ranks: int, fault: Fault | None, is_power_cut: bool, seed: int) -> None:
        self.ranks = ranks
        if is_power_cut:
            self._cut_power(seed)
        self._restart(fault)

    @invariant()
    def a_reader_finds_what_was_committed(self) -> None:
        if self.base.exists():
            assert read(self.root) == self.there

    @invariant()
    def one_loads_once_one_was_acknowledged(self) -> None:
        assert not self.one_must_load or self._latest_sound() is not None

    @invariant()
    def what_is_not_ours_or_no_longer_ours_is_untouched(self) -> None:
        if self.base.exists():
            assert self._foreign() == self.theirs
            now = self._aside()
            assert {name: now.get(name) for name in self.aside} == self.aside
            self.aside = now

    def teardown(self) -> None:
        with self.folder:
            if self.base.exists():
                self._restart(None)
                self.a_reader_finds_what_was_committed()
                left = [name for name in names_in(self.root) if layout.parse_step(name) is None]
                assert {*left} <= {*UNSUPPORTED, *self._aside()}

    def _stage(self, kind: CheckpointKind) -> None:
        """Write the files of the ranks for the present step."""
        self.num_saves += 1
        step, store = self.step, self.store
        staging = begun(store, step)
        files, records = {}, {}
        for rank in range(self.ranks):
            name, data = layout.data_file(rank, 0), f"save {self.num_saves} of rank {rank};".encode() * (5 + rank)
            records[name] = write_blocks(staging / name, bounced(data), durable=self.recorder)
            files[name] = data
        files[layout.METADATA] = b"description of save %d" % self.num_saves
        self.recorder.write_file(staging / layout.METADATA, files[layout.METADATA])
        manifest = manifest_of(step, kind=kind, world_size=self.ranks, files=records, lineage=self.lineage)
        self.staged = Staged(step, staging.name, manifest, {step: Saved(self.lineage.run_id, kind, files)})

    def _take_staged(self) -> Staged:
        staged, self.staged = self.staged, None
        assert staged is not None
        lineage = staged.manifest.lineage
        abandons = abandoned_by(lineage.run_id, lineage.branch_point, self.store.intact())
        return replace(staged, manifest=replace(staged.manifest, lineage=replace(lineage, abandons=abandons)))

    def _outcome(self, staged: Staged) -> There:
        run_id, branch_point = staged.manifest.lineage.run_id, staged.manifest.lineage.branch_point
        stay = {
            step: saved
            for step, saved in self.there.items()
            if branch_point is None or step <= branch_point or saved.run_id == run_id
        }
        return stay | staged.outcome

    def _acknowledge(self, staged: Staged, outcome: There) -> None:
        self.there = outcome
        if staged.manifest.kind is FULL:
            self.known_good.add(staged.step)
            self.one_must_load = True
        else:
            self.known_good.discard(staged.step)
            self.one_must_load = self.one_must_load and self._latest_sound() is not None

    def _purge(self, count: int) -> None:
        committed = self.store.committed()
        for info in to_purge(KeepLatest(count), committed, known_good=self.known_good, is_sound=self._has_its_sizes):
            self.store.empty(self.store.discard(info))

    def _has_its_sizes(self, info: CheckpointInfo) -> bool:
        return not self.store.check_sizes(info)

    def _try(
        self, act: Callable[[], object], outcomes: list[There], fault: Fault | None, staged: Staged | None = None
    ) -> bool:
        """Return whether `act` finished; else check for one of `outcomes`, and continue as the next process."""
        first = len(self.recorder.log)

        def strike(number: int) -> None:
            if fault is not None and number - first == fault.at:
                if fault.kind == "error":
                    raise OSError(errno.EIO, "Input/output error")
                raise Crash

        self.recorder.before = strike
        try:
            act()
        except OSError:
            self.recorder.before = lambda _: None
            self._adopt(outcomes)
            if staged is not None:
                self.store.remove_staging(staged.step, staged.place)
            self.staged = None
            return False
        except Crash:
            Life.crashes += 1
            assert fault is not None
            self.recorder.before = lambda _: None
            if fault.kind == "power cut":
                self._cut_power(fault.seed)
            self._adopt(outcomes)
            self._restart(None)
            return False
        self.recorder.before = lambda _: None
        return True

    def _adopt(self, outcomes: list[There]) -> None:
        found = read(self.root)
        assert found in outcomes
        self.there = found
        self.one_must_load = self.one_must_load and self._latest_sound() is not None

    def _cut_power(self, seed: int) -> None:
        """Keep or lose what is not synced; 0 keeps all, 1 loses all."""
        disk, chance = self.recorder.disk, random.Random(seed)
        lost: Lost = {}
        if seed == 1:
            lost = dict.fromkeys(range(len(disk.under_way)), DROPPED)
        elif seed > 1:
            ways = ((at, chance.choice(["", "", *change.ways])) for at, change in enumerate(disk.under_way))
            lost = {at: how for at, how in ways if how}
        tree = disk.tree(lost)
        shutil.rmtree(self.base)
        lay_out(tree, self.base)
        self._attach(Disk.of(self.base))

    def _restart(self, fault: Fault | None) -> None:
        """Recover as a new process, and load the latest undamaged checkpoint."""
        self.staged = None
        self._attach(self.recorder.disk)
        self.known_good = set()
        self._try(self.store.recover, [self.there], fault)
        self.store.recover()  # A leftover that the disk does not remove is a warning.
        assert not [name for name in names_in(self.root) if name.startswith(".") or ".staging" in name]
        self._load()

    def _load(self) -> None:
        Life.loads += 1
        expected = self._latest_sound()
        while (info := self.store.latest()) is not None:
            found = read(self.root)[info.step]
            if found.is_sound:
                break
            aside = self.store.quarantine(info.step, ["a byte is not what was committed"])
            assert layout.FINDINGS in names_in(aside)
            del self.there[info.step]
            assert read(self.root) == self.there
        assert (info and info.step) == expected
        if info is not None:
            self.step, self.lineage, self.known_good = info.step, replace(info.lineage, abandons=()), {info.step}
            assert found == self.there[info.step]
            if info.run_id in {run for other in self.store.intact() for _, run in other.lineage.abandons}:
                # Later steps are abandoned under the id of that run: a run that continues here needs another id.
                self.num_runs += 1
                self.lineage = Lineage(f"run{self.num_runs}", info.step)
        else:
            self.step, self.num_runs = 0, self.num_runs + 1
            self.lineage = Lineage(f"run{self.num_runs}")

    def _latest_sound(self) -> int | None:
        return max((step for step, saved in self.there.items() if saved.is_sound and saved.kind is FULL), default=None)

    def _damage(self, path: Path, how: str) -> None:
        data = path.read_bytes()
        middle = len(data) // 2
        if how == "delete":
            path.unlink()
        elif how == "truncate":
            path.write_bytes(data[:middle])
        elif how == "zero":
            path.write_bytes(bytes(len(data)))
        else:
            # All saved bytes are ASCII, so a second time does not undo the first.
            path.write_bytes(data[:middle] + bytes([data[middle] | 128]) + data[middle + 1 :])

    def _attach(self, disk: Disk) -> None:
        self.recorder = Recorder(self.base, disk, exchanges=self.exchanges)
        self.store = CheckpointStore(self.root, durable=self.recorder)

    def _foreign(self) -> dict[str, list[tuple[str, bytes]]]:
        folders = {name: self.root / name for name in UNSUPPORTED if (self.root / name).exists()}
        return {name: [(p.name, p.read_bytes()) for p in folder.iterdir()] for name, folder in folders.items()}

    def _aside(self) -> dict[str, dict[str, bytes]]:
        return {
            name: {path.name: path.read_bytes() for path in (self.root / name).iterdir()}
            for name in names_in(self.root)
            if any(mark in name for mark in ASIDE) and name not in UNSUPPORTED
        }


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_acknowledged_save_loads_whatever_happens(examples: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "torchtitan_lite")
    Life.examples = Life.loads = Life.crashes = 0
    run_state_machine_as_test(Life, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
    print(f"examples: {Life.examples}, loads: {Life.loads}, crashes: {Life.crashes}")
    assert Life.examples >= examples
