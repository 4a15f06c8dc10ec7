"""One job at a time holds a folder in an object store: in memory, with a clock that only sleeping moves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bucket.memory_objects import Bucket, Fate, MemoryObjects, Request
from tests.bucket.saving import new_job, new_store, no_probe, pin, save, started, write
from tests.clock import Clock
from torchtitan_lite.bucket.head import Head
from torchtitan_lite.bucket.head_file import HeadFile
from torchtitan_lite.bucket.head_lease import BucketLease
from torchtitan_lite.bucket.naming import HEAD, beat_key
from torchtitan_lite.bucket.objects import ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.errors import FolderInUse, FolderUnusable, LeaseLost
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.lease import LeaseClock


def held_elsewhere(bucket: Bucket, beat_seconds: float = 10.0) -> Head:
    """Make the folder one that a job on another host holds, and return its head."""
    mine = Holder.this_process("theirs", 1e9)
    theirs = replace(mine, host="elsewhere", space="another boot", pid=mine.pid + 1)
    head = Head().taken_by(theirs, beat_seconds)
    HeadFile(MemoryObjects(bucket), LeaseClock()).write(head, None)
    bucket.put(beat_key(1), b"beat 1")
    return head


def lease_of(
    bucket: Bucket, sleep: Callable[[float], object] = lambda seconds: None, timeout_seconds: float = 30.0
) -> tuple[BucketLease, Clock, MemoryObjects]:
    """Return a lease that calls `sleep` whenever it waits."""
    clock, objects = Clock(1e9, during=sleep), MemoryObjects(bucket)
    times = {"timeout_seconds": timeout_seconds, "clock": clock.of_a_bucket}
    lease = BucketLease(objects, HeadFile(objects, clock.of_a_bucket), run_id="ours", probe=no_probe, **times)
    return lease, clock, objects


def head_of(bucket: Bucket) -> Head:
    return HeadFile(MemoryObjects(bucket), LeaseClock()).read()[0]


def test_a_new_folder_is_taken_at_once(bucket: Bucket) -> None:
    lease, time, _ = lease_of(bucket)
    lease.take()
    assert time.slept == []
    assert head_of(bucket).is_held_by(1, lease.token)
    lease.check()
    lease.take()
    assert head_of(bucket).epoch == 1


def test_a_folder_that_was_given_up_is_taken_at_once(bucket: Bucket) -> None:
    first, _, _ = lease_of(bucket)
    first.take()
    token = first.token
    first.release()
    first.release()
    assert head_of(bucket).holder is None
    second, time, _ = lease_of(bucket)
    second.take()
    assert time.slept == [] and head_of(bucket).epoch == 2 and second.token != token


def test_a_folder_of_a_process_that_has_ended_is_taken_at_once(bucket: Bucket) -> None:
    ended = replace(Holder.this_process("theirs", 1e9), started=1)
    HeadFile(MemoryObjects(bucket), LeaseClock()).write(Head().taken_by(ended, 10.0), None)
    lease, time, _ = lease_of(bucket)
    lease.take()
    assert time.slept == [] and head_of(bucket).epoch == 2


def test_the_older_store_of_this_very_process_loses_the_folder(bucket: Bucket) -> None:
    first, second = started(bucket), started(bucket)
    write(first.store, 5)
    with pytest.raises(LeaseLost, match=r"s3://bucket/run .* it is now with run run0"):
        first.lease.check()
    second.lease.check()


def test_a_holder_that_beats_keeps_its_folder(bucket: Bucket) -> None:
    head = held_elsewhere(bucket)
    lease, time, _ = lease_of(bucket, lambda seconds: bucket.put(beat_key(1), f"beat {time.seconds}".encode()))
    with pytest.raises(FolderInUse, match="in use by run theirs"):
        lease.take()
    assert len(time.slept) == 1
    assert head_of(bucket) == replace(head, change=1)


def test_a_holder_that_commits_lives(bucket: Bucket) -> None:
    """Its heartbeat may be what hangs."""
    held_elsewhere(bucket)
    file = HeadFile(MemoryObjects(bucket), LeaseClock())
    other = started(Bucket())
    save(other.store, 5)
    committed = other.store.head().entries
    lease, _, _ = lease_of(bucket, lambda seconds: file.change(lambda head: replace(head, entries=committed)))
    with pytest.raises(FolderInUse):
        lease.take()


def test_a_silent_holder_loses_its_folder_after_the_timeout(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    held_elsewhere(bucket)
    lease, time, _ = lease_of(bucket)
    with caplog.at_level(logging.INFO):
        lease.take()
    assert sum(time.slept) == 30
    assert head_of(bucket).is_held_by(2, lease.token)
    assert "Waiting up to 30 s to see whether it lives" in caplog.text
    assert "no sign of life for 30 s" in caplog.text


def test_a_pin_is_no_sign_of_life(bucket: Bucket) -> None:
    held_elsewhere(bucket)
    lease, time, _ = lease_of(bucket, lambda seconds: pin(new_store(bucket)[0], int(time.seconds)))
    lease.take()
    assert sum(time.slept) == 30 and len(head_of(bucket).pinned) == 6


def test_a_start_waits_for_three_beats_of_the_holder(bucket: Bucket) -> None:
    """However short its own time-out is: the two jobs may have different settings."""
    held_elsewhere(bucket, beat_seconds=10.0)
    lease, time, _ = lease_of(bucket, timeout_seconds=6.0)
    lease.take()
    assert sum(time.slept) == 30
    assert head_of(bucket).beat_seconds == 2


def test_a_folder_that_is_given_up_meanwhile_is_taken(bucket: Bucket) -> None:
    held_elsewhere(bucket)
    file = HeadFile(MemoryObjects(bucket), LeaseClock())
    lease, time, _ = lease_of(bucket, lambda seconds: file.change(lambda head: head.released()))
    lease.take()
    assert len(time.slept) == 1


def test_a_folder_that_another_start_takes_meanwhile_is_in_use(bucket: Bucket) -> None:
    held_elsewhere(bucket)
    other = replace(Holder.this_process("third", 1e9), host="third", space="third boot")
    file = HeadFile(MemoryObjects(bucket), LeaseClock())
    lease, _, _ = lease_of(bucket, lambda seconds: file.change(lambda head: head.taken_by(other, 10.0)))
    with pytest.raises(FolderInUse, match="in use by run third"):
        lease.take()


def test_a_start_that_loses_the_swap_to_a_job_that_lives_is_refused_at_once(bucket: Bucket) -> None:
    other = replace(Holder.this_process("third", 1e9), host="third", space="third boot")
    lease, time, objects = lease_of(bucket)

    def overtake(request: Request) -> None:
        if request.is_write and request.key == HEAD:
            objects.before = lambda request: None
            HeadFile(MemoryObjects(bucket), LeaseClock()).write(Head().taken_by(other, 10.0), None)

    objects.before = overtake
    with pytest.raises(FolderInUse, match="in use by run third"):
        lease.take()
    assert time.slept == [] and head_of(bucket).holder == other


def test_time_in_which_the_store_hangs_does_not_count(bucket: Bucket) -> None:
    held_elsewhere(bucket)
    lease, time, objects = lease_of(bucket)

    def hang(request: object) -> None:
        time.seconds += 1000

    objects.before = hang
    lease.take()
    assert sum(time.slept) == 30


@pytest.mark.parametrize("fate", [Fate.NO_ANSWER, Fate.REPEATED])
def test_a_start_whose_answer_was_lost_has_the_folder(bucket: Bucket, fate: Fate) -> None:
    lease, _, objects = lease_of(bucket)
    objects.fate = lambda request: fate if request.key == HEAD and request.is_write else Fate.CARRIED_OUT
    lease.take()
    assert head_of(bucket).is_held_by(1, lease.token)


def test_a_start_whose_answer_was_lost_has_the_folder_after_a_pin(bucket: Bucket) -> None:
    lease, _, objects = lease_of(bucket)
    objects.fate = lambda request: Fate.NO_ANSWER if request.key == HEAD and request.is_write else Fate.CARRIED_OUT

    def pin_after(request: object) -> None:
        if HEAD in bucket.stored:
            objects.before = lambda request: None
            pin(new_store(bucket)[0], 5)

    objects.before = pin_after
    lease.take()
    assert head_of(bucket).is_held_by(1, lease.token) and head_of(bucket).pinned == {5}


def test_a_request_to_take_that_is_late_is_refused_after_another_take(bucket: Bucket) -> None:
    first, _, _ = lease_of(bucket)
    first.take()
    first.release()
    late, _, objects = lease_of(bucket)

    def fate(request: Request) -> Fate:
        if bucket.late:
            return Fate.NEVER_SENT
        return Fate.LATE if request.is_write else Fate.CARRIED_OUT

    objects.fate = fate
    with pytest.raises(StoreUnavailable):
        late.take()
    second, _, _ = lease_of(bucket)
    second.take()
    bucket.deliver()
    assert head_of(bucket).is_held_by(2, second.token)


@pytest.mark.parametrize("error", [PermissionError, StoreUnavailable])
def test_a_head_that_cannot_be_read_ends_the_start_and_changes_nothing(bucket: Bucket, error: type[OSError]) -> None:
    started(bucket).lease.release()
    before = bucket.state()
    lease, _, objects = lease_of(bucket)

    def refuse(request: object) -> None:
        raise error("no")

    objects.before = refuse
    with pytest.raises(error):
        lease.take()
    assert bucket.state() == before


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_taken(bucket: Bucket) -> None:
    class Ignoring(MemoryObjects):
        def put_if(self, key: str, data: bytes, condition: object) -> dict[str, str]:
            self.put(key, data)
            return {}

    objects = Ignoring(bucket)
    lease = BucketLease(objects, HeadFile(objects, Clock(1e9).of_a_bucket), run_id="ours", clock=Clock(1e9).of_a_bucket)
    with pytest.raises(FolderUnusable, match="conditional writes"):
        lease.take()
    assert bucket.state() == {}


def test_a_store_is_probed_once_a_folder(bucket: Bucket) -> None:
    probed: list[Objects] = []
    for _ in range(3):
        objects = MemoryObjects(bucket)
        file = HeadFile(objects, Clock(1e9).of_a_bucket)
        BucketLease(objects, file, run_id="ours", clock=Clock(1e9).of_a_bucket, probe=probed.append).take()
    assert len(probed) == 1


def test_another_host_sees_the_token(bucket: Bucket) -> None:
    first, _, _ = lease_of(bucket)
    second, _, objects = lease_of(bucket)
    assert not second.is_visible("token")
    first.take()
    assert second.is_visible(first.token) and not second.is_visible("another")
    objects.fate = lambda request: Fate.NEVER_SENT
    with pytest.raises(StoreUnavailable):  # It is not known, and the folder is no other one.
        second.is_visible(first.token)


def test_a_lease_whose_head_is_gone_is_lost(bucket: Bucket) -> None:
    lease, _, _ = lease_of(bucket)
    lease.take()
    del bucket.stored[HEAD]
    with pytest.raises(LeaseLost, match=r"its head\.json is gone"):
        lease.check()
    lease.release()


def test_a_folder_that_is_another_job_s_is_not_given_up(bucket: Bucket) -> None:
    first, second = started(bucket), started(bucket)
    first.lease.release()
    second.lease.check()


def test_a_release_that_fails_is_a_warning(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    lease, _, objects = lease_of(bucket)
    lease.take()
    objects.fate = lambda request: Fate.NEVER_SENT
    lease.release()
    assert "Could not give s3://bucket/run up" in caplog.text


def test_a_release_leaves_pins_that_were_made_meanwhile(bucket: Bucket) -> None:
    job = new_job(bucket)
    job.lease.take()
    job.objects.before = lambda request: pin(new_store(bucket)[0], 5) if request.is_write else None
    job.lease.release()
    assert head_of(bucket).pinned == {5} and head_of(bucket).holder is None


def test_a_beat_differs_from_the_last_one(bucket: Bucket) -> None:
    """A store may take the digest of the contents for the version."""
    beats: list[bytes] = []

    def wait(event: object, seconds: float) -> bool:
        beats.append(bucket.stored[beat_key(1)].data)
        return len(beats) == 3

    objects, clock = MemoryObjects(bucket), Clock(1e9).of_a_bucket._replace(wait=wait)
    lease = BucketLease(objects, HeadFile(objects, clock), run_id="ours", clock=clock, probe=no_probe)
    lease.take()
    lease.release()
    assert len(set(beats)) == 3


def test_a_swap_that_is_always_refused_ends(bucket: Bucket) -> None:
    lease, _, objects = lease_of(bucket)

    def refuse(request: Request) -> None:
        if request.is_write and request.key == HEAD:
            raise ConditionFailed(HEAD)

    objects.before = refuse
    with pytest.raises(FolderInUse):
        lease.take()
