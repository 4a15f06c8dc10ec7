"""Every operation at which a save, a replacement, a removal or a recovery can be cut."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.store.crashing import Contents, Crash, Cut, contents, steps_of
from tests.store.filled import commit, remove_begun
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.store import CheckpointStore

Act = Callable[[CheckpointStore], object]
Renames = Sequence[tuple[str, str]]


def save(store: CheckpointStore, step: int, data: bytes) -> CheckpointInfo:
    return commit(store, step, data, b"metadata of " + data)


UNSUPPORTED = ("step-2.corrupt", "step-10.bak", "step-abc", "step-50", "step-60")


def put_unknown_names(root: Path) -> None:
    for name in UNSUPPORTED[:-1]:
        (root / name).mkdir(parents=True)
    (root / UNSUPPORTED[0] / "notes").write_bytes(b"theirs")
    (root / UNSUPPORTED[-1]).symlink_to("gone")


def foreign(root: Path) -> Contents:
    return {name: found for name, found in contents(root).items() if name.split("/")[0] in UNSUPPORTED}


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name[0] == "." or ".staging" in path.name]


@dataclass
class Scenario:
    """A folder and the operation on `step` that is cut there."""

    before: Callable[[Path], object]
    step: int
    act: Act


def two_checkpoints(root: Path) -> None:
    put_unknown_names(root)
    store = CheckpointStore(root, durable=Cut())
    save(store, 1, b"one")
    save(store, 2, b"two")


def one_in_the_way(root: Path) -> None:
    two_checkpoints(root)
    (root / "step-3").mkdir()
    (root / "step-3" / ".metadata").write_bytes(b"theirs")


def an_attempt_before(root: Path) -> None:
    two_checkpoints(root)
    (root / "step-2.staging" / "folder").mkdir(parents=True)
    (root / "step-2.staging" / "__5_0.distcp").write_bytes(b"of an earlier attempt")


def all_leftovers(root: Path) -> None:
    two_checkpoints(root)
    (root / "step-2").rename(root / ".replaced-step-2-1")
    shutil.copytree(root / "step-1", root / ".replaced-step-1-1")
    shutil.copytree(root / "step-1", root / ".trash-step-3-1")
    shutil.copytree(root / ".replaced-step-2-1", root / "step-2.staging")


def saving(step: int) -> Act:
    return lambda store: save(store, step, b"new")


def abandon(step: int, store: CheckpointStore) -> None:
    remove_begun(store, step)


SAVES = {
    "commit into nothing": Scenario(put_unknown_names, 1, saving(1)),
    "commit": Scenario(two_checkpoints, 3, saving(3)),
    "replace": Scenario(two_checkpoints, 2, saving(2)),
    "replace after an attempt": Scenario(an_attempt_before, 2, saving(2)),
    "replace after a crash": Scenario(all_leftovers, 2, saving(2)),
    "commit over what is not ours": Scenario(one_in_the_way, 3, saving(3)),
}
SCENARIOS = SAVES | {
    "delete": Scenario(two_checkpoints, 1, lambda store: store.empty(store.discard(store.get(1)))),
    "delete after a crash": Scenario(all_leftovers, 1, lambda store: store.empty(store.discard(store.get(1)))),
    "recover": Scenario(all_leftovers, 1, lambda store: store.recover()),
}
NO_EXCHANGE = [("replace", False), ("replace after an attempt", False)]


class Cuts:
    """Cuts an operation on copies of a folder, and counts the cuts."""

    def __init__(self, base: Path, exchanges: bool) -> None:
        self.base, self.exchanges = base, exchanges
        self.num_copies = self.num_cuts = 0

    def copy(self, source: Path) -> Path:
        self.num_copies += 1
        # Links are faster, and enough: no operation changes an existing file.
        return Path(shutil.copytree(source, self.base / str(self.num_copies), symlinks=True, copy_function=os.link))

    def of(self, source: Path, act: Act, unsynced: Renames = ()) -> Iterator[tuple[Path, Renames]]:
        """Yield `source` after `act` was cut at operation 1, 2, 3 ..., each state once; last, after all of it.

        With the renames, made here or before (`unsynced`), that a later power cut may still undo.
        """
        states: list[tuple[Contents, Renames]] = []
        for at in itertools.count(1):
            for power in (False, True):
                root = self.copy(source)
                disk = Cut(at, self.exchanges, power, unsynced=[(root / src, root / dst) for src, dst in unsynced])
                finished = self._finishes(act, root, disk)
                revocable = [] if power else [(src.name, dst.name) for src, dst in disk.unsynced]
                # What follows depends on nothing else.
                if (state := (contents(root), revocable)) not in states or finished:
                    states.append(state)
                    yield root, revocable
                shutil.rmtree(root)
                if finished:
                    return
                if not disk.unsynced:
                    break

    def _finishes(self, act: Act, root: Path, disk: Cut) -> bool:
        try:
            act(CheckpointStore(root, durable=disk))
        except Crash:
            self.num_cuts += 1
            return False
        return True


@pytest.mark.parametrize(("name", "exchanges"), [*((name, True) for name in SCENARIOS), *NO_EXCHANGE])
def test_a_save_cut_anywhere_leaves_the_old_or_the_new_checkpoint_bit_for_bit(
    name: str, exchanges: bool, base: Path
) -> None:
    scenario, source = SCENARIOS[name], base / "source"
    scenario.before(source)
    first, second = Cuts(base / "first", exchanges), Cuts(base / "second", exchanges)
    complete = first.copy(source)
    scenario.act(CheckpointStore(complete, durable=Cut(exchanges=exchanges)))
    old, new, theirs = steps_of(source), steps_of(complete), foreign(source)
    answers = []
    for root, revocable in first.of(source, scenario.act):
        answers.append(steps_of(root))
        assert answers[-1] in (old, new)
        next_acts: list[Act] = [CheckpointStore.recover]
        if revocable:
            next_acts.append(partial(abandon, scenario.step))
        for then in next_acts:
            for again, _ in second.of(root, then, revocable):
                answer = steps_of(again)
                assert answer in ([old, new] if revocable else answers[-1:])
                CheckpointStore(again, durable=Cut()).recover()
                assert steps_of(again) == answer
                assert (foreign(again), leftovers(again)) == (theirs, [])
                if scenario.before is one_in_the_way:
                    assert b"theirs" in [path.read_bytes() for path in again.glob("step-3*/.metadata")]
    assert not revocable
    assert (answers[0], answers[-1]) == (old, new)
    assert first.num_cuts > 5
    print(f"{name}: {first.num_cuts} cuts, {second.num_cuts} cuts of what is done next")


@pytest.mark.parametrize(("name", "exchanges"), [*((name, True) for name in SAVES), *NO_EXCHANGE])
def test_a_disk_that_fails_once_anywhere_leaves_the_old_or_the_new_checkpoint(
    name: str, exchanges: bool, base: Path
) -> None:
    scenario, source, copies = SCENARIOS[name], base / "source", Cuts(base / "copies", exchanges)
    scenario.before(source)
    complete = copies.copy(source)
    scenario.act(CheckpointStore(complete, durable=Cut(exchanges=exchanges)))
    old, new = steps_of(source), steps_of(complete)
    for at in itertools.count(1):
        root = copies.copy(source)
        disk = Cut(at, exchanges, stop=OSError(errno.ENOSPC, "No space left on device"))
        store = CheckpointStore(root, durable=disk)
        try:
            scenario.act(store)
        except OSError:
            remove_begun(store, scenario.step)
            assert steps_of(root) in (old, new)
            scenario.act(store)
        assert steps_of(root) == new
        CheckpointStore(root, durable=Cut()).recover()
        assert (steps_of(root), leftovers(root)) == (new, [])
        shutil.rmtree(root)
        if disk.done < at:
            break
