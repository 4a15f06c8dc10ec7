"""A head that is lost or damaged is made again from the manifests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bucket.memory_objects import Bucket, Fate, Killed, Request, at
from tests.bucket.saving import (
    FILE,
    WEIGHTS,
    Job,
    found_in,
    manifest_of,
    new_job,
    new_store,
    pin,
    purge,
    remove_failed,
    save,
    set_aside_in,
    started,
    write,
)
from tests.examples import mostly_slow
from tests.store.filled import later_format
from torchtitan_lite.bucket.naming import HEAD
from torchtitan_lite.bucket.objects import StoreUnavailable
from torchtitan_lite.errors import FolderUnusable, FormatTooNew, LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import seal


def lose(bucket: Bucket) -> None:
    del bucket.stored[HEAD]


def damage(bucket: Bucket) -> None:
    data = bucket.stored[HEAD].data
    bucket.put(HEAD, data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])


def cut(bucket: Bucket) -> None:
    bucket.put(HEAD, bucket.stored[HEAD].data[:-20])


def empty(bucket: Bucket) -> None:
    bucket.put(HEAD, b"")


ACCIDENTS = [lose, damage, cut, empty]
Accident = Callable[[Bucket], None]
every_accident = pytest.mark.parametrize("accident", ACCIDENTS)


@pytest.mark.promise("A lost or damaged `head.json` is rebuilt with every committed step.", section="bucket")
@every_accident
def test_every_committed_checkpoint_is_found_again(job: Job, bucket: Bucket, accident: Accident) -> None:
    for step in (5, 10, 15):
        save(job.store, step, f"{step}".encode())
    save(job.store, 10, b"again")
    purge(job.store, 15)
    before = found_in(bucket)
    accident(bucket)
    assert found_in(bucket) == before, "a reader finds what the next start will find"
    later = started(bucket)
    assert found_in(bucket) == before == {5: b"5", 10: b"again"}
    assert later.store.head().epoch == 2
    save(later.store, 20)
    assert found_in(bucket).keys() == {5, 10, 20}


@every_accident
def test_an_outdated_holder_commits_nothing_after_it(job: Job, bucket: Bucket, accident: Accident) -> None:
    save(job.store, 5)
    accident(bucket)
    started(bucket)
    with pytest.raises(LeaseLost):
        save(job.store, 10)
    assert found_in(bucket) == {5: b"data"}


@every_accident
def test_a_holder_commits_nothing_before_the_next_start(job: Job, bucket: Bucket, accident: Accident) -> None:
    save(job.store, 5)
    accident(bucket)
    with pytest.raises((LeaseLost, FolderUnusable)):
        save(job.store, 10)
    with contextlib.suppress(FolderUnusable):  # Only a warning of the run.
        remove_failed(job, bucket, 10)
    started(bucket)
    assert found_in(bucket)[5] == b"data"


@every_accident
def test_a_start_waits_for_a_holder_that_may_live(job: Job, bucket: Bucket, accident: Accident) -> None:
    save(job.store, 5)
    accident(bucket)
    later = new_job(bucket)
    later.lease.take()
    assert sum(later.store._clock.sleep.__self__.slept) == 30  # type: ignore[attr-defined]  # of Clock


def test_lost_pins_are_one_warning(job: Job, bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    save(job.store, 5)
    pin(job.store, 5)
    damage(bucket)
    with caplog.at_level(logging.WARNING):
        later = started(bucket)
    assert later.store.pins.read() == frozenset()
    assert [record.message for record in caplog.records if "pins" in record.message] == [
        "s3://bucket/run/head.json is damaged and is rebuilt from 1 manifests without the pins. Pin steps again with "
        "torchtitan-lite pin"
    ]


def test_a_new_folder_is_no_recovery(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        started(bucket)
    assert not caplog.records


def test_what_was_abandoned_or_damaged_is_so_again(job: Job, bucket: Bucket) -> None:
    for step in (5, 10, 15, 20):
        save(job.store, step)
    save(job.store, 10, b"branch", run_id="run1", abandons=tuple((step, "run0") for step in (10, 15, 20)))
    save(job.store, 25, run_id="run1")
    job.store.quarantine(25, ["a finding"])
    aside = {(entry.name, entry.status) for entry in set_aside_in(job.store)}
    lose(bucket)
    later = started(bucket)
    assert found_in(bucket) == {5: b"data", 10: b"branch"}
    assert {(entry.name, entry.status) for entry in set_aside_in(later.store)} == aside


def test_a_step_of_an_abandoned_run_that_was_saved_again_is_found(job: Job, bucket: Bucket) -> None:
    """The branch that abandoned it was damaged, so the first run continued."""
    save(job.store, 5)
    save(job.store, 10, b"left")
    save(job.store, 10, b"branch", run_id="run1", abandons=((10, "run0"),))
    job.store.quarantine(10, ["a finding"])
    save(started(bucket).store, 10, b"again")
    lose(bucket)
    started(bucket)
    assert found_in(bucket) == {5: b"data", 10: b"again"}


@pytest.mark.parametrize("is_cut", [False, True])
def test_steps_that_only_a_removed_commit_of_a_branch_abandoned_stay_so(job: Job, bucket: Bucket, is_cut: bool) -> None:
    """The first commit of a branch lists them, and a policy removes it long before the last one."""
    for step in (10, 14, 20):
        save(job.store, step)
    branch = Lineage("run1", branch_point=10, ancestors=((10, "run0"),))
    for step, left in ((12, ((14, "run0"), (20, "run0"))), (14, ())):
        manifest = replace(manifest_of(step, b"branch"), lineage=replace(branch, abandons=left))
        info = job.store.commit(step, manifest, place=write(job.store, step, b"branch"))
    purge(job.store, 12)
    if is_cut:
        bucket.put(f"{info.path.name}/{FILE}", b"cut")
        job.store.quarantine(14, ["a finding"])
    before = found_in(bucket)
    aside = {(entry.name, entry.status) for entry in set_aside_in(job.store)}
    lose(bucket)
    later = started(bucket)
    assert found_in(bucket) == before
    assert {(entry.name, entry.status) for entry in set_aside_in(later.store)} == aside


def test_weights_that_a_full_checkpoint_replaced_stay_aside(job: Job, bucket: Bucket) -> None:
    save(job.store, 5, b"weights", kind=WEIGHTS)
    save(job.store, 5, b"full")
    lose(bucket)
    assert [entry.status.value for entry in set_aside_in(started(bucket).store)] == ["weights"]
    assert found_in(bucket) == {5: b"full"}


def test_weights_whose_commit_was_lost_do_not_replace_the_full_checkpoint_of_their_step(
    job: Job, bucket: Bucket
) -> None:
    """The manifest of a commit arrives before the head, and an outdated holder's commit fails between them."""
    save(job.store, 5, b"full")
    place = write(job.store, 5, b"weights")
    new_job(bucket).lease.take()
    job.store.check_lease = lambda: None  # type: ignore[method-assign]  # as if it was looked at a moment before
    with pytest.raises(LeaseLost):
        job.store.commit(5, manifest_of(5, b"weights", kind=WEIGHTS), place=place)
    assert f"{place}/{layout.MANIFEST}" in bucket.stored
    lose(bucket)
    later = started(bucket)
    assert found_in(bucket) == {5: b"full"}
    assert [(entry.name, entry.status.value) for entry in set_aside_in(later.store)] == [(place, "weights")]


def test_of_one_step_the_highest_epoch_counts(job: Job, bucket: Bucket) -> None:
    """The clocks of the hosts do not count."""
    place = write(job.store, 5, b"first")
    job.store.commit(5, manifest_of(5, b"first"), place=place)
    later = started(bucket)
    place = write(later.store, 5, b"second")
    bucket_before = dict(bucket.stored)
    later.store.commit(5, replace(manifest_of(5, b"second"), created_at=1.0), place=place)
    # What the commit removed comes back, as where it was cut before that.
    bucket.stored = bucket_before | bucket.stored
    lose(bucket)
    started(bucket)
    assert found_in(bucket) == {5: b"second"}


@pytest.mark.parametrize("harm", ["a file is cut", "a file is gone", "the manifest is damaged"])
def test_what_does_not_count_is_set_aside_and_never_removed(job: Job, bucket: Bucket, harm: str) -> None:
    save(job.store, 5)
    name = save(job.store, 10).path.name
    key = f"{name}/{layout.MANIFEST if 'manifest' in harm else FILE}"
    if "gone" in harm:
        del bucket.stored[key]
    else:
        bucket.put(key, bucket.stored[key].data[:-1])
    lose(bucket)
    started(bucket)
    bucket.now += 1e6
    later = started(bucket)
    assert found_in(bucket) == {5: b"data"}
    assert [(entry.name, entry.status.value) for entry in set_aside_in(later.store)] == [(name, "corrupt")]
    assert any(key.startswith(name) for key in bucket.stored)


def test_a_damaged_manifest_does_not_replace_an_intact_one_of_its_step(job: Job, bucket: Bucket) -> None:
    save(job.store, 5, b"intact")
    place = write(job.store, 5, b"cut")
    bucket.put(f"{place}/{layout.MANIFEST}", b"half of it")
    lose(bucket)
    started(bucket)
    assert found_in(bucket) == {5: b"intact"}


def test_what_is_left_of_a_cut_save_does_not_replace_the_intact_checkpoint_of_its_step(
    job: Job, bucket: Bucket
) -> None:
    """Its manifest may arrive after the start that removed its files."""
    save(job.store, 5, b"intact")
    job.objects.fate = lambda request: Fate.KILLED_BEFORE if request.verb == "put_if_match" else Fate.CARRIED_OUT
    place = write(job.store, 5, b"again")
    with pytest.raises(Killed):
        job.store.commit(5, manifest_of(5, b"again"), place=place)
    del bucket.stored[f"{place}/{FILE}"]
    lose(bucket)
    started(bucket)
    assert found_in(bucket) == {5: b"intact"}


def test_a_complete_checkpoint_whose_commit_was_cut_counts(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    job.objects.fate = lambda request: Fate.KILLED_BEFORE if request.verb == "put_if_match" else Fate.CARRIED_OUT
    with pytest.raises(Killed):
        save(job.store, 10)
    assert found_in(bucket).keys() == {5}
    lose(bucket)
    started(bucket)
    assert found_in(bucket).keys() == {5, 10}


def test_a_head_that_was_damaged_on_its_way_is_read_again(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    pin(job.store, 5)
    later = new_job(bucket)
    complete = bucket.stored[HEAD]
    reads: list[int] = []

    def once(request: Request) -> None:
        if request.key == HEAD and request.verb == "get":
            reads.append(1)
            bucket.stored[HEAD] = complete if len(reads) % 2 == 0 else complete._replace(data=complete.data[:-1])
        else:
            bucket.stored[HEAD] = complete

    later.objects.before = once
    assert later.store.pins.read() == {5}


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("error", [PermissionError, StoreUnavailable])
def test_a_manifest_that_cannot_be_read_ends_the_start(
    job: Job, bucket: Bucket, accident: Accident, error: type[OSError]
) -> None:
    info = save(job.store, 5)
    accident(bucket)
    before = bucket.state()
    later = new_job(bucket)

    def refuse(request: Request) -> None:
        if request.key == f"{info.path.name}/{layout.MANIFEST}":
            raise error("no")

    later.objects.before = refuse
    with pytest.raises(OSError):
        later.lease.take()
    assert bucket.state() == before


def test_a_manifest_of_a_later_version_ends_the_start(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5)
    key = f"{info.path.name}/{layout.MANIFEST}"
    bucket.put(key, later_format(bucket.stored[key].data))
    lose(bucket)
    before = bucket.state()
    with pytest.raises(FormatTooNew):
        new_job(bucket).lease.take()
    assert bucket.state() == before


def test_an_undamaged_head_that_is_no_head_is_left_as_it_is(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    bucket.put(HEAD, seal(b'{\n"format_version": 7,\n"oldest_reader": 7'))
    before = bucket.state()
    with pytest.raises(FolderUnusable, match=r"head\.json .* restore it from a copy"):
        new_job(bucket).lease.take()
    assert bucket.state() == before


@pytest.mark.parametrize("accident", mostly_slow(ACCIDENTS, kept=ACCIDENTS[:1]))
def test_a_recovery_may_be_cut_anywhere(bucket: Bucket, accident: Accident) -> None:
    for fate in (Fate.KILLED_BEFORE, Fate.KILLED_AFTER, Fate.NO_ANSWER, Fate.REPEATED):
        for number in range(1, 60):
            bucket = Bucket()
            job = started(bucket)
            for step in (5, 10):
                save(job.store, step, f"{step}".encode())
            accident(bucket)
            later = new_job(bucket)
            later.objects.fate = at(number, fate)
            try:
                later.lease.take()
                later.store.recover()
            except (Killed, OSError):
                pass
            started(bucket)
            assert found_in(bucket) == {5: b"5", 10: b"10"}
            if len(later.objects.requests) < number:
                break


def test_a_reader_of_a_lost_head_changes_nothing(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    lose(bucket)
    before = bucket.state()
    store, _ = new_store(bucket)
    assert [info.step for info in store.committed()] == [5]
    assert store.get(5).step == 5 and store.damaged() == {}
    assert bucket.state() == before


@pytest.mark.parametrize("verb", ["put", "put_if_match"])
def test_a_job_whose_head_is_gone_leaves_its_save_for_the_next_start(job: Job, bucket: Bucket, verb: str) -> None:
    """Another start may be reading it."""
    save(job.store, 5, b"old")

    def lose_it(request: Request) -> None:
        if request.verb == verb and (HEAD in request.key or layout.MANIFEST in request.key):
            lose(bucket)

    job.objects.before = lose_it
    with pytest.raises(LeaseLost):
        save(job.store, 5, b"new")
    remove_failed(job, bucket, 5)
    started(bucket)
    assert found_in(bucket) == {5: b"new"}


def test_no_epoch_comes_twice(bucket: Bucket) -> None:
    for _ in range(3):
        started(bucket).lease.release()
    lose(bucket)
    assert started(bucket).store.head().epoch == 4


def test_what_was_removed_in_part_is_no_damage(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    save(job.store, 10)
    job.objects.fate = lambda request: Fate.KILLED_AFTER if request.verb == "delete" else Fate.CARRIED_OUT
    with pytest.raises(Killed):
        purge(job.store, 5)
    lose(bucket)
    assert set_aside_in(started(bucket).store) == []
    assert found_in(bucket) == {10: b"data"}
