"""The store on a real client and a server that speaks S3: what the tests in memory show, once more on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bucket.proxy import Proxy, answers, at, calls, loses_answer, resets, where
from tests.bucket.saving import FILE, manifest_of, set_aside_in
from tests.clock import Clock
from torchtitan_lite.bucket.bucket_store import BucketStore
from torchtitan_lite.bucket.naming import HEAD
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_writer import Bounced
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointError, FolderUnusable, LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Manifest

SECONDS = 8.0


def opened(folder: str) -> BucketStore:
    """Return a store with a client of its own, whose requests end soon."""
    return BucketStore(Objects(parse_address(folder), deadline_seconds=SECONDS), clock=Clock().of_a_bucket)


@contextmanager
def held(folder: str) -> Iterator[BucketStore]:
    store = opened(folder)
    lease = store.lease("run0", 30.0)
    lease.take()
    try:
        store.recover()
        yield store
    finally:
        lease.release()


def save(store: BucketStore, step: int, data: bytes = b"data", lineage: Lineage | None = None) -> None:
    place = store.begin(step)

    def fill(buffer: memoryview, begin: int, end: int) -> None:
        buffer[: end - begin] = data[begin:end]

    record = store.new_file(place, FILE).write(Bounced(len(data), fill))
    assert record == FileRecord.of(data)
    store.add_metadata(place, b"metadata")
    run = lineage or Lineage("run0")
    store.commit(step, manifest_of(step, data, run_id=run.run_id, abandons=run.abandons), place=place)


def found_in(folder: str) -> dict[int, bytes]:
    store = opened(folder)
    found = {}
    for info in store.committed():
        assert store.check_sizes(info) == []
        manifest = Manifest.parse(store.objects.get(f"{info.path.name}/{layout.MANIFEST}")[0])
        data = store.objects.get(f"{info.path.name}/{FILE}")[0]
        assert manifest.files[FILE] == FileRecord.of(data)
        found[info.step] = data
    return found


@pytest.mark.slow
def test_a_folder_over_its_life(folder: str) -> None:
    with held(folder) as store:
        for step in (5, 10, 15):
            save(store, step, f"{step}".encode())
        save(store, 10, b"again")
        with opened(folder).pins.changing() as pinned:
            pinned.add(5)
        assert store.discard(store.get(5)) == []
        store.empty(store.discard(store.get(15)))
        save(store, 20)
        store.quarantine(20, ["a finding"])
        save(store, 10, b"branch", Lineage("run1", abandons=((10, "run0"),)))
    assert found_in(folder) == {5: b"5", 10: b"branch"}
    with held(folder) as store:
        assert [entry.status.value for entry in set_aside_in(store)] == ["abandoned", "corrupt"]
        assert store.pins.read() == {5}
        store.objects.delete([HEAD])
    assert found_in(folder) == {5: b"5", 10: b"branch"}
    with held(folder) as store:
        assert len(set_aside_in(store)) == 2
    assert found_in(folder) == {5: b"5", 10: b"branch"}


@pytest.mark.slow
def test_a_job_that_lost_the_folder_commits_nothing(folder: str) -> None:
    with held(folder) as first:
        save(first, 5)
        with held(folder), pytest.raises(LeaseLost):
            save(first, 10)
    assert found_in(folder) == {5: b"data"}


def writes_in(proxy: Proxy) -> list[int]:
    """Return the numbers of the requests that changed something; the client repeats the others by itself."""
    return [entry.number for entry in proxy.log if entry.method != "GET"]


FAULTS = {"reset": resets, "lost answer": loses_answer, "busy": answers(503, "SlowDown")}
EACH_FAULT = ["lost answer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reset", "busy"))]


@pytest.mark.promise(
    "A save, a removal, a pin or a start that is cut at any request, or loses its answer, leaves the old or "
    "the new state and every reported save.",
    section="bucket",
)
@pytest.mark.slow
@pytest.mark.parametrize("fault", EACH_FAULT)
def test_any_write_of_a_save_may_fail_once(proxy: Proxy, folder: str, fault: str) -> None:
    """The client sends it again; where the first one was carried out, the store finds its own work."""
    with held(folder) as store:
        save(store, 5, b"old")
        proxy.again()
        save(store, 5, b"first")
        writes = writes_in(proxy)
        for number in writes:
            proxy.again(at(number, FAULTS[fault]))
            data = f"new {number}".encode()
            save(store, 5, data)
            assert found_in(folder) == {5: data}
    assert len(writes) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("fault", EACH_FAULT)
def test_any_write_of_a_start_may_fail_once(proxy: Proxy, folder: str, fault: str) -> None:
    with held(folder) as store:
        save(store, 5)
        store.discard(store.get(5))
        save(store, 10)
    proxy.again()
    with held(folder):
        writes = writes_in(proxy)
    for number in writes:
        proxy.again(at(number, FAULTS[fault]))
        with held(folder):
            pass
    assert found_in(folder) == {10: b"data"}


def test_a_pin_between_the_look_and_the_swap_is_merged(proxy: Proxy, folder: str) -> None:
    with held(folder) as store:
        save(store, 5)

        def pin() -> None:
            proxy.again()
            with opened(folder).pins.changing() as pinned:
                pinned.add(5)

        proxy.again(where(calls(before=pin), method="PUT", path=f"*/{HEAD}"))
        assert store.discard(store.get(5)) == []
    assert found_in(folder) == {5: b"data"}


def test_another_job_between_the_look_and_the_swap_wins(proxy: Proxy, folder: str) -> None:
    with held(folder) as store:
        save(store, 5)
        later = opened(folder).lease("run1", 30.0)

        def take() -> None:
            proxy.again()
            later.take()

        proxy.again(where(calls(before=take), method="PUT", path=f"*/{HEAD}"))
        with pytest.raises(LeaseLost):
            save(store, 10)
        later.check()
        later.release()
    assert found_in(folder) == {5: b"data"}


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(403, "AccessDenied", PermissionError), (403, "RequestTimeTooSkewed", PermissionError)],
)
def test_a_store_that_refuses_ends_the_start_and_changes_nothing(
    proxy: Proxy, folder: str, status: int, code: str, error: type[Exception]
) -> None:
    with held(folder) as store:
        save(store, 5)
    proxy.again(where(answers(status, code)))
    with pytest.raises(error):
        opened(folder).lease("run0", 30.0).take()
    proxy.again()
    assert found_in(folder) == {5: b"data"}


@pytest.mark.slow
def test_a_damaged_head_is_made_again(folder: str) -> None:
    with held(folder) as store:
        save(store, 5)
        store.objects.put(HEAD, b"not a head")
        with pytest.raises((CheckpointError, FolderUnusable)):
            save(store, 10)
    with held(folder):
        pass
    assert found_in(folder)[5] == b"data"
