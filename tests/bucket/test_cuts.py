"""Every request of everything that a job does, cut before or after it, or its answer lost.

Wherever it is cut, readers find the old state or the new one, complete, before and after the next start; what was
acknowledged is the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.bucket.bucket_backend import FATES, BucketBackend
from tests.bucket.memory_objects import Bucket, Fate, Killed, Request, at
from tests.bucket.saving import Job, found_in, new_store, pin, remove_failed, save, started
from tests.examples import mostly_slow
from tests.store import scenarios
from tests.store.backend import Fault
from tests.store.scenarios import OTHERS, SAVES, Promise, Scenario, purging, starting, three, two
from torchtitan_lite.bucket.objects import StoreUnavailable
from torchtitan_lite.errors import CheckpointError, SaveFailed
from torchtitan_lite.store import layout


def nothing(bucket: BucketBackend) -> None:
    bucket.crowd()


def retired(bucket: BucketBackend) -> None:
    three(bucket)
    bucket.store.discard(bucket.store.get(2))
    bucket.store.quarantine(3, ["a finding"])


def purged(bucket: BucketBackend) -> None:
    three(bucket)
    purging(2)(bucket)


def pinned(bucket: BucketBackend) -> None:
    two(bucket)
    bucket.pin(1)


CASES = {
    **SAVES,
    **OTHERS,
    "take a new folder": Scenario(nothing, starting, ()),
    "take over": Scenario(pinned, starting, (1, 2)),
    "take over what was cut": Scenario(retired, starting, (1,)),
    "save after a purge": scenarios.commit_of(purged, 4, (1, 3, 4)),
    "purge of what is pinned": Scenario(pinned, purging(1), (1, 2)),
    "pin": Scenario(pinned, lambda bucket: pin(bucket.store, 2), (1, 2)),
    "release": Scenario(pinned, lambda bucket: bucket.job.lease.release(), (1, 2)),
}


def prepared(scenario: Scenario) -> BucketBackend:
    """Return the folder before `scenario`, with its job, which a start has still to take."""
    bucket = BucketBackend()
    scenario.before(bucket)
    if scenario.act is starting:
        bucket.next_process()
    bucket.job.objects.requests.clear()
    return bucket


def cuts_of(requests: list[Request]) -> Iterator[tuple[int, Fate]]:
    """Yield what may happen to each request that makes a difference.

    A request that reads leaves nothing, and a kill after a write is one before the next write.
    """
    writes = [request.number for request in requests if request.is_write]
    for request in requests:
        for fate in FATES if request.is_write else [Fate.NEVER_SENT]:
            if fate is not Fate.KILLED_AFTER or request.number == writes[-1]:
                yield request.number, fate


@pytest.mark.promise(
    "A save, a removal, a pin or a start that is cut at any request, or loses its answer, leaves the old or "
    "the new state and every reported save.",
    section="bucket",
)
@pytest.mark.parametrize("name", mostly_slow(CASES, kept=("first save", "replacement")))
def test_a_cut_anywhere_leaves_the_old_state_or_the_new_one(name: str) -> None:
    scenario = CASES[name]
    bucket = prepared(scenario)
    promise = Promise.of(scenario, bucket)
    bucket.job.objects.requests.clear()
    scenario.act(bucket)
    requests = [*bucket.job.objects.requests]
    assert requests
    promise = promise.kept_by(bucket, scenario)
    for number, fate in cuts_of(requests):
        for is_gone_then in (False, True) if requests[number - 1].is_write else (False,):
            findings = wrong_after(scenario, number, fate, is_gone_then, promise)
            assert not findings, f"{name}, {fate.name} at {requests[number - 1]}, {is_gone_then}: {findings}"


def wrong_after(scenario: Scenario, number: int, fate: Fate, is_gone_then: bool, promise: Promise) -> list[str]:
    """Return what is wrong after `fate` at a request, if the store is not reached for the rest of the operation."""
    bucket, only = prepared(scenario), at(number, fate)
    objects = bucket.job.objects
    objects.fate = lambda request: Fate.NEVER_SENT if is_gone_then and request.number > number else only(request)
    is_acknowledged = False
    try:
        scenario.act(bucket)
        is_acknowledged = True
    except SaveFailed as error:
        assert "is not known" in error.cause
    except (Killed, StoreUnavailable):
        pass
    objects.fate = at(0, fate)
    assert is_acknowledged or bucket.seen() in (promise.old, promise.new)
    if not objects.is_dead:
        # What a run does that continues.
        with contextlib.suppress(StoreUnavailable, CheckpointError):
            for step in scenario.after:
                bucket.remove_failed(step)
    bucket.deliver()
    # The next start is killed as well, at one request by turns.
    found = promise.look(bucket, lambda: bucket.arm(Fault(number, FATES.index(Fate.KILLED_BEFORE))))
    bucket.arm(None)
    findings = promise.wrong(found, *([promise.new] if is_acknowledged else []))
    scenarios.save(bucket, 100, "later")
    for _ in range(2):  # A day.
        bucket.next_process()
    bucket.start()
    left = bucket.leftovers()
    return [*findings, *(["a later save is not found"] if 100 not in bucket.read() else []), *left]


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


def test_a_store_that_is_lost_before_the_swap_leaves_nothing_unknown() -> None:
    bucket = Bucket()
    job = started(bucket)

    def fate(request: Request) -> Fate:
        is_written = any(each.verb == "put" and each.key.endswith(layout.MANIFEST) for each in job.objects.requests)
        return Fate.NEVER_SENT if is_written and request.verb == "get" else Fate.CARRIED_OUT

    job.objects.fate = fate
    with pytest.raises(StoreUnavailable):
        save(job.store, 5)
    job.objects.fate = at(0, Fate.NEVER_SENT)
    assert found_in(bucket) == {}
    save(job.store, 5)
    assert found_in(bucket) == {5: b"data"}


def _unreachable_after_a_swap(job: Job) -> Fate:
    swapped = any(request.verb == "put_if_match" for request in job.objects.requests[-2:-1])
    return Fate.NEVER_SENT if swapped else Fate.CARRIED_OUT
