"""A folder of incremental saves over its life: saved, pruned, pinned, rolled back, damaged, killed at any operation.

Saver, plan, store, housekeeping and DCP's reader are real. The steps share files, and still no checkpoint is changed by
what happens to another: every file has the digests of its manifest, unless a byte of that very file was damaged, under
whichever name. And no byte stays after its last name: each name of each file belongs to a checkpoint that is there.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed.checkpoint import load as dcp_load

from tests.checkpoint.small_run import same
from tests.examples import examples
from tests.store.crashing import NEVER, Crash, Cut
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.still_tensors import StillTensors
from torchtitan_lite.checkpoint.resume.load_source import choose_source, new_run
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.checkpoint.saving.writer import Origin, SaveTarget
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore, recover

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP warns in a single process.

NUMEL = (64 << 10) // 4
STILL = ("frozen", "slow")
DEATHS = st.integers(1, 25)
FULL_EVERY = 3


class IncrementalFolder(RuleBasedStateMachine):
    """One process at a time trains into the folder."""

    def __init__(self) -> None:
        super().__init__()
        in_memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None)
        self.root = Path(self.folder.name) / "checkpoint"
        self.root.mkdir()
        self.model = {name: torch.zeros(NUMEL) for name in (*STILL, "trained")}
        self.saved: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self.damaged: set[tuple[int, int]] = set()
        self.lineage, self.step, self.num_changes = new_run(), 0, 0

    @initialize()
    def start(self) -> None:
        """Start a process, which shares nothing with what is there."""
        peers = Peers(timedelta(seconds=60))
        self.plans = PlanCache(peers, still=StillTensors(lambda: {"model.trained"}, {"model"}, FULL_EVERY))
        self.saver = SyncSaver(peers, self.plans)
        self.housekeeping = Housekeeping(KeepLatest(2), lambda event: None)

    @rule(count=st.integers(1, 4))
    def save(self, count: int) -> None:
        for _ in range(count):
            self._save(set(), 1)

    @rule(changing=st.sets(st.sampled_from(STILL), min_size=1))
    def save_what_has_changed(self, changing: set[str]) -> None:
        self._save(changing, 1)

    @precondition(lambda self: self.step)
    @rule(changing=st.sets(st.sampled_from(STILL)))
    def save_the_same_step_again(self, changing: set[str]) -> None:
        self._save(changing, 0)

    @rule(changing=st.sets(st.sampled_from(STILL)), death=DEATHS)
    def be_killed_in_a_save(self, changing: set[str], death: int) -> None:
        self._save(set(), 1)
        self._save(changing, 1, death)

    def _save(self, changing: set[str], steps: int, death: int = NEVER) -> None:
        self.step += steps
        self.num_changes += 1
        for name in sorted(changing | {"trained"}):
            self.model[name][self.num_changes] = self.num_changes
        wanted = {name: tensor.clone() for name, tensor in self.model.items()}
        key = self.step, self.lineage.run_id
        before = self._there().get(key)
        store = CheckpointStore(self.root, durable=Cut(death))
        state = {"model": dict(self.model), "train_state": {"step": torch.tensor(self.step)}}
        target = SaveTarget(store, self.step, CheckpointKind.FULL, Origin(self.lineage, "1 rank", {}))
        try:
            info = self.saver.save(state, target).durable.result()
        except (Crash, SaveFailed):
            # DCP makes a failed save of the end of the process.
            if self._there().get(key) != before:
                self.saved[key] = wanted
            self.resume(-1)
            return
        assert info is not None
        self.saved[key] = wanted
        self.housekeeping.note_committed(info, store)

    @rule(death=st.just(NEVER) | DEATHS)
    def prune(self, death: int) -> None:
        store = CheckpointStore(self.root, durable=Cut(death))
        try:
            self.housekeeping.purge(store)
        except Crash:
            self.resume(-1)

    @precondition(lambda self: self._steps())
    @rule(which=st.integers(0, 9))
    def remove_by_hand(self, which: int) -> None:
        steps = self._steps()
        store = CheckpointStore(self.root)
        store.empty(store.discard(store.get(steps[which % len(steps)])))

    @precondition(lambda self: self._steps())
    @rule(which=st.integers(0, 9))
    def pin_or_unpin(self, which: int) -> None:
        steps = self._steps()
        with CheckpointStore(self.root).pins.changing() as pinned:
            pinned ^= {steps[which % len(steps)]}

    @precondition(lambda self: self._steps())
    @rule(which=st.integers(0, 9))
    def roll_back(self, which: int) -> None:
        steps = self._steps()
        self.resume(steps[which % len(steps)])

    @precondition(lambda self: self._steps())
    @rule(which=st.integers(0, 9), index=st.sampled_from([layout.CHANGES, layout.STILL]))
    def damage(self, which: int, index: int) -> None:
        steps = self._steps()
        path = self.root / layout.step_dir(steps[which % len(steps)]) / layout.data_file(0, index)
        if path.exists():
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            self.damaged ^= {self._id(path)}  # A second time makes it what it was.

    @rule()
    def resume_here(self) -> None:
        """Load in the process that trains."""
        self._load(-1)
        self.plans.forget_saves()

    def resume(self, step: int) -> None:
        """Start another process, which finishes what the last one left, and loads `step` or the latest."""
        recover(CheckpointStore(self.root))
        self.start()
        self._load(step)

    def _load(self, step: int) -> None:
        store = CheckpointStore(self.root)
        while True:
            source = choose_source(store, step, Checkpoint(load_step=step, new_branch=step != -1))
            if source is None:
                self.lineage, self.step = new_run(), 0
                return
            path = Path(str(source.path))
            if not self._is_damaged(path):
                break
            step = -1
            store.quarantine(source.step, ["damaged"])
        manifest = Manifest.of_folder(path)
        assert manifest is not None
        state: dict[str, Any] = {"model": {name: torch.ones(NUMEL) for name in self.model}}
        dcp_load(state, checkpoint_id=path, no_dist=True)
        assert same(state["model"], self.saved[source.step, manifest.lineage.run_id])
        self.model = state["model"]
        self.lineage, self.step = source.lineage, source.step

    def _steps(self) -> list[int]:
        return [info.step for info in CheckpointStore(self.root).committed()]

    def _there(self) -> dict[tuple[int, str], bytes]:
        """Return the manifests of all steps, by step and run."""
        found = CheckpointStore(self.root).intact()
        return {(info.step, info.run_id): (Path(str(info.path)) / layout.MANIFEST).read_bytes() for info in found}

    def _is_damaged(self, folder: Path) -> bool:
        return any(self._id(path) in self.damaged for path in folder.iterdir())

    def _id(self, path: Path) -> tuple[int, int]:
        return path.stat().st_dev, path.stat().st_ino

    @invariant()
    def no_checkpoint_was_changed_by_what_happened_to_another(self) -> None:
        for folder in self.root.glob("*step-*"):
            manifest = Manifest.of_folder(folder)
            assert manifest is not None, folder
            for name, record in manifest.files.items():
                is_right = FileRecord.of((folder / name).read_bytes()) == record
                assert is_right == (self._id(folder / name) not in self.damaged), folder / name

    @invariant()
    def no_byte_stays_after_its_last_name(self) -> None:
        names: dict[tuple[int, int], int] = {}
        for path in self.root.rglob("*"):
            if path.is_file():
                assert path.parent == self.root or Manifest.of_folder(path.parent) is not None, path
                names[self._id(path)] = names.get(self._id(path), 0) + 1
                assert path.stat().st_nlink >= names[self._id(path)]
        assert all(path.stat().st_nlink == names[self._id(path)] for path in self.root.rglob("*") if path.is_file())
        self.damaged &= names.keys()  # Another file may get the number of one that is gone.

    @invariant()
    def no_file_is_shared_more_often_than_it_may_be(self) -> None:
        files = (path for path in self.root.rglob(layout.data_file(0, layout.STILL)))
        assert all(path.stat().st_nlink <= 1 + FULL_EVERY for path in files)

    def teardown(self) -> None:
        self.folder.cleanup()


TestIncrementalFolder = IncrementalFolder.TestCase
TestIncrementalFolder.settings = settings(max_examples=examples(500), stateful_step_count=15, deadline=None)
