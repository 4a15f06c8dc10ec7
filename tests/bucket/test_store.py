"""One folder of checkpoints in an object store: what each method does, in memory."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace

import pytest

from tests.bucket.memory_objects import Bucket, Fate, Request, at
from tests.bucket.saving import (
    FILE,
    FULL,
    WEIGHTS,
    Job,
    found_in,
    manifest_of,
    new_job,
    new_store,
    pin,
    purge,
    save,
    set_aside_in,
    started,
    write,
)
from torchtitan_lite.bucket.bucket_store import KEPT_SECONDS
from torchtitan_lite.bucket.naming import attempt_name
from torchtitan_lite.bucket.objects import StoreUnavailable
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    LeaseLost,
    SaveFailed,
)
from torchtitan_lite.events import ignore
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.protocol import KeepsPins, StoresCheckpoints
from torchtitan_lite.store.retention import KeepAll

OTHERS = {"notes.txt": b"mine", "step-5/__0_0.distcp": b"theirs", "step-007.0123456789abcdef/x": b"", "beat-x": b""}


def steps(job: Job) -> list[int]:
    return [info.step for info in job.store.committed()]


def test_it_is_what_a_run_asks_of_its_folder(job: Job) -> None:
    store: StoresCheckpoints = job.store
    lease: Lease = job.lease
    pins: KeepsPins = store.pins
    assert store.identity == store.address == "s3://bucket/run"
    assert lease.token and pins.read() == frozenset()


def test_a_new_folder_has_no_checkpoint(bucket: Bucket) -> None:
    store, _ = new_store(bucket)
    assert store.committed() == store.unmanaged() == set_aside_in(store) == []
    assert store.latest() is None
    assert store.damaged() == store.unreadable() == {}
    assert store.folder_id(make=False) == ""
    assert bucket.stored == {}


def test_a_save_is_found_by_every_reader(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5, b"five")
    store, _ = new_store(bucket)
    assert store.committed() == [info] and store.get(5) == info == store.latest()
    assert str(info.path) == f"s3://bucket/run/{info.path.name}"
    assert found_in(bucket) == {5: b"five"}


def test_a_place_travels_to_other_processes(job: Job) -> None:
    info = save(job.store, 5)
    assert pickle.loads(pickle.dumps(info)) == info


def test_nothing_is_visible_before_the_commit(job: Job, bucket: Bucket) -> None:
    write(job.store, 5)
    assert found_in(bucket) == {}


def test_the_manifest_names_its_attempt_and_epoch(job: Job) -> None:
    info = save(job.store, 5)
    manifest = Manifest.parse(job.objects.get(f"{info.path.name}/{layout.MANIFEST}")[0])
    assert attempt_name(5, manifest.extra["attempt"]) == info.path.name
    assert manifest.extra["epoch"] == 1


def test_files_that_the_manifest_does_not_list_are_removed(job: Job, bucket: Bucket) -> None:
    place = write(job.store, 5)
    job.objects.put(f"{place}/{layout.data_file(7, 0)}", b"of a rank that was not asked")
    job.store.commit(5, manifest_of(5, b"data"), place=place)
    names = {key.removeprefix(f"{place}/") for key in bucket.stored if key.startswith(place)}
    assert names == {FILE, layout.METADATA, layout.MANIFEST}


def test_a_file_of_another_size_is_not_committed(job: Job, bucket: Bucket) -> None:
    place = write(job.store, 5, b"dat")
    with pytest.raises(SaveFailed, match="has 3 bytes, not 4"):
        job.store.commit(5, manifest_of(5, b"data"), place=place)
    assert found_in(bucket) == {}


def test_a_missing_file_is_not_committed(job: Job, bucket: Bucket) -> None:
    place = job.store.begin(5)
    job.store.add_metadata(place, b"metadata")
    with pytest.raises(SaveFailed, match=rf"s3://bucket/run/{place}/{FILE} is missing"):
        job.store.commit(5, manifest_of(5, b"data"), place=place)


def test_a_save_without_metadata_is_not_committed(job: Job) -> None:
    place = job.store.begin(5)
    job.objects.put(f"{place}/{FILE}", b"data")
    with pytest.raises(SaveFailed, match=r"\.metadata is missing"):
        job.store.commit(5, manifest_of(5, b"data"), place=place)


def test_a_manifest_of_another_step_is_not_committed(job: Job) -> None:
    place = write(job.store, 5)
    with pytest.raises(SaveFailed, match="its manifest is of step 6, not 5"):
        job.store.commit(5, manifest_of(6, b"data"), place=place)


def test_after_a_look_at_the_lease_raised_nothing_is_changed(job: Job, bucket: Bucket) -> None:
    place = write(job.store, 5)
    before = bucket.state()

    def fence() -> None:
        raise LeaseLost("s3://bucket/run", "another job")

    job.store.check_lease = fence  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        job.store.commit(5, manifest_of(5, b"data"), place=place)
    assert bucket.state() == before


def test_a_second_save_of_a_step_takes_its_place(job: Job, bucket: Bucket) -> None:
    save(job.store, 5, b"first")
    second = save(job.store, 5, b"second")
    assert found_in(bucket) == {5: b"second"}
    assert {key.partition("/")[0] for key in bucket.stored if key.startswith("step-")} == {second.path.name}


def test_a_reader_finds_the_old_or_the_new_one_while_a_step_is_saved_again(job: Job, bucket: Bucket) -> None:
    """Also if all of the old one is removed between its look at the head and its look at the manifest."""
    save(job.store, 5, b"first")
    store, objects = new_store(bucket)
    objects.before = lambda request: save(job.store, 5, b"second") if request.number == 2 else None
    assert [info.step for info in store.committed()] == [5]
    assert store.get(5).path.name in {entry.name for entry in job.store.head().kept}


def test_weights_that_a_full_checkpoint_replaces_stay(job: Job, bucket: Bucket) -> None:
    weights = save(job.store, 5, b"weights", kind=WEIGHTS)
    save(job.store, 5, b"full")
    started(bucket)
    assert found_in(bucket) == {5: b"full"}
    assert [entry.name for entry in set_aside_in(job.store)] == [weights.path.name]
    assert f"{weights.path.name}/{FILE}" in bucket.stored


def test_latest_is_of_the_kind_that_is_wanted(job: Job) -> None:
    save(job.store, 5)
    save(job.store, 10, kind=WEIGHTS)
    assert [info.step for kind in (FULL, WEIGHTS) if (info := job.store.latest(kind))] == [5, 10]


def test_a_purge_removes_every_object(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    save(job.store, 10)
    assert purge(job.store, 5)
    assert found_in(bucket) == {10: b"data"}
    assert len([key for key in bucket.stored if key.startswith("step-")]) == 3


def test_the_entry_of_what_is_gone_leaves_the_list_with_the_next_swap(job: Job) -> None:
    save(job.store, 5)
    purge(job.store, 5)
    save(job.store, 10)
    assert [entry.step for entry in job.store.head().entries] == [10]


def test_what_was_discarded_before_is_no_trash(job: Job) -> None:
    info = save(job.store, 5)
    save(job.store, 5)
    assert job.store.discard(info) == []
    assert steps(job) == [5]


def test_a_pinned_step_is_not_removed(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    pin(new_store(bucket)[0], 5)
    assert not purge(job.store, 5)
    assert job.store.discard(job.store.get(5)) == []
    assert found_in(bucket) == {5: b"data"}


def test_a_step_that_is_pinned_at_any_moment_of_its_removal_stays_or_was_gone(bucket: Bucket) -> None:
    """A pin that has been written before the swap wins; the pin of a step that is gone does nothing."""
    for number in range(1, 8):
        bucket = Bucket()
        job = started(bucket)
        info = save(job.store, 5)
        first = len(job.objects.requests)
        tool = new_store(bucket)[0]

        def act(request: Request, at: int = first + number, tool: object = tool) -> None:
            if request.number == at:
                pin(tool, 5)  # type: ignore[arg-type]  # a store

        job.objects.before = act
        trash = job.store.discard(info)
        assert (5 in found_in(bucket)) is (not trash)


def test_pins_of_a_tool_and_commits_of_the_job_are_merged(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    tool = new_store(bucket)[0]
    write(job.store, 10)
    first = len(job.objects.requests)
    for number in range(1, 12):
        job.objects.before = lambda request, at=first + number: pin(tool, at) if request.number == at else None
        save(job.store, 10 + number)
        first = len(job.objects.requests)
    assert steps(job) == [5, *range(11, 22)]
    assert len(tool.pins.read()) >= 5


def test_a_pin_and_its_end_are_written(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    tool = new_store(bucket)[0]
    pin(tool, 5, 10)
    with tool.pins.changing() as pinned:
        pinned.discard(10)
    assert job.store.pins.read() == {5}


def test_nothing_is_pinned_in_a_folder_without_a_head(bucket: Bucket) -> None:
    store, _ = new_store(bucket)
    assert store.pins.read() == frozenset()
    with pytest.raises(FileNotFoundError), store.pins.changing():
        pass


def test_a_damaged_checkpoint_is_set_aside_with_what_was_found(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    info = save(job.store, 10)
    place = job.store.quarantine(10, ["a finding", "another"])
    assert place == info.path and steps(job) == [5]
    assert [(entry.step, entry.findings) for entry in set_aside_in(job.store)] == [(10, ("a finding", "another"))]
    assert json.loads(bucket.stored[f"{place.name}/{layout.FINDINGS}"].data)["findings"] == ["a finding", "another"]
    started(bucket)
    assert f"{place.name}/{FILE}" in bucket.stored, "no start removes it"


def test_a_step_may_be_saved_again_after_it_was_set_aside(job: Job, bucket: Bucket) -> None:
    save(job.store, 5, b"damaged")
    job.store.quarantine(5, ["a finding"])
    save(job.store, 5, b"new")
    assert found_in(bucket) == {5: b"new"}
    assert len(set_aside_in(job.store)) == 1


def test_only_what_is_there_is_set_aside(job: Job) -> None:
    save(job.store, 5)
    with pytest.raises(CheckpointNotFound, match="step 10 is not in s3://bucket/run"):
        job.store.quarantine(10, [])


def test_a_roll_back_sets_aside_what_it_abandons_in_the_same_swap(job: Job, bucket: Bucket) -> None:
    for step in (5, 10, 15):
        save(job.store, step)
    save(job.store, 10, b"branch", run_id="run1", abandons=((10, "run0"), (15, "run0")))
    assert found_in(bucket) == {5: b"data", 10: b"branch"}
    assert [entry.step for entry in set_aside_in(job.store)] == [10, 15]
    with pytest.raises(CheckpointNotFound):
        job.store.get(15)


def test_a_save_that_is_abandoned_already_is_refused(job: Job) -> None:
    save(job.store, 5)
    save(job.store, 5, run_id="run1", abandons=((5, "run0"), (10, "run0")))
    with pytest.raises(SaveFailed, match="is of a rollback that abandons step 10 of run run0"):
        save(job.store, 10)


def test_a_missing_manifest_is_damage(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    info = save(job.store, 10)
    del bucket.stored[f"{info.path.name}/{layout.MANIFEST}"]
    store, _ = new_store(bucket)
    assert [info.step for info in store.committed()] == [5]
    assert {step: error.finding for step, error in store.damaged().items()} == {10: "manifest.json is missing"}
    with pytest.raises(CheckpointDamaged, match=r"s3://bucket/run/step-10\.[0-9a-f]{16} is damaged"):
        store.get(10)


def test_another_manifest_than_the_one_committed_is_damage(job: Job, bucket: Bucket) -> None:
    info, other = save(job.store, 5), save(job.store, 10)
    manifest = Manifest.parse(bucket.stored[f"{info.path.name}/{layout.MANIFEST}"].data)
    bucket.put(f"{info.path.name}/{layout.MANIFEST}", replace(manifest, created_at=1.0).to_json())
    bucket.put(f"{other.path.name}/{layout.MANIFEST}", bucket.stored[f"{other.path.name}/{layout.MANIFEST}"].data[:-9])
    assert new_store(bucket)[0].damaged().keys() == {5, 10}


def test_damage_of_a_higher_step_is_a_warning_of_latest(
    job: Job, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    save(job.store, 5)
    info = save(job.store, 10)
    del bucket.stored[f"{info.path.name}/{layout.MANIFEST}"]
    with caplog.at_level(logging.WARNING):
        latest = new_store(bucket)[0].latest()
    assert latest is not None and latest.step == 5
    assert "Skipped step 10" in caplog.text


def test_a_manifest_that_cannot_be_read_is_neither_intact_nor_damaged(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    info = save(job.store, 10)
    store, objects = new_store(bucket)
    key = f"{info.path.name}/{layout.MANIFEST}"
    objects.fate = lambda request: Fate.NEVER_SENT if request.key == key else Fate.CARRIED_OUT
    assert [info.step for info in store.committed()] == [5]
    assert store.damaged() == {} and store.unreadable().keys() == {10}
    with pytest.raises(CheckpointUnreadable):
        store.get(10)


def test_sizes_are_compared_with_those_of_the_manifest(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5)
    bucket.put(f"{info.path.name}/{FILE}", b"dat")
    del bucket.stored[f"{info.path.name}/{layout.METADATA}"]
    for store in (job.store, new_store(bucket)[0]):
        assert store.check_sizes(info) == [".metadata is missing", f"{FILE} has 3 bytes, not 4"]


def test_a_manifest_is_read_once(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    store, objects = new_store(bucket)
    for _ in range(3):
        store.committed()
    assert [request.key for request in objects.requests if layout.MANIFEST in request.key].count(
        f"{store.get(5).path.name}/{layout.MANIFEST}"
    ) == 1


def test_what_a_failed_save_left_is_removed(job: Job, bucket: Bucket) -> None:
    places = [write(job.store, 5), write(job.store, 5)]
    for place in [*places, *places]:
        job.store.remove_staging(5, place)
    assert not any(key.startswith("step-") for key in bucket.stored)


def test_a_failed_try_that_could_not_be_removed_is_removed_once_the_next_one_is_committed(
    job: Job, bucket: Bucket
) -> None:
    place = write(job.store, 5, b"first")
    job.objects.fate = lambda request: Fate.NEVER_SENT if request.verb == "delete" else Fate.CARRIED_OUT
    with pytest.raises(StoreUnavailable):
        job.store.remove_staging(5, place)
    job.objects.fate = at(0, Fate.NEVER_SENT)
    save(job.store, 5, b"second")
    assert len([key for key in bucket.stored if key.startswith("step-")]) == 3
    assert found_in(bucket) == {5: b"second"}


def test_a_save_that_failed_while_the_store_was_away_is_removed_once_the_next_one_is_committed(
    job: Job, bucket: Bucket
) -> None:
    """As the loop removes it, which first looks whether the folder is still its own."""
    place = write(job.store, 5, b"first")
    job.objects.fate = lambda request: Fate.NEVER_SENT
    Housekeeping(KeepAll(), lambda event: None).remove_failed_save(5, job.store, place)
    job.objects.fate = at(0, Fate.NEVER_SENT)
    save(job.store, 5, b"second")
    assert len([key for key in bucket.stored if key.startswith("step-")]) == 3
    assert found_in(bucket) == {5: b"second"}


def test_a_save_that_was_given_up_and_one_of_the_same_step_do_not_touch_each_other(job: Job, bucket: Bucket) -> None:
    given_up = write(job.store, 5, b"first")
    under_way = write(job.store, 5, b"second")
    job.store.remove_staging(5, given_up)
    with pytest.raises(SaveFailed, match="its files were removed"):
        job.store.commit(5, manifest_of(5, b"first"), place=given_up)
    assert found_in(bucket) == {}
    job.store.commit(5, manifest_of(5, b"second"), place=under_way)
    assert found_in(bucket) == {5: b"second"}
    job.store.remove_staging(5, given_up)
    job.store.remove_staging(5, under_way)
    assert found_in(bucket) == {5: b"second"}


def test_a_save_that_wakes_late_commits_its_own_files(job: Job, bucket: Bucket) -> None:
    late = write(job.store, 5, b"first")
    other = write(job.store, 5, b"second")
    job.store.commit(5, manifest_of(5, b"first"), place=late)
    assert found_in(bucket) == {5: b"first"}
    job.store.commit(5, manifest_of(5, b"second"), place=other)
    assert found_in(bucket) == {5: b"second"}


def test_a_save_from_before_the_folder_was_given_up_is_not_committed(job: Job, bucket: Bucket) -> None:
    place = write(job.store, 5)
    job.lease.release()
    job.lease.take()
    with pytest.raises(SaveFailed, match="was released after the save began"):
        job.store.commit(5, manifest_of(5, b"data"), place=place)
    assert found_in(bucket) == {}


def test_removing_a_failed_save_leaves_what_is_committed(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5)
    job.store.remove_staging(5, info.path.name)
    assert found_in(bucket) == {5: b"data"}


def test_a_store_without_a_lease_changes_nothing(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5)
    before = bucket.state()
    store, _ = new_store(bucket)
    for act in (
        lambda: store.begin(5),
        lambda: store.discard(info),
        lambda: store.quarantine(5, []),
        store.recover,
    ):
        with pytest.raises(CheckpointError, match="is not locked by this process"):
            act()
    assert bucket.state() == before


def test_a_start_removes_retired_checkpoints_and_old_beats(job: Job, bucket: Bucket) -> None:
    info = save(job.store, 5)
    job.store.discard(info)
    later = new_job(bucket)
    later.lease.take()
    assert later.store.recover() == [info.path]
    assert later.store.head().entries == ()
    assert [key for key in bucket.stored if key.startswith("step-")] == []
    assert "beat-1" not in bucket.stored


def test_what_a_start_cannot_remove_is_a_warning_and_the_next_one_removes_it(
    job: Job, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    info = save(job.store, 5)
    job.store.discard(info)
    later = new_job(bucket)
    later.lease.take()
    later.objects.fate = lambda request: Fate.NEVER_SENT if request.verb == "delete" else Fate.CARRIED_OUT
    assert later.store.recover() == []
    assert f"Could not remove {info.path}, which is no longer kept" in caplog.text
    save(later.store, 10)
    last = new_job(bucket)
    last.lease.take()
    assert last.store.recover() == [info.path]


def test_an_attempt_in_no_head_is_removed_after_a_day_by_the_clock_of_the_store(job: Job, bucket: Bucket) -> None:
    place = write(job.store, 5)
    bucket.now += KEPT_SECONDS
    assert started(bucket).store.recover() == []
    bucket.now += 1
    later = new_job(bucket)
    later.lease.take()
    assert [found.name for found in later.store.recover()] == [place]
    assert not any(key.startswith("step-") for key in bucket.stored)


def test_unknown_names_stay(bucket: Bucket) -> None:
    for key, data in OTHERS.items():
        bucket.put(key, data)
    job = started(bucket)
    save(job.store, 5)
    purge(job.store, 5)
    bucket.now += 10 * KEPT_SECONDS
    started(bucket)
    assert {key: bucket.stored[key].data for key in OTHERS} == OTHERS


def test_an_entry_whose_objects_people_removed_leaves_the_list(job: Job, bucket: Bucket) -> None:
    save(job.store, 5)
    place = job.store.quarantine(5, ["a finding"])
    for key in [key for key in bucket.stored if key.startswith(place.name)]:
        del bucket.stored[key]
    assert set_aside_in(started(bucket).store) == []


def test_the_id_of_a_folder_is_made_once(job: Job, bucket: Bucket) -> None:
    found = job.store.folder_id(make=False)
    assert len(found) == 32
    assert found == new_store(bucket)[0].folder_id(make=True) == job.store.folder_id(make=True)


def test_a_bucket_has_room_and_to_know_that_is_no_request(job: Job) -> None:
    housekeeping, num_requests = Housekeeping(KeepAll(), ignore), len(job.objects.requests)
    last = CheckpointInfo(4, job.store.place_of("step-4"), CheckpointKind.FULL, 0.0, 1 << 60)
    housekeeping.note_committed(last, job.store)
    housekeeping.make_sure_of_room(5, CheckpointKind.FULL, job.store)
    assert len(job.objects.requests) == num_requests
