"""A checkpoint in an object store that was set aside becomes the checkpoint of its step again."""

from __future__ import annotations

import pytest

from tests.bucket.saving import Job, save, set_aside_in
from tests.bucket.stored import add, flip, held
from tests.cli.command import command
from torchtitan_lite.bucket.bucket_store import BucketStore, open_bucket
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.rollbacks import Rollback

DATA = layout.data_file(0, 0)


@pytest.fixture
def store(folder: str) -> BucketStore:
    return open_bucket(folder)


def steps(store: BucketStore) -> list[int]:
    return [info.step for info in store.committed()]


@pytest.mark.slow
def test_an_undamaged_one_comes_back_without_its_findings(folder: str, store: BucketStore) -> None:
    with held(folder) as holding:
        add(holding, 7)
        info = add(holding, 9)
        holding.quarantine(9, ["a finding"])
    assert steps(store) == [7]
    ended = command("bring-back", folder, info.path.name)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{info.path.name} (") and ended.out.endswith(
        "is step 9 again\nIt is the latest: the next start resumes from it\n"
    )
    assert steps(store) == [7, 9]
    assert set_aside_in(store) == []
    keys = {each.key for each in store.objects.list(f"{info.path.name}/")}
    assert f"{info.path.name}/{layout.FINDINGS}" not in keys
    again = command("bring-back", folder, info.path.name)
    assert (
        again.code,
        f"it is not the name of a damaged or abandoned checkpoint ({folder} has none)" in again.err,
    ) == (
        1,
        True,
    )


@pytest.mark.slow
def test_a_damaged_one_stays(folder: str, store: BucketStore) -> None:
    with held(folder) as holding:
        info = add(holding, 7)
        holding.quarantine(7, ["a finding"])
    flip(info, DATA, 5000)
    ended = command("bring-back", folder, f"{folder}/{info.path.name}")
    assert (ended.code, f"{DATA}: bytes 0 to " in ended.err) == (3, True)
    assert (steps(store), [entry.step for entry in set_aside_in(store)]) == ([], [7])


def test_one_whose_step_was_saved_again_stays(folder: str, store: BucketStore) -> None:
    with held(folder) as holding:
        old = add(holding, 7)
        holding.quarantine(7, ["a finding"])
        new = add(holding, 7)
    ended = command("bring-back", folder, old.path.name)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert f"{old.path.name} stays as it is: {new.path} is there already" in ended.err
    assert store.get(7).path == new.path


@pytest.mark.slow
def test_an_abandoned_one_takes_the_place_of_the_branch(folder: str, store: BucketStore) -> None:
    with held(folder) as holding:
        add(holding, 7, lineage=Lineage("runa"))
        left = add(holding, 9, lineage=Lineage("runa"))
        branch = add(holding, 9, lineage=Lineage("runb", 7, abandons=((9, "runa"),)))
        add(holding, 11, lineage=Lineage("runb", 9))
    refused = command("bring-back", folder, left.path.name)
    assert (refused.code, f"{branch.path.name} of run runb has left it behind" in refused.err) == (1, True)
    ended = command("bring-back", folder, left.path.name, "--leave-branch")
    assert ended.code == 0 and f"{branch.path.name}" in ended.out
    assert [info.path for info in store.committed()] == [store.get(7).path, left.path]
    with held(folder) as holding:
        add(holding, 13, lineage=Lineage("runa", 9))
    assert steps(store) == [7, 9, 13]


def test_the_rollback_that_left_it_counts_for_no_run_any_more(job: Job) -> None:
    left = save(job.store, 7, run_id="runa")
    save(job.store, 5, run_id="runb", abandons=((7, "runa"),))
    about = {"step": 5, "reason": "spike", "skipped": 5, "last": 4, "target": 4}
    job.store.rollbacks.write([Rollback(**about, run_id="runb", left=Lineage("runa"))])  # type: ignore[arg-type]
    job.store.shelf.bring_back(job.store.shelf.find(left.path.name))
    assert steps(job.store) == [7]
    assert [each.is_left for each in job.store.rollbacks.read()] == [True]
