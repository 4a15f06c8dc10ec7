"""A kill at any point of a save or a load loses no acknowledged step, and no number is wrong.

A case is one job of two ranks that a fault kills at a point (docs/proof.md) and that is started again in the same
folder. The second start must resume from the latest step that the first one reported as committed, or from a later one.
From there its losses, and at the end its state, must be those of the run that is not killed, bit for bit. A case whose
fault does not fire fails.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killed_jobs import RANKS, BareStart, Order, Tally, printed
from torchtitan_lite.faults import POINTS
from torchtitan_lite.store import layout

pytestmark = pytest.mark.slow

STEPS = 12
INTERVAL = 3
KEPT = 2
SAVE = 6
"""The save in which most cases are killed: step 3 is committed by then, and no longer the latest after it."""
PURGE = SAVE + INTERVAL
"""The first save that purges a checkpoint."""
BEYOND = PURGE + 1
"""The step at which the trainers are killed after a writer process was: its failed save is reported by then."""

# async_mode, who is killed, at which points, and the additional points of --exhaustive; "write+1" is its second hit.
SAVES = (
    (
        "disabled",
        "rank 0",
        "save preflight plan open write write+1 fsync metadata manifest seal commit committed purge step exit",
        "",
    ),
    ("disabled", "rank 1", "write", "save plan open write+1 fsync step exit"),
    ("disabled", "all", "commit", "save write fsync manifest seal committed purge step"),
    (
        "async",
        "rank 0",
        "stage",
        "save plan open write+1 fsync metadata manifest seal commit committed purge",
    ),
    ("async", "rank 1", "fsync", "stage plan open step"),
    ("async", "all", "committed", "stage write metadata commit"),
    ("async_with_pinned_mem", "rank 0", "stage", "metadata commit committed"),
    ("async_with_pinned_mem", "rank 1", "", "stage plan"),
    ("async_with_pinned_mem", "all", "", "stage commit"),
    ("async_with_pinned_mem", "writer 0", "write fsync", "open"),
    ("async_with_pinned_mem", "writer 1", "write+1", ""),
)
"""The first save of a step: every point in one mode, and points that only one mode has in that mode."""

SAVES_AGAIN = (
    ("disabled", "rank 0", "write+1 manifest commit committed", "metadata seal save plan open fsync"),
    ("disabled", "rank 1", "", "open write fsync"),
    ("disabled", "all", "commit", "write manifest seal committed"),
    ("async", "rank 0", "stage", "write metadata manifest seal commit committed"),
    ("async", "rank 1", "", "plan write+1 fsync"),
    ("async", "all", "", "write commit committed"),
    ("async_with_pinned_mem", "rank 0", "committed", "commit"),
    ("async_with_pinned_mem", "all", "", "seal"),
)
"""A save of a step that exists already, with other contents."""

STARTS = (
    ("disabled", "rank 0", "recover lease listing load read", "read+1"),
    ("disabled", "rank 1", "read", "load read+1"),
    ("disabled", "all", "", "recover load read"),
)
"""The start after a save was interrupted directly before its commit; the third start resumes."""

DAMAGED = (("disabled", "rank 0", "quarantine", ""), ("disabled", "all", "", "quarantine"))
"""The start that finds the latest checkpoint damaged and must resume from the one before it."""


LEFT_OUT = {
    "heartbeat": "is timed by the clock; no run here is long enough",
    "hugging_face": "is in test_last_save_in_hf.py",
    **dict.fromkeys(("roll_back", "rolled_back"), "is in test_divergence.py"),
    "upload": "is in another process; bucket/test_upload_kills.py",
    **dict.fromkeys(("image", "digest", "mark"), "is in images/test_images.py, and random kills hit it"),
}


@dataclass(frozen=True)
class Case:
    """One job that is killed."""

    how: str
    mode: str
    victim: str
    point: str
    is_exhaustive: bool = False

    def __str__(self) -> str:
        return f"{self.how}-{self.mode}-{self.victim.replace(' ', '')}-{self.point}"

    @property
    def fault(self) -> str:
        """The value of TORCHTITAN_LITE_FAULT."""
        name, _, after = self.point.partition("+")
        who, _, rank = self.victim.partition(" ")
        conditions = {
            "step": {"purge": PURGE - KEPT * INTERVAL, "step": PURGE - 1}.get(name, SAVE)
            if self._is_of_a_save
            else None,
            "rank": rank or None,
            "process": {"rank": "trainer", "writer": "writer"}.get(who),
            "after": after or None,
        }
        given = ",".join(f"{key}={value}" for key, value in conditions.items() if value is not None)
        fault = f"kill@{name}:{given}"
        return f"{fault};kill@step:process=trainer,step={BEYOND}" if who == "writer" else fault

    @property
    def _is_of_a_save(self) -> bool:
        return self.how in ("save", "again") and self.point != "exit"


def _cases() -> Iterator[Case]:
    for how, table in (("save", SAVES), ("again", SAVES_AGAIN), ("start", STARTS), ("damaged", DAMAGED)):
        for mode, victim, points, more in table:
            yield from (Case(how, mode, victim, point) for point in points.split())
            yield from (Case(how, mode, victim, point, is_exhaustive=True) for point in more.split())


CASES = list(_cases())


def _each(how: str) -> pytest.MarkDecorator:
    marked = [
        pytest.param(case, id=str(case), marks=[pytest.mark.exhaustive] if case.is_exhaustive else [])
        for case in CASES
        if case.how == how
    ]
    return pytest.mark.parametrize("case", marked)


@dataclass(frozen=True)
class Straight:
    """A run that is not killed."""

    started: BareStart

    def differing(self, other: BareStart) -> dict[str, list[int]]:
        """Return, by rank, the steps whose loss in `other` differs from that of this run."""
        return {
            f"rank {rank}": steps
            for rank in range(RANKS)
            if (steps := [step for step, loss in other.losses(rank).items() if loss != self.started.losses(rank)[step]])
        }


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    kinds = ("killed", "resumed", "lost", "wrong", "faults did not fire", "survivors did not end")
    with printed(request, Tally("kill matrix", *kinds)) as counts:
        yield counts


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The run that saves each step once."""
    return _straight(_order(tmp_path_factory.mktemp("straight")))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The run that changes its parameters after the first save of a step, and then saves the step again."""
    return _straight(_order(tmp_path_factory.mktemp("changed"), saves_again=SAVE))


@pytest.mark.promise(
    "A job of two ranks that is killed at any point of a save resumes from the latest reported step or a later "
    "one, with the losses of an uninterrupted run.",
    section="crash",
)
@_each("save")
def test_a_killed_save_loses_nothing_and_the_losses_are_those_of_the_straight_run(
    case: Case, straight: Straight, tally: Tally, tmp_path: Path
) -> None:
    order = _order(tmp_path, case.mode, fault=case.fault)
    killed = _killed_start(order, 1, case)
    _was_killed(case, killed, tally)
    resumed = _start(replace(order, fault=""), 2)
    _nothing_is_lost(_acknowledged(case, [killed]), resumed, tally)
    _nothing_is_wrong([(killed, straight), (resumed, straight)], tally)


@pytest.mark.promise(
    "A job of two ranks that is killed at any point of a save resumes from the latest reported step or a later "
    "one, with the losses of an uninterrupted run.",
    section="crash",
)
@_each("again")
def test_a_killed_save_of_an_existing_step_leaves_the_old_or_the_new_checkpoint(
    case: Case, straight: Straight, changed: Straight, tally: Tally, tmp_path: Path
) -> None:
    order = _order(tmp_path, case.mode, fault=case.fault, saves_again=SAVE)
    killed = _killed_start(order, 1, case)
    _was_killed(case, killed, tally)
    resumed = _start(replace(order, fault="", saves_again=None), 2)
    _nothing_is_lost(SAVE, resumed, tally)
    # The first commit is reported before the second save starts, so only a second report acknowledges the new one.
    must_be_new = case.point == "committed" or _committed(killed).count(SAVE) > 1
    is_old = not must_be_new and bool(changed.differing(resumed))
    _nothing_is_wrong([(killed, changed), (resumed, straight if is_old else changed)], tally)


@pytest.mark.promise(
    "A start that is killed changes nothing for the next one, even while it quarantines a checkpoint.",
    section="crash",
)
@_each("start")
def test_a_killed_start_changes_nothing_for_the_next_one(
    case: Case, straight: Straight, tally: Tally, tmp_path: Path
) -> None:
    order = _order(tmp_path, case.mode)
    cut = _start(replace(order, fault=f"kill@commit:step={SAVE}"), 1, is_power_cut=True)
    assert _killed(cut) == {0}, f"no save was interrupted:\n{cut.tail()}"
    killed = _killed_start(replace(order, fault=case.fault), 2, case)
    _was_killed(case, killed, tally)
    resumed = _start(order, 3)
    _nothing_is_lost(_acknowledged(case, [cut, killed]), resumed, tally)
    _nothing_is_wrong([(started, straight) for started in (cut, killed, resumed)], tally)


@pytest.mark.promise(
    "A start that is killed changes nothing for the next one, even while it quarantines a checkpoint.",
    section="crash",
)
@_each("damaged")
def test_a_killed_quarantine_changes_nothing_for_the_next_start(
    case: Case, straight: Straight, tally: Tally, tmp_path: Path
) -> None:
    order = _order(tmp_path, case.mode)
    cut = _start(replace(order, fault=f"kill@step:step={PURGE - 1}"), 1, is_power_cut=True)
    manifest = order.folder / "checkpoint" / layout.step_dir(SAVE) / layout.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step"', b'"stop"', 1))
    killed = _killed_start(replace(order, fault=case.fault), 2, case)
    _was_killed(case, killed, tally)
    resumed = _start(order, 3)
    _nothing_is_lost(SAVE - INTERVAL, resumed, tally)
    aside = layout.aside_dir(SAVE, "corrupt")
    _nothing_is_wrong([(started, straight) for started in (cut, killed, resumed)], tally, {aside})


def test_there_are_enough_cases_and_every_point_is_in_a_case_without_exhaustive() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) >= 100
    slow = [case for case in CASES if not case.is_exhaustive]
    assert {case.point.partition("+")[0] for case in slow} == POINTS.keys() - LEFT_OUT.keys()


def _order(folder: Path, mode: str = "disabled", **options: Any) -> Order:
    keys = {"interval": INTERVAL, "keep_latest_k": KEPT, "async_mode": mode, "timeout_seconds": 30}
    return Order(folder / "run", keys, STEPS, **options)


def _start(order: Order, number: int, *, is_power_cut: bool = False) -> BareStart:
    """Run start `number` of `order` until all its processes have ended."""
    return BareStart(order, number).wait_for_end(is_power_cut=is_power_cut)


def _killed_start(order: Order, number: int, case: Case) -> BareStart:
    return _start(order, number, is_power_cut=case.victim == "all")


def _straight(order: Order) -> Straight:
    started = _start(order, 1)
    assert started.codes == [0] * RANKS, started.tail()
    return Straight(started)


def _was_killed(case: Case, killed: BareStart, tally: Tally) -> None:
    """Check that the fault fired in the process and at the point of `case`."""
    who, _, rank = case.victim.partition(" ")
    tally["survivors did not end"] += sum(code is None for code in killed.codes) if case.victim != "all" else 0
    found = _killed(killed)
    if who == "writer":
        failed = {line["step"] for line in killed.of_event("save_failed")}
        fired = SAVE in failed and found == set(range(RANKS))
    elif who == "rank":
        fired = found == {int(rank)}
    else:
        fired = bool(found)
    tally["killed"] += fired
    tally["faults did not fire"] += not fired
    assert fired, f"{case.fault} did not fire: exit codes {killed.codes}\n{killed.tail()}"


def _killed(started: BareStart) -> set[int]:
    """Return the ranks that ended by the SIGKILL of their own fault."""
    return {rank for rank, code in enumerate(started.codes) if code == -signal.SIGKILL}


def _committed(started: BareStart) -> list[int]:
    return [line["step"] for line in started.of_event("committed")]


def _end(started: BareStart, rank: int) -> str:
    """Return the digest of the state of `rank` at the end; empty if it did not get there."""
    return next((line["digest"] for line in started.of_event("end", rank)), "")


def _acknowledged(case: Case, starts: list[BareStart]) -> int:
    """Return the latest step that was reported as committed, or that must exist because of the point of the kill."""
    if case.point == "exit":
        return STEPS
    if case.point == "committed":
        return SAVE
    return max((step for started in starts for step in _committed(started)), default=0)


def _nothing_is_lost(acknowledged: int, resumed: BareStart, tally: Tally) -> None:
    ended = resumed.codes == [0] * RANKS
    is_lost = not ended or (resumed.resumed or 0) < acknowledged
    tally["resumed"] += not is_lost
    tally["lost"] += is_lost
    assert ended, f"exit codes {resumed.codes}\n{resumed.tail()}"
    assert not is_lost, f"step {acknowledged} was acknowledged, step {resumed.resumed} resumed\n{resumed.tail()}"


def _nothing_is_wrong(starts: list[tuple[BareStart, Straight]], tally: Tally, aside: Collection[str] = ()) -> None:
    """Check every loss of each start, the state at the end of the last one and the names in its folder.

    The folder holds the latest checkpoints and the names of `aside`.
    """
    resumed, straight = starts[-1]
    found = {
        **{f"losses of start {started.number}": expected.differing(started) for started, expected in starts},
        "ranks that end with another state": [
            rank for rank in range(RANKS) if _end(resumed, rank) != _end(straight.started, rank)
        ],
        "steps not trained": sorted(set(range((resumed.resumed or 0) + 1, STEPS + 1)) ^ resumed.losses(0).keys()),
        "left in the folder": sorted(_names(resumed) ^ {*_kept(), *aside}),
    }
    wrong = {what: which for what, which in found.items() if which}
    tally["wrong"] += bool(wrong)
    assert not wrong, f"{wrong}\n{resumed.tail()}"


def _names(started: BareStart) -> set[str]:
    return {path.name for path in (started.order.folder / "checkpoint").iterdir()}


def _kept() -> set[str]:
    """Return the names of the checkpoints that a finished run keeps."""
    return {layout.step_dir(step) for step in range(STEPS, 0, -INTERVAL)[:KEPT]}
