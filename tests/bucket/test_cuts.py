"""Every request of everything that a job does, cut before or after it, or its answer lost.

Wherever it is cut, readers find the old state or the new one, complete, before and after the next start; what was
acknowledged is the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.bucket.memory_objects import Bucket, Fate, Killed, Request, at
from tests.bucket.saving import (
    Job,
    found_in,
    new_job,
    new_store,
    pin,
    purge,
    remove_failed,
    save,
    set_aside_in,
    started,
)
from torchtitan_lite.bucket.objects import StoreUnavailable
from torchtitan_lite.errors import CheckpointError, SaveFailed

FATES = [fate for fate in Fate if fate is not Fate.CARRIED_OUT]


class Seen(NamedTuple):
    """What people and runs see of a folder."""

    steps: dict[int, bytes]
    pinned: frozenset[int]
    aside: list[tuple[int, str]]


def seen_in(bucket: Bucket) -> Seen:
    store, _ = new_store(bucket)
    aside = sorted((entry.step, entry.status.value) for entry in set_aside_in(store))
    return Seen(found_in(bucket), store.pins.read(), aside)


def nothing(job: Job) -> None:
    pass


@dataclass
class Case:
    """Something that a job does, after `before`, as a start that took the folder or is about to."""

    act: Callable[[Job], object]
    before: Callable[[Job], object] = nothing
    is_start: bool = False
    has_before: bool = True
    job: Job = field(init=False)
    bucket: Bucket = field(init=False)

    def prepare(self) -> None:
        self.bucket = Bucket()
        if self.has_before:
            self.job = started(self.bucket)
            self.before(self.job)
        if self.is_start:
            self.job = new_job(self.bucket)
        self.job.objects.requests.clear()

    def num_requests(self) -> tuple[int, Seen, Seen]:
        """Return how many requests it makes, and what is seen before and after it."""
        self.prepare()
        old = seen_in(self.bucket)
        self.act(self.job)
        return len(self.job.objects.requests), old, seen_in(self.bucket)


def saved(job: Job) -> None:
    for step in (5, 10, 15):
        save(job.store, step, f"{step}".encode())
    pin(job.store, 5)


def retired(job: Job) -> None:
    saved(job)
    job.store.discard(job.store.get(10))
    job.store.quarantine(15, ["a finding"])


def take_and_recover(job: Job) -> None:
    job.lease.take()
    job.store.recover()


CASES = {
    "take a new folder": Case(take_and_recover, is_start=True, has_before=False),
    "take over": Case(take_and_recover, saved, is_start=True),
    "take over what was cut": Case(take_and_recover, retired, is_start=True),
    "first save": Case(lambda job: save(job.store, 5)),
    "save": Case(lambda job: save(job.store, 20, b"twenty"), saved),
    "replace": Case(lambda job: save(job.store, 10, b"again"), saved),
    "roll back": Case(
        lambda job: save(job.store, 10, b"branch", run_id="run1", abandons=((10, "run0"), (15, "run0"))), saved
    ),
    "save after a purge": Case(lambda job: save(job.store, 20), lambda job: (saved(job), purge(job.store, 10))),
    "pin": Case(lambda job: pin(job.store, 10), saved),
    "purge": Case(lambda job: purge(job.store, 10), saved),
    "quarantine": Case(lambda job: job.store.quarantine(15, ["a finding"]), saved),
    "release": Case(lambda job: job.lease.release(), saved),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cut_anywhere_leaves_the_old_state_or_the_new_one(name: str) -> None:
    case = CASES[name]
    number, old, new = case.num_requests()
    assert number > 0
    for fate in FATES:
        for cut in range(1, number + 1):
            try:
                _cut(case, cut, fate, old, new)
            except AssertionError as error:
                raise AssertionError(f"{name}, {fate.name} at request {cut}") from error


def _cut(case: Case, number: int, fate: Fate, old: Seen, new: Seen) -> None:
    case.prepare()
    job, bucket = case.job, case.bucket
    job.objects.fate = at(number, fate)
    is_acknowledged = False
    try:
        case.act(job)
        is_acknowledged = True
    except Killed:
        pass
    except SaveFailed as error:
        assert "is not known" in error.cause
    except StoreUnavailable:
        pass
    if fate is Fate.LATE:
        assert is_acknowledged or seen_in(bucket) in (old, new)
    _after_a_failure(case)
    bucket.deliver()
    seen = seen_in(bucket)
    assert seen == new if is_acknowledged else seen in (old, new)
    later = started(bucket)
    assert seen_in(bucket) == seen
    save(later.store, 100)
    assert 100 in found_in(bucket)


def _after_a_failure(case: Case) -> None:
    """Do what a run does that continues."""
    if case.job.objects.is_dead:
        return
    with contextlib.suppress(StoreUnavailable, CheckpointError):
        for step in (5, 10, 15, 20):
            remove_failed(case.job, case.bucket, step)


def test_what_may_have_been_committed_is_not_removed() -> None:
    """The answer to the swap is lost, and the head cannot be read after it."""
    bucket = Bucket()
    job = started(bucket)
    save(job.store, 5, b"old")
    job.objects.requests.clear()
    fates = {"put_if_match": Fate.NO_ANSWER}
    job.objects.fate = lambda request: fates.get(request.verb, _unreachable_after_a_swap(job))
    with pytest.raises(SaveFailed, match=r"whether .* was committed is not known, the next start finds out"):
        save(job.store, 5, b"new")
    job.objects.fate = at(0, Fate.NEVER_SENT)
    remove_failed(job, bucket, 5)
    assert found_in(bucket) == {5: b"new"}
    started(bucket)
    assert found_in(bucket) == {5: b"new"}


def test_what_may_be_committed_later_is_not_removed() -> None:
    """The swap is under way still, while the head shows that it was not carried out."""
    bucket = Bucket()
    job = started(bucket)
    save(job.store, 5, b"old")
    job.objects.requests.clear()
    job.objects.fate = lambda request: Fate.LATE if request.verb == "put_if_match" else _unreachable_after_a_swap(job)
    with pytest.raises(SaveFailed, match="is not known"):
        save(job.store, 5, b"new")
    job.objects.fate = at(0, Fate.NEVER_SENT)
    remove_failed(job, bucket, 5)
    assert found_in(bucket) == {5: b"old"}
    bucket.deliver()
    assert found_in(bucket) == {5: b"new"}


def test_what_was_not_committed_for_certain_is_removed_with_the_next_save() -> None:
    bucket = Bucket()
    job = started(bucket)
    job.objects.fate = lambda request: Fate.LATE if request.verb == "put_if_match" else _unreachable_after_a_swap(job)
    with pytest.raises(SaveFailed):
        save(job.store, 5, b"first")
    job.objects.fate = at(0, Fate.NEVER_SENT)
    remove_failed(job, bucket, 5)
    save(job.store, 5, b"second")
    bucket.deliver()
    assert found_in(bucket) == {5: b"second"}
    assert len([key for key in bucket.stored if key.startswith("step-")]) == 3


def test_a_late_swap_does_not_undo_a_pin_and_its_end() -> None:
    """Nothing else changed, so a version by content alone would be that of the late swap again."""
    bucket = Bucket()
    job = started(bucket)
    job.objects.fate = lambda request: Fate.LATE if request.verb == "put_if_match" else _unreachable_after_a_swap(job)
    with pytest.raises(SaveFailed):
        save(job.store, 5)
    tool, _ = new_store(bucket)
    pin(tool, 7)
    with tool.pins.changing() as pinned:
        pinned.discard(7)
    job.objects.fate = at(0, Fate.NEVER_SENT)
    remove_failed(job, bucket, 5)
    assert not any(key.startswith("step-") for key in bucket.stored)
    bucket.deliver()
    assert found_in(bucket) == {}


def test_a_swap_is_tried_again_until_its_deadline() -> None:
    bucket = Bucket()
    job = started(bucket)
    swaps: list[int] = []

    def fate(request: Request) -> Fate:
        if request.verb == "put_if_match":
            swaps.append(1)
            return Fate.NEVER_SENT if len(swaps) < 5 else Fate.CARRIED_OUT
        return Fate.CARRIED_OUT

    job.objects.fate = fate
    save(job.store, 5)
    assert len(swaps) == 5
    swaps.clear()
    job.objects.fate = lambda request: Fate.NEVER_SENT if request.verb == "put_if_match" else Fate.CARRIED_OUT
    with pytest.raises(SaveFailed, match="is not known"):
        save(job.store, 10)
    assert found_in(bucket) == {5: b"data"}


def _unreachable_after_a_swap(job: Job) -> Fate:
    swapped = any(request.verb == "put_if_match" for request in job.objects.requests[-2:-1])
    return Fate.NEVER_SENT if swapped else Fate.CARRIED_OUT
