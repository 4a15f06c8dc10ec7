"""Carry out drawn runs, with real processes, and compare them with a straight run: `python -m tests.e2e.random_runs`.

Each start must resume what is promised, and train the steps of a run that nothing befell: with the same ranks bit for
bit. Where the number of ranks changes, the loaded state is one that was trained, bit for bit, equal states train
equally on equal ranks, and the losses differ from those of the straight run by rounding only.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests import keepers
from tests.checkpoint.images.spoiled import keeper_of, other_bytes
from tests.e2e.drawn_run import DrawnRun, Leg, draw
from tests.e2e.killed_jobs import DEADLINE_SECONDS, GRACE_SECONDS, BareStart, Order, Tally
from tests.forked import Forked
from tests.processes import send
from tests.store.filled import flip
from torchtitan_lite.checkpoint.staging.mark import read_mark
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore

MORE_STEPS = 5
"""The last start trains this many more than any before it."""
NEVER = 10**9
ALL_DAMAGED = "AllCheckpointsDamaged"
TOLERANCE = 1e-4
"""Relative, of losses on another number of ranks: sums are taken in another order."""


class RandomRun:
    """The job of `drawn`, in `folder`."""

    def __init__(self, drawn: DrawnRun, folder: Path, runtime: Path, tally: Tally) -> None:
        self.drawn, self.tally, self._runtime = drawn, tally, runtime
        self._order = Order(
            folder,
            {"keep_latest_k": 0, "max_failed_saves": 1000, **drawn.keys},
            steps=NEVER,
            width=drawn.width,
            runtime=runtime,
            dropout=drawn.dropout,
            has_digests=True,
        )
        has_tier, is_in_steps = drawn.keys.get("memory_interval", 0) > 0, "interval_type" not in drawn.keys
        self._promises = Promises(folder, has_tier, drawn.keys["interval"] if is_in_steps else 0)
        self._command = Command()
        self._most = 0
        """The highest step that was trained."""
        self._starts: list[BareStart] = []
        self._number = 0

    def carry_out(self) -> None:
        """Run all starts, and what happens between them; raise AssertionError where a promise is broken."""
        try:
            for leg in self.drawn.legs:
                self._run(leg)
                for what, place in zip(leg.between, leg.places[4:], strict=False):
                    self._befall(what, leg.places[3], place)
            self._finish()
            self._compare()
        except BaseException:
            for start in self._starts:
                start.kill()
            raise
        finally:
            self.tally["runs"] += 1

    def _launch(self, ranks: int, command: Command, steps: int = NEVER) -> BareStart:
        self._number += 1
        keys, load = self._order.keys | command.keys, command.step if command.how == "load(step)" else -1
        start = BareStart(replace(self._order, ranks=ranks, keys=keys, load=load, steps=steps), self._number)
        self._starts.append(start)
        self.tally["starts"] += 1
        return start

    def _run(self, leg: Leg) -> None:
        self._command = command = self._command_of(leg)
        before, expected = self._promises.committed(), self._promises.expected(command)
        without_images = replace(self._promises, held=None).expected(command)
        start = self._launch(leg.ranks, command)
        if not leg.steps:
            start.wait_for(lambda: all(start.of_event("begun", rank) for rank in start.all_ranks))
            # Waits for nothing: the moment of the end is what is drawn.
            time.sleep(10 * leg.moment)
        elif not start.wait_for(lambda: start.resumed is not None):
            return self._refused(start)
        else:
            self._check_resumed(start, expected)
            until = (start.resumed or 0) + leg.steps
            assert start.wait_for(lambda: start.trained() >= until), f"the start ended:\n{start.tail()}"
            time.sleep(leg.moment)
        kept_since = self._end(start, leg)
        if not leg.steps and start.resumed is not None:
            # The keeper may have been killed before the start looked for images.
            self._check_resumed(start, without_images if kept_since else expected)
        self._note_end(start, before, kept_since)
        if leg.end == "signal" and leg.steps:
            last = start.trained(max)
            assert self._promises.on_disk() == last, f"left at step {last} for a signal:\n{start.tail()}"

    def _command_of(self, leg: Leg) -> Command:
        if leg.load == "the same" and self._command.how in ("latest", "load_step"):
            step = self._command.step
            is_there = step == -1 or step in [info.step for info in self._promises.committed()]
            return self._command if is_there else Command()
        committed = self._promises.committed()
        if leg.load in ("latest", "the same") or not committed:
            return Command()
        return Command(leg.load, committed[int(leg.places[0] * len(committed))].step)

    def _check_resumed(self, start: BareStart, expected: Expected) -> None:
        self.tally["from memory"] += start.is_from_memory
        self.tally["rolled back"] += self._command.how != "latest"
        assert start.resumed is not None
        wrong = expected.wrong(start.resumed)
        self.tally["lost"] += bool(wrong)
        assert not wrong, f"start {self._number}: {wrong}:\n{start.tail()}"

    def _refused(self, start: BareStart) -> None:
        """Note that `start` has ended by itself; it may only if nothing but damaged checkpoints is left."""
        start.wait(DEADLINE_SECONDS)
        is_right = ALL_DAMAGED in start.tail() and self._promises.may_be_refused()
        self.tally["lost"] += not is_right
        assert is_right, f"start {self._number} ended:\n{start.tail()}"
        self.tally["refused"] += 1
        for path in self._promises.damaged_on_disk():
            shutil.rmtree(path)

    def _end(self, start: BareStart, leg: Leg) -> int:
        """End `start` as `leg` says; return from which step on images are at the keeper, 0 for all."""
        self.tally[f"ended by {leg.end}"] += 1
        kept_since = 0
        if leg.end == "rank":
            start.kill_one(int(leg.places[1] * leg.ranks))
            start.wait(GRACE_SECONDS)
        elif leg.end == "error":
            start.order.request.touch()
            start.wait_for(lambda: False)
            start.wait(GRACE_SECONDS)
            start.order.request.unlink(missing_ok=True)
        elif leg.end == "signal":
            start.send(signal.SIGTERM)
            start.wait()
        elif leg.end == "keeper and ranks":
            self._kill_keeper()
            kept_since = NEVER
        elif leg.end == "keeper, then ranks":
            self._kill_keeper()
            kept_since = start.trained(max) + 1
            until = start.trained() + int(leg.places[2] * 6)
            start.wait_for(lambda: start.trained() >= until)
        start.kill()
        return kept_since

    def _note_end(self, start: BareStart, before: list[CheckpointInfo], kept_since: int) -> None:
        self._most = max(self._most, start.trained(max))
        wrong = self._promises.note_end(start, self._command, before, kept_since)
        self.tally["lost"] += bool(wrong)
        assert not wrong, f"start {self._number}: {wrong}:\n{start.tail()}"

    def _kill_keeper(self) -> None:
        for pid in keepers.keepers_in(self._runtime):
            send(pid, signal.SIGKILL)
            keepers.has_ended(pid)

    def _befall(self, what: str, which: float, where: float) -> None:
        """Do `what` to the disk or to the memory, while no start runs."""
        committed = self._promises.committed()
        self.tally[what] += 1
        if what == "kill keeper":
            self._kill_keeper()
            self._promises.held = None
        elif what == "damage image":
            self._damage_image(which)
        elif committed:
            info = committed[-1 if "latest" in what else int(which * len(committed))]
            folder = self._promises.root / layout.step_dir(info.step)
            if what.startswith("delete"):
                shutil.rmtree(folder)
                if info == committed[-1]:
                    self._promises.held = None
            else:
                files = sorted(path for path in folder.iterdir())
                path = files[int(which * len(files))]
                flip(path, int(where * path.stat().st_size))
                self._promises.note_damaged(info.step)

    def _damage_image(self, which: float) -> None:
        if not keepers.keepers_in(self._runtime):
            return
        with keeper_of(self._promises.root) as (_, held):
            found = [(each, marked) for each in held if (marked := read_mark(each.mark_fd)) is not None]
            latest = max((marked.step for _, marked in found), default=0)
            images = [(each, marked) for each, marked in found if marked.step == latest]
            if images:
                other_bytes(*images[int(which * len(images))])
                self._promises.held = None

    def _finish(self) -> None:
        """Run one more start, to the end of the run."""
        self._command = Command()
        before, last = self._promises.committed(), self._most + MORE_STEPS
        expected = self._promises.expected(self._command)
        start = self._launch(self.drawn.last_ranks, self._command, steps=last)
        if not start.wait_for(lambda: start.resumed is not None):
            self._refused(start)
            expected = self._promises.expected(self._command)
            start = self._launch(self.drawn.last_ranks, self._command, steps=last)
            assert start.wait_for(lambda: start.resumed is not None), start.tail()
        self._check_resumed(start, expected)
        codes = start.wait()
        assert codes == [0] * self.drawn.last_ranks, f"the last start ended with {codes}:\n{start.tail()}"
        self._note_end(start, before, NEVER)
        assert self._promises.on_disk() == last, f"step {last} is not on disk:\n{start.tail()}"
        for pid in keepers.keepers_in(self._runtime):
            assert keepers.has_ended(pid), f"the keeper {pid} is still alive"

    def _compare(self) -> None:
        """Compare all that was loaded and trained with the straight runs."""
        references = {start.order.ranks for start in self._starts} | (set() if self.drawn.keeps_ranks else {1})
        straight = {ranks: _straight(self.drawn, ranks, self._most + MORE_STEPS) for ranks in references}
        wrong: list[str] = []
        followed: dict[tuple[int, int, str], tuple[str, ...]] = {}
        for ranks, states in straight.items():
            followed |= {(ranks, step, states[step - 1][0]): after for step, after in states.items() if step}
        seen = {(0, states[0][0]) for states in straight.values()}
        for number, start in enumerate(self._starts, 1):
            of_ranks = [start.of_event("trained", rank) for rank in start.all_ranks]
            state = next((line["state"] for line in start.of_event("resumed")), "")
            if start.resumed is not None and (start.resumed, state) not in seen:
                wrong.append(f"start {number} loaded another state of step {start.resumed} than was trained")
            for lines in zip(*of_ranks, strict=False):
                step, after = lines[0]["step"], (lines[0]["state"], *(line["loss"] for line in lines))
                if followed.setdefault((start.order.ranks, step, state), after) != after:
                    wrong.append(f"start {number}: step {step} is another one than from the same state before")
                if self.drawn.keeps_ranks:
                    if straight[start.order.ranks][step] != after:
                        wrong.append(f"start {number}: step {step} is not that of the straight run")
                elif not math.isclose(
                    found := _mean(after[1:]), expected := _mean(straight[1][step][1:]), rel_tol=TOLERANCE
                ):
                    wrong.append(f"start {number}: the loss of step {step} is {found}, expected {expected}")
                state = after[0]
                seen.add((step, state))
        self.tally["wrong"] += len(wrong)
        assert not wrong, "\n".join(wrong[:20])


@dataclass(frozen=True)
class Held:
    """An image that every rank has reported."""

    step: int
    branch: int | None = None
    """The step at which its branch begins, if that has saved nothing yet: other starts do not count it."""


@dataclass(frozen=True)
class Command:
    """Which step a start wants, and how it says so."""

    how: str = "latest"
    step: int = -1

    @property
    def keys(self) -> dict[str, object]:
        """The keys of [checkpoint] that say it."""
        if self.how in ("latest", "load(step)"):
            return {}
        return {"load_step": self.step, "new_branch": self.how != "load_step"}


@dataclass(frozen=True)
class Expected:
    """What a start must resume."""

    least: int
    only: frozenset[int] | None = None
    """The steps that it may resume, if not all."""

    def wrong(self, resumed: int) -> str:
        """Return what is wrong with the step `resumed`; empty if nothing is."""
        if resumed >= self.least and (self.only is None or resumed in self.only):
            return ""
        among = "" if self.only is None else f", one of {sorted(self.only)}"
        return f"step {self.least} or a later one was promised{among}; step {resumed} was resumed"


@dataclass
class Promises:
    """What the next start of the job in `folder` must find: no step that was reported is lost.

    It follows what each start reported and what is on the disk now, and knows nothing of what the keeper holds.
    Promised are the latest committed checkpoint that is not damaged, and, with `memory_interval` and while the keeper
    lives, the latest step that every rank reported as an image, or the step that was resumed from memory.
    """

    folder: Path
    has_tier: bool
    """Whether it makes images that no save replaces: `memory_interval` is not 0."""
    interval: int = 0
    """The steps from one save to the next; 0 if other things decide."""
    held: Held | None = None
    _damaged: set[tuple[int, int, int]] = field(default_factory=set)
    """Step, inode and time of each damaged folder."""
    _of_branches: dict[int, set[int]] = field(default_factory=dict)
    """The steps that were trained on branches from a step."""

    @property
    def root(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoint"

    def committed(self) -> list[CheckpointInfo]:
        """Return the full checkpoints on disk that nothing has damaged, by ascending step."""
        full = [info for info in CheckpointStore(self.root).committed() if info.kind is CheckpointKind.FULL]
        return [info for info in full if self._identity(info.step) not in self._damaged]

    def on_disk(self) -> int:
        """Return the latest step on disk, 0 for none."""
        return max((info.step for info in self.committed()), default=0)

    def damaged_on_disk(self) -> list[Path]:
        """Return the folders that are damaged and have not been set aside."""
        folders = [(step, self.root / layout.step_dir(step)) for step, *_ in self._damaged]
        return [path for step, path in folders if path.exists() and self._identity(step) in self._damaged]

    def note_damaged(self, step: int) -> None:
        """Note that a file of `step` was changed."""
        self._damaged.add(self._identity(step))

    def expected(self, command: Command) -> Expected:
        """Return what a start with `command` must resume."""
        if command.how in ("load(step)", "load_step, new_branch"):
            return Expected(command.step, frozenset({command.step}))
        if command.how == "load_step" and not self._is_on_branch(command.step):
            steps = self._of_branches.get(command.step, set())
            return Expected(max(command.step, self._held_on(command.step)), frozenset({command.step} | steps))
        return Expected(max(self.on_disk(), self._held_on(None)))

    def _held_on(self, branch: int | None) -> int:
        return self.held.step if self.held is not None and self.held.branch == branch else 0

    def may_be_refused(self) -> bool:
        """Return whether the next start may end because all checkpoints are damaged."""
        return self.held is None and not self.committed() and bool(self.damaged_on_disk())

    def note_end(self, start: BareStart, command: Command, before: list[CheckpointInfo], kept_since: int) -> str:
        """Note how `start` ended, before which `before` was on disk; return what is wrong with the disk now.

        Only images of steps from `kept_since` on are at the keeper.
        """
        saved = {line["step"] for line in start.of_event("save_started")}
        acknowledged = max((line["step"] for line in start.of_event("committed")), default=None)
        new = [info.step for info in self.committed() if info not in before]
        on_disk = self.on_disk()
        if acknowledged is not None and on_disk < acknowledged:
            return f"step {acknowledged} was committed, step {on_disk} is on disk"
        if not new and on_disk != max((info.step for info in before), default=0):
            return f"nothing was committed, and step {on_disk} is on disk"
        if new and not {*new} <= saved:
            return f"{new} are new on disk, {sorted(saved)} were saved"
        if start.resumed is not None:
            if command.how == "latest" and self._owes(start, before) and start.resumed + 1 not in saved:
                return f"step {start.resumed} was resumed from memory, and what was overdue was not saved"
            self._note_images(start, command, kept_since, has_saved=bool(saved), has_committed=bool(new))
        elif kept_since:
            self.held = None
        return ""

    def _owes(self, start: BareStart, before: list[CheckpointInfo]) -> bool:
        """Return whether the disk lacked a multiple of `interval`, and `start` had the time to save its first step.

        Where a load from memory reads no damaged file, it takes the file's step for durable.
        """
        if not (self.interval and start.is_from_memory) or start.resumed is None or self._damaged:
            return False
        on_disk = max((info.step for info in before), default=0)
        is_overdue = self.interval * (on_disk // self.interval + 1) <= start.resumed
        return is_overdue and start.trained() > start.resumed + 1

    def _note_images(
        self, start: BareStart, command: Command, kept_since: int, *, has_saved: bool, has_committed: bool
    ) -> None:
        assert start.resumed is not None
        branch = None if command.how == "latest" or has_committed else command.step
        if command.how == "load_step" and self._is_on_branch(command.step):
            branch = None
        if command.step != -1:
            self._of_branches.setdefault(command.step, set()).update(line["step"] for line in start.of_event("trained"))
        images = {step for step in start.steps("image_ready") if step >= kept_since} if self.has_tier else set()
        stays = start.is_from_memory and not kept_since and (self.has_tier or not has_saved)
        if images:
            self.held = Held(max(images), branch)
        else:
            self.held = Held(start.resumed, branch) if stays else None

    def _is_on_branch(self, step: int) -> bool:
        """Return whether the latest checkpoint is of a branch from `step`."""
        return any(info.lineage.branch_point == step for info in self.committed()[-1:])

    def _identity(self, step: int) -> tuple[int, int, int]:
        found = (self.root / layout.step_dir(step)).stat()
        return step, found.st_ino, found.st_mtime_ns


def new_tally() -> Tally:
    return Tally("random runs", "runs", "lost", "wrong")


def carry_out(drawn: DrawnRun, folder: Path, runtime: Path, tally: Tally) -> None:
    """Carry out `drawn` in the new `folder`; raise AssertionError, with all of `drawn`, where a promise is broken."""
    try:
        RandomRun(drawn, folder, runtime, tally).carry_out()
    except AssertionError as error:
        raise AssertionError(f"{drawn}\n{error}") from None


_STRAIGHT: dict[tuple[int, int, float], dict[int, tuple[str, ...]]] = {}


def _straight(drawn: DrawnRun, ranks: int, steps: int) -> dict[int, tuple[str, ...]]:
    """Return digest and losses of each step of a run of at least `steps` that nothing befalls."""
    key = (ranks, drawn.width, drawn.dropout)
    found = _STRAIGHT.get(key, {})
    if max(found, default=0) < steps:
        with tempfile.TemporaryDirectory() as folder:
            order = Order(Path(folder), {"enable_checkpoint": False}, max(100, 2 * steps), ranks, drawn.width)
            start = BareStart(replace(order, dropout=drawn.dropout, has_digests=True), 1)
            assert start.wait() == [0] * ranks, start.tail()
            of_ranks = [start.of_event("trained", rank) for rank in start.all_ranks]
            found = {0: (start.of_event("resumed")[0]["state"],)}
            for lines in zip(*of_ranks, strict=True):
                found[lines[0]["step"]] = (lines[0]["state"], *(line["loss"] for line in lines))
        _STRAIGHT[key] = found
    return found


def _mean(losses: tuple[str, ...]) -> float:
    return sum(map(float.fromhex, losses)) / len(losses)


def main() -> int:
    """Carry out the runs of consecutive seeds; return how many have failed, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.random_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that failed")
    arguments = parser.parse_args()
    keepers.turn_off()
    Forked(time.sleep, 0).wait(DEADLINE_SECONDS)
    tally, failed = new_tally(), []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        folder, began = Path(tempfile.mkdtemp(prefix=f"random-run-{seed}-")), time.monotonic()
        with keepers.tier() as runtime:
            try:
                carry_out(draw(seed), folder / "run", runtime, tally)
                print(f"seed {seed}: as promised, {time.monotonic() - began:.1f} s", flush=True)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}: FAILED, in {folder}\n{error}", flush=True)
        if seed not in failed or not arguments.keep:
            shutil.rmtree(folder)
    print(f"{tally}; failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
