"""Each verb does what the protocol says, against a real server, and each failure is one of its errors, in words."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest

from tests.bucket import proxy as proxies
from tests.bucket.proxy import Proxy, at, where
from torchtitan_lite.bucket.objects import ConditionFailed, Objects, StoreUnavailable, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.digest import BLOCK_BYTES


@pytest.fixture
def objects(folder: str) -> Objects:
    return connect(parse_address(folder))


@pytest.fixture
def proxied(proxy: Proxy, folder: str) -> Objects:
    return Objects(parse_address(folder), most_tries=3)


@pytest.mark.slow
def test_what_was_put_is_got_with_its_version(objects: Objects) -> None:
    objects.put("a", b"first")
    data, first = objects.get("a")
    assert data == b"first" and first
    objects.put("a", b"second")
    data, second = objects.get("a")
    assert data == b"second" and second != first
    listed = objects.head("a")
    assert (listed.key, listed.size) == ("a", 6)
    assert dict(listed.condition) == dict(second)
    assert listed == next(iter(objects.list("a")))


def test_a_missing_object_is_not_found(objects: Objects) -> None:
    for ask in (objects.get, objects.head, lambda key: objects.get_range(key, 0, 1)):
        with pytest.raises(FileNotFoundError, match=r"no such object in the store: '.*/missing'") as caught:
            ask("missing")
        assert caught.value.filename == f"{objects.address}/missing"
    assert list(objects.list("missing")) == []


def test_an_object_is_created_once(objects: Objects) -> None:
    first = objects.put_if("a", b"first", None)
    assert first == objects.get("a")[1]
    with pytest.raises(ConditionFailed, match="another version is there") as caught:
        objects.put_if("a", b"second", None)
    assert caught.value.filename == f"{objects.address}/a"
    assert objects.get("a")[0] == b"first"
    objects.delete(["a"])
    objects.put_if("a", b"third", None)


def test_only_the_version_that_was_seen_is_replaced(objects: Objects) -> None:
    first = objects.put_if("a", b"first", None)
    second = objects.put_if("a", b"second", first)
    assert second == objects.get("a")[1]
    for outdated in (first, {**first, "e_tag": '"0"'}):
        with pytest.raises(ConditionFailed):
            objects.put_if("a", b"third", outdated)
    assert objects.get("a")[0] == b"second"
    objects.delete(["a"])
    with pytest.raises(ConditionFailed):
        objects.put_if("a", b"third", second)
    assert list(objects.list("")) == []


def test_of_many_that_replace_one_version_one_succeeds(objects: Objects) -> None:
    condition = objects.put_if("a", b"first", None)

    def replace(number: int) -> bool:
        try:
            objects.put_if("a", str(number).encode(), condition)
        except ConditionFailed:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = [number for number, wins in enumerate(threads.map(replace, range(16))) if wins]
    assert objects.get("a")[0] == str(*won).encode()


def test_objects_are_listed_by_the_beginning_of_their_keys(objects: Objects) -> None:
    keys = ["beat-1", "beat-10", "head.json", "step-5.0a/manifest.json", "step-5.0a/__0_0.distcp", "step-50/x"]
    for key in keys:
        objects.put(key, key.encode())
    for prefix in ("", "beat-", "beat-1", "step-5", "step-5.0a", "step-5.0a/", "step-5.0a/__0", "none", "none/"):
        found = list(objects.list(prefix))
        assert sorted(each.key for each in found) == sorted(key for key in keys if key.startswith(prefix))
        assert all(each.size == len(each.key) and each.condition for each in found)
    times = [each.modified for each in objects.list("")]
    assert max(times) - min(times) < 3600


@pytest.mark.slow
def test_a_listing_has_more_than_one_page_and_all_of_it_is_deleted(objects: Objects) -> None:
    keys = {f"many/{number}" for number in range(1010)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: objects.put(key, b""), keys))
    assert {each.key for each in objects.list("many/")} == keys
    objects.delete([*keys, "many/missing"])
    objects.delete([])
    assert list(objects.list("")) == []


def test_ranges_are_shorter_where_the_object_ends(objects: Objects) -> None:
    objects.put("a", b"0123456789")
    ranges = [(0, 10), (3, 5), (5, 5), (8, 20), (10, 12), (50, 60), (3, 5)]
    found = [objects.get_range("a", begin, end) for begin, end in ranges]
    assert [bytes(each) for each in found] == [b"0123456789"[begin:end] for begin, end in ranges]


PART = 5 * BLOCK_BYTES


@pytest.mark.parametrize("sizes", [[], [0], [3], [PART], [PART, 3], [PART, PART, PART], [PART] * 4 + [PART - 1]])
def test_an_object_is_uploaded_in_parts(objects: Objects, sizes: list[int]) -> None:
    parts = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    objects.upload("a", map(memoryview, parts), PART, 2)
    size = sum(sizes)
    assert objects.head("a").size == size
    assert bytes(objects.get_range("a", 0, size // 2)) + objects.get_range("a", size // 2, size) == b"".join(parts)
    assert len(list(objects.list(""))) == 1


def assert_aborted(proxy: Proxy) -> None:
    """Assert that the parts were deleted. obstore 0.11 does that often only."""
    aborts = [entry.status for entry in proxy.log if entry.method == "DELETE"]
    assert aborts == [204] or (aborts == [] and version("obstore").startswith("0.11."))


def test_what_a_part_raises_is_raised_and_nothing_is_left(proxied: Objects, proxy: Proxy) -> None:
    def parts():  # type: ignore[no-untyped-def]
        yield memoryview(bytes(PART))
        raise PermissionError(1, "the disk of the test", "path")

    with pytest.raises(PermissionError, match="the disk of the test"):
        proxied.upload("a", parts(), PART, 2)
    assert list(proxied.list("")) == []
    assert_aborted(proxy)


def test_an_upload_whose_part_is_refused_is_aborted(proxied: Objects, proxy: Proxy) -> None:
    proxy.rules.append(where(proxies.answers(403, "AccessDenied"), "PUT", "*partNumber=2*"))
    with pytest.raises(PermissionError):
        proxied.upload("a", iter([memoryview(bytes(PART))] * 3), PART, 2)
    assert list(proxied.list("")) == []
    assert_aborted(proxy)


def test_parts_that_a_busy_store_or_the_network_lost_are_sent_again(proxied: Objects, proxy: Proxy) -> None:
    proxy.rules += [
        where(proxies.answers(503, "SlowDown"), "POST", "*uploads*", times=1),
        where(proxies.resets, "PUT", "*partNumber=1*", times=1),
        where(proxies.loses_answer, "PUT", "*partNumber=2*", times=1),
        where(proxies.answers(500, "InternalError"), "PUT", "*partNumber=3*", times=1),
        where(proxies.answers(503, "SlowDown"), "POST", "*uploadId*", times=1),
    ]
    parts = [bytes([65 + number]) * PART for number in range(3)]
    proxied.upload("a", map(memoryview, parts), PART, 2)
    assert proxied.get("a")[0] == b"".join(parts)


@pytest.mark.parametrize("action", [proxies.cuts(30), proxies.loses_answer])
def test_an_upload_that_is_complete_but_for_its_last_answer_is_no_failure(
    proxied: Objects, proxy: Proxy, action: proxies.Action
) -> None:
    proxy.rules.append(where(action, "POST", "*uploadId*", times=1))
    proxied.upload("a", iter([memoryview(bytes(PART))] * 2), PART, 2)
    assert proxied.head("a").size == 2 * PART


def test_an_upload_that_the_store_has_lost_is_unavailable(proxied: Objects, proxy: Proxy) -> None:
    proxy.rules.append(where(proxies.answers(404, "NoSuchUpload"), "PUT", "*partNumber=2*"))
    with pytest.raises(StoreUnavailable, match="the upload was lost"):
        proxied.upload("a", iter([memoryview(bytes(PART))] * 2), PART, 2)
    assert list(proxied.list("")) == []


@pytest.mark.slow
def test_no_more_parts_are_taken_than_are_under_way(proxied: Objects, proxy: Proxy) -> None:
    taken: list[int] = []
    event = threading.Event()
    proxy.rules.append(where(proxies.waits_for(event), "PUT"))

    def parts():  # type: ignore[no-untyped-def]
        for number in range(12):
            taken.append(number)
            yield memoryview(bytes(PART))

    arrived = threading.Semaphore(0)
    proxy.rules.insert(0, lambda request: arrived.release() if request.method == "PUT" else None)
    uploading = threading.Thread(target=proxied.upload, args=("a", parts(), PART, 3))
    uploading.start()
    for _ in range(3):
        assert arrived.acquire(timeout=60)
    # Three under way, one that waits for its turn, and nothing else.
    assert len(taken) <= 4
    event.set()
    uploading.join()
    assert len(taken) == 12


@pytest.mark.parametrize("action", [proxies.answers(503, "SlowDown"), proxies.answers(500, "InternalError")])
def test_a_request_to_a_busy_store_is_sent_again(proxied: Objects, proxy: Proxy, action: proxies.Action) -> None:
    ways = [
        lambda: proxied.put("a", b"a"),
        lambda: proxied.get("a"),
        lambda: proxied.head("a"),
        lambda: list(proxied.list("")),
        lambda: proxied.get_range("a", 0, 1),
        lambda: proxied.put_if("a", b"b", proxied.head("a").condition),
        lambda: proxied.delete(["a"]),
        lambda: proxied.put_if("a", b"a", None),
    ]
    for way in ways:
        proxy.again(at(1, action))
        way()
        assert [entry.status for entry in proxy.log][:2] != [200, 200]


def test_a_store_that_stays_busy_gets_no_more_requests_than_wanted(proxied: Objects, proxy: Proxy) -> None:
    proxy.again(where(proxies.answers(503, "SlowDown"), times=6))
    with pytest.raises(StoreUnavailable):
        proxied.get("a")
    assert [entry.status for entry in proxy.log] == [503] * 4


def test_a_deletion_whose_answer_is_lost_is_made_again(proxied: Objects, proxy: Proxy) -> None:
    for action in (proxies.resets, proxies.loses_answer):
        proxied.put("a", b"a")
        proxy.again(at(1, action))
        proxied.delete(["a"])
        assert list(proxied.list("")) == []


def test_a_read_whose_answer_is_cut_is_read_again(proxied: Objects, proxy: Proxy) -> None:
    data = os.urandom(300_000)
    proxied.put("a", data)
    for ask in (lambda: proxied.get("a")[0], lambda: bytes(proxied.get_range("a", 0, len(data)))):
        for action in (proxies.cuts(100_000), proxies.cuts(0), proxies.resets, proxies.loses_answer):
            proxy.again(at(1, action))
            assert ask() == data


def test_a_conditional_write_whose_answer_is_lost_is_undecided(proxied: Objects, proxy: Proxy) -> None:
    proxy.again(at(1, proxies.loses_answer))
    with pytest.raises((StoreUnavailable, ConditionFailed)):
        proxied.put_if("a", b"first", None)
    data, condition = proxied.get("a")
    assert data == b"first"
    proxy.again(at(1, proxies.loses_answer))
    with pytest.raises((StoreUnavailable, ConditionFailed)):
        proxied.put_if("a", b"second", condition)
    assert proxied.get("a")[0] == b"second"


def test_a_conflict_of_conditional_writes_is_a_failed_condition(proxy: Proxy, folder: str) -> None:
    proxied = Objects(parse_address(folder), most_tries=2)
    condition = proxied.put_if("a", b"first", None)
    proxy.rules.append(where(proxies.answers(409, "ConditionalRequestConflict"), "PUT"))
    with pytest.raises(ConditionFailed, match="ConditionalRequestConflict"):
        proxied.put_if("b", b"first", None)
    with pytest.raises(ConditionFailed, match="ConditionalRequestConflict"):
        proxied.put_if("a", b"second", condition)


def test_a_process_has_one_client_for_each_address(folder: str) -> None:
    assert connect(parse_address(folder)) is connect(parse_address(folder + "/"))
    assert connect(parse_address(folder)) is not connect(parse_address(folder + "/deeper"))


def test_a_child_of_a_process_that_has_used_the_client_is_refused_and_does_not_hang(objects: Objects) -> None:
    objects.put("a", b"a")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            connect(parse_address(objects.address)).put("b", b"b")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"a forked process cannot use the client of its parent" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)
    assert [each.key for each in objects.list("")] == ["a"]
