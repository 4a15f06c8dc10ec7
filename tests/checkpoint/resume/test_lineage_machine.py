"""One folder over its complete life: saved, killed, resumed, resized, rolled back, purged, cut anywhere.

The store, the choice of what to load and the loader are real; a checkpoint's tensors are the loader's
state as JSON. The model is the tree of branches: what the present branch and those it forked from have
committed, each with the positions consumed up to there, and what lay beyond the forks.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.data.numbered import Numbered, loader
from tests.examples import examples
from tests.store import filled
from tests.store.crashing import NEVER, Contents, Crash, Cut, contents, steps_of
from tests.store.purges import to_purge
from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted
from torchtitan_lite.checkpoint.resume.load_source import choose_source, new_run
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.loader import TokenLoader
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import abandoned_by
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore

CORPUS = Numbered(24)
DATA = layout.data_file(0, 0)
UNSUPPORTED = ("notes", "step-2.abandoned", "step-3.bak", "step-007")
AUTOMATIC = Checkpoint()


@dataclass(frozen=True)
class Size:
    """The size of a job."""

    num_ranks: int
    batch: int


@dataclass(frozen=True)
class Death:
    """The process is killed at operation `at` on the disk, and by a power cut if `power`."""

    at: int
    power: bool


SIZES = st.sampled_from([Size(1, 12), Size(2, 12), Size(3, 12), Size(4, 12), Size(2, 8), Size(3, 6)])
DEATHS = st.just(Death(NEVER, False)) | st.builds(Death, st.integers(1, 30), st.booleans())
NONE = Death(NEVER, False)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as the model of this test has it."""

    step: int
    lineage: Lineage
    state: dict[str, Any]
    positions: list[int]
    files: Contents

    @property
    def name_once_abandoned(self) -> str:
        return layout.aside_dir(self.step, f"abandoned-{self.lineage.run_id}")


def commit(store: CheckpointStore, step: int, lineage: Lineage, data: bytes) -> None:
    """Save `data` as the manager's writer saves a run."""
    abandons = abandoned_by(lineage.run_id, lineage.branch_point, store.intact())
    filled.commit(store, step, data, lineage=dataclasses.replace(lineage, abandons=abandons))


def ranks(size: Size, seed: int) -> list[TokenLoader]:
    return [
        loader(documents=CORPUS, rank=rank, num_ranks=size.num_ranks, batch=size.batch, seed=seed)
        for rank in range(size.num_ranks)
    ]


class OneFolder(RuleBasedStateMachine):
    """At most one process trains into the folder; `loaders` is empty while none does."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.exchanges = True
        self.line: dict[int, Saved] = {}
        """What an automatic resume and a purge see, by step."""
        self.abandoned: list[Saved] = []
        self.command = AUTOMATIC
        self.loaders: list[TokenLoader] = []
        self.lineage = new_run()
        self.step = self.num_saves = 0
        self.positions: list[int] = []

    @initialize(exchanges=st.booleans(), size=SIZES)
    def start_from_scratch(self, exchanges: bool, size: Size) -> None:
        self.exchanges = exchanges
        for name in UNSUPPORTED:
            (self.root / name).mkdir()
            (self.root / name / layout.METADATA).write_bytes(b"theirs")
        self.theirs = {name: contents(self.root / name) for name in UNSUPPORTED}
        self._start(AUTOMATIC, size)

    @precondition(lambda self: self.loaders)
    @rule(steps=st.integers(1, 2))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            for one in self.loaders:
                next(one)
                self.positions += one.last_positions
        self.step += steps

    @precondition(lambda self: self.loaders)
    @rule(steps=st.integers(1, 2), death=DEATHS)
    def train_and_save(self, steps: int, death: Death) -> None:
        self.train(steps)
        self.num_saves += 1
        state, step = self.loaders[-1].state_dict(), self.step
        data = json.dumps({"save": self.num_saves, "dataloader": state}).encode()
        finished = self._finishes(lambda store: commit(store, step, self.lineage, data), death)
        files = steps_of(self.root).get(step, {})
        assert not finished or files[DATA] == data
        if files.get(DATA) == data:
            self._note_commit(Saved(step, self.lineage, state, list(self.positions), files))

    @precondition(lambda self: self.loaders)
    @rule(count=st.integers(1, 3), death=DEATHS)
    def purge(self, count: int, death: Death) -> None:
        due = sorted(self.line)[:-count]
        finished = self._finishes(lambda store: purge_all_but(count, store), death)
        there = steps_of(self.root)
        purged = [step for step in due if step not in there]
        assert purged == (due if finished else due[: len(purged)])
        self.line = {step: saved for step, saved in self.line.items() if step not in purged}

    @rule(size=SIZES, death=DEATHS)
    def killed_and_resumed(self, size: Size, death: Death) -> None:
        self._start(AUTOMATIC, size, death)

    @rule(size=SIZES, death=DEATHS)
    def same_command_again(self, size: Size, death: Death) -> None:
        self._start(self.command, size, death)

    @precondition(lambda self: self.line)
    @rule(which=st.integers(0, 9), new_branch=st.booleans(), size=SIZES, death=DEATHS)
    def roll_back(self, which: int, new_branch: bool, size: Size, death: Death) -> None:
        """Roll back to any step that ever existed, also an abandoned or purged one."""
        steps = sorted({*self.line, *(saved.step for saved in self.abandoned)})
        self._start(Checkpoint(load_step=steps[which % len(steps)], new_branch=new_branch), size, death)

    def _start(self, command: Checkpoint, size: Size, death: Death = NONE) -> None:
        """End the process, if there is one, and start one with `command`, which resumes from what it finds."""
        self.loaders, self.command = [], command
        if not self._finishes(CheckpointStore.recover, death):
            return
        expected = self._expected(command)
        if expected is None and command.load_step != -1:
            with pytest.raises(CheckpointNotFound):
                self._choose(command)
            return
        source = self._choose(command)
        self.loaders = ranks(size, seed=self.num_saves)
        if source is None or expected is None:
            assert source is expected
            self.lineage, self.step, self.positions = new_run(), 0, []
        else:
            self._continue(source, expected)

    def _continue(self, source: LoadSource, expected: Saved) -> None:
        assert (source.step, contents(source.path)) == (expected.step, expected.files)
        if self._rolls_back(self.command):
            runs = {saved.lineage.run_id for saved in [*self.line.values(), *self.abandoned]}
            assert source.lineage.run_id not in runs
            assert source.lineage.branch_point == source.lineage.parent_step == expected.step
        else:
            assert source.lineage == dataclasses.replace(expected.lineage, parent_step=expected.step)
        for one in self.loaders:
            one.load_state_dict(json.loads((source.path / DATA).read_bytes())["dataloader"])
            # The size of a step is a setting of this start.
            own = {"global_batch_size": one.state_dict()["global_batch_size"]}
            assert one.state_dict() == expected.state | own
        self.lineage, self.step, self.positions = source.lineage, source.step, list(expected.positions)

    def _choose(self, command: Checkpoint) -> LoadSource | None:
        return choose_source(CheckpointStore(self.root), Wanted(command.load_step, command))

    def _rolls_back(self, command: Checkpoint) -> bool:
        on_its_branch = self._latest() is not None and self._latest().lineage.branch_point == command.load_step
        return command.load_step != -1 and (command.new_branch or not on_its_branch)

    def _expected(self, command: Checkpoint) -> Saved | None:
        return self.line.get(command.load_step) if self._rolls_back(command) else self._latest()

    def _latest(self) -> Saved | None:
        return self.line[max(self.line)] if self.line else None

    def _note_commit(self, saved: Saved) -> None:
        run_id, fork = saved.lineage.run_id, saved.lineage.branch_point
        for step, other in list(self.line.items()):
            if fork is not None and step > fork and other.lineage.run_id != run_id:
                self.abandoned.append(self.line.pop(step))
        self.line[saved.step] = saved

    def _finishes(self, act: Callable[[CheckpointStore], object], death: Death) -> bool:
        """Do `act`; return False, with no process left, if it was killed in it."""
        try:
            act(CheckpointStore(self.root, durable=Cut(death.at, self.exchanges, death.power)))
        except Crash:
            self.loaders = []
            return False
        return True

    @invariant()
    def the_branch_consumed_every_position_once_in_order(self) -> None:
        assert self.positions == list(range(len(self.positions)))

    @invariant()
    def an_automatic_resume_would_take_the_latest_of_the_branch(self) -> None:
        source, latest = self._choose(AUTOMATIC), self._latest()
        assert (source and source.step) == (latest and latest.step)

    @invariant()
    def the_folder_holds_what_every_branch_left_byte_for_byte(self) -> None:
        folders = {path.name: contents(path) for path in self.root.iterdir()}
        listed = {info.step: folders[info.path.name] for info in CheckpointStore(self.root).committed()}
        assert listed == {step: saved.files for step, saved in self.line.items()}
        assert {name: folders[name] for name in UNSUPPORTED} == self.theirs
        if self.loaders:
            # While a process trains, there are no leftovers, and nothing is set aside before a branch's first commit.
            assert {saved.name_once_abandoned: saved.files for saved in self.abandoned} == {
                name: files
                for name, files in folders.items()
                if name not in UNSUPPORTED and layout.parse_step(name) not in self.line
            }
        else:
            assert all(saved.files in folders.values() for saved in self.abandoned)

    def teardown(self) -> None:
        self.folder.cleanup()


def purge_all_but(count: int, store: CheckpointStore) -> None:
    for info in to_purge(KeepLatest(count), store.committed()):
        store.empty(store.discard(info))


TestOneFolder = pytest.mark.slow(OneFolder.TestCase)
TestOneFolder.settings = settings(max_examples=examples(500), stateful_step_count=15, deadline=None)
