"""Two jobs in one folder: nothing that a holder does after it lost the folder becomes visible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bucket.memory_objects import Bucket, Fate, Request, carried_out
from tests.bucket.saving import Job, found_in, new_store, purge, remove_failed, save, started
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.errors import CheckpointError, LeaseLost

MOST_REQUESTS = 40


def taken_over_before(number: int, act: Callable[[Job], object]) -> tuple[Bucket, bool, int]:
    """Let another job take the folder before the request `number` of `act`, and save step 20 there.

    Return the folder, whether `act` was carried out by its own account, and how many requests it made.
    """
    bucket = Bucket()
    job = started(bucket)
    for step in (5, 10):
        save(job.store, step, b"old")
    job.objects.requests.clear()
    others: list[Job] = []

    def take_over(request: Request) -> None:
        if request.number == number:
            others.append(started(bucket))
            save(others[0].store, 20, b"theirs")

    job.objects.before = take_over
    try:
        act(job)
        is_done = True
    except LeaseLost:
        is_done = False
    num_requests, job.objects.before = len(job.objects.requests), carried_out
    found = found_in(bucket)
    for step in (5, 10, 15):
        remove_failed(job, bucket, step)
    if others:
        started(bucket)
        assert found_in(bucket) == found
        assert found[20] == b"theirs"
    return bucket, is_done, num_requests


@pytest.mark.promise("A job that lost the folder commits and removes nothing, whenever it continues.", section="bucket")
@pytest.mark.parametrize("step", [10, 15])
def test_a_commit_of_a_job_that_lost_the_folder_is_refused_wherever_it_is(step: int) -> None:
    before = {5: b"old", 10: b"old", 20: b"theirs"}
    refused = 0
    for number in range(1, MOST_REQUESTS):
        bucket, is_done, num_requests = taken_over_before(number, lambda job: save(job.store, step, b"ours"))
        if num_requests < number:
            break
        assert found_in(bucket) == (before | {step: b"ours"} if is_done else before), number
        refused += not is_done
    assert refused >= 7


@pytest.mark.promise("A job that lost the folder commits and removes nothing, whenever it continues.", section="bucket")
def test_a_removal_by_a_job_that_lost_the_folder_is_refused_wherever_it_is() -> None:
    refused = 0
    for number in range(1, MOST_REQUESTS):
        bucket, is_done, num_requests = taken_over_before(number, lambda job: purge(job.store, 5))
        if num_requests < number:
            break
        assert (5 in found_in(bucket)) is (not is_done), number
        refused += not is_done
    assert refused >= 3


def test_a_job_that_lost_the_folder_can_do_nothing_there() -> None:
    bucket = Bucket()
    first = started(bucket)
    info = save(first.store, 5)
    second = started(bucket)
    for act in (
        lambda: first.store.discard(info),
        lambda: first.store.quarantine(5, []),
        first.store.recover,
        lambda: save(first.store, 10),
    ):
        with pytest.raises(LeaseLost):
            act()
    assert found_in(bucket) == {5: b"data"}
    second.lease.check()
    first.lease.release()
    with pytest.raises(CheckpointError):
        first.store.begin(15)


def test_what_a_job_committed_before_it_lost_the_folder_is_acknowledged() -> None:
    """Its answer was lost, and another job holds the folder when it looks."""
    bucket = Bucket()
    job = started(bucket)

    def take_over(request: Request) -> None:
        if any(each.verb == "put_if_match" for each in job.objects.requests[:-1]):
            job.objects.before = lambda request: None
            started(bucket)

    job.objects.requests.clear()
    job.objects.before = take_over
    job.objects.fate = lambda request: Fate.NO_ANSWER if request.verb == "put_if_match" else Fate.CARRIED_OUT
    assert save(job.store, 5).step == 5
    assert found_in(bucket) == {5: b"data"}
    with pytest.raises(LeaseLost):
        job.lease.check()


def test_two_managers_that_are_handed_one_store_check_a_lease_each() -> None:
    store, _ = new_store(Bucket())
    first, second = (RunFolders(JobConfig(), "run0", store) for _ in range(2))
    first.take()
    first.checkpoints.check_lease()
    second.take()
    second.checkpoints.check_lease()
    with pytest.raises(LeaseLost):
        first.checkpoints.check_lease()
