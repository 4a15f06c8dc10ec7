"""The proxy does to each request what its rules say, and notes it."""

from __future__ import annotations

import threading
from http.client import HTTPConnection, IncompleteRead
from urllib.parse import urlsplit

import pytest

from tests.bucket import proxy as proxies
from tests.bucket.proxy import PRIVATE_TEXT, Entry, Proxy, at, where
from tests.bucket.server import SIGNATURE, Server

PATH = "/checkpoints/proxied"


def ask(proxy: Proxy, method: str, path: str = PATH, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
    try:
        connection.request(method, path, body, SIGNATURE | headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_request_without_a_rule_passes(proxy: Proxy, s3: Server) -> None:
    assert ask(proxy, "PUT", body=b"contents")[0] == 200
    assert ask(proxy, "GET") == (200, b"contents")
    assert ask(proxy, "HEAD") == (200, b"")
    assert s3.request("GET", PATH) == (200, b"contents")
    assert ask(proxy, "DELETE")[0] == 204
    assert ask(proxy, "GET")[0] == 404
    methods = [("PUT", 200), ("GET", 200), ("HEAD", 200), ("DELETE", 204), ("GET", 404)]
    assert proxy.log == [Entry(n, method, PATH, status) for n, (method, status) in enumerate(methods, 1)]


def test_one_connection_takes_several_requests(proxy: Proxy) -> None:
    connection = HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
    for number in range(3):
        connection.request("PUT", PATH, str(number), SIGNATURE)
        assert connection.getresponse().read() == b""
    connection.close()
    assert len(proxy.log) == 3


def test_a_request_is_answered_with_an_error_and_not_forwarded(proxy: Proxy, s3: Server) -> None:
    s3.request("DELETE", PATH)
    proxy.again(at(1, proxies.answers(503, "SlowDown")))
    status, body = ask(proxy, "PUT", body=b"contents")
    assert (status, b"<Code>SlowDown</Code>" in body, PRIVATE_TEXT.encode() in body) == (503, True, True)
    assert s3.request("GET", PATH)[0] == 404
    assert ask(proxy, "PUT", body=b"contents")[0] == 200


def test_a_connection_is_cut_before_or_after_the_request_is_carried_out(proxy: Proxy, s3: Server) -> None:
    s3.request("DELETE", PATH)
    proxy.again(at(1, proxies.resets), at(2, proxies.loses_answer))
    with pytest.raises(ConnectionError):
        ask(proxy, "PUT", body=b"contents")
    assert s3.request("GET", PATH)[0] == 404
    with pytest.raises(ConnectionError):
        ask(proxy, "PUT", body=b"contents")
    assert s3.request("GET", PATH) == (200, b"contents")
    assert [entry.status for entry in proxy.log] == [None, None]


def test_an_answer_is_cut(proxy: Proxy) -> None:
    ask(proxy, "PUT", body=b"contents")
    proxy.again(where(proxies.cuts(3), "GET", times=1))
    with pytest.raises((IncompleteRead, ConnectionError)):
        ask(proxy, "GET")
    assert ask(proxy, "GET") == (200, b"contents")
    assert [entry.status for entry in proxy.log] == [None, 200]


def test_conditions_are_stripped(proxy: Proxy) -> None:
    ask(proxy, "PUT", body=b"first")
    assert ask(proxy, "PUT", body=b"second", **{"If-None-Match": "*"})[0] == 412
    proxy.rules.append(where(proxies.strips_conditions, "PUT"))
    assert ask(proxy, "PUT", body=b"second", **{"If-None-Match": "*"})[0] == 200
    assert ask(proxy, "GET") == (200, b"second")


def test_a_request_waits_for_an_event_while_others_pass(proxy: Proxy) -> None:
    event, found = threading.Event(), []
    proxy.again(at(1, proxies.waits_for(event)))
    arrived = threading.Event()
    proxy.rules.insert(0, lambda request: arrived.set() if request.number == 1 else None)
    waiting = threading.Thread(target=lambda: found.append(ask(proxy, "PUT", body=b"late")))
    waiting.start()
    assert arrived.wait(60)
    assert ask(proxy, "PUT", body=b"early")[0] == 200
    assert ask(proxy, "GET") == (200, b"early")
    event.set()
    waiting.join()
    assert found == [(200, b"")]
    assert ask(proxy, "GET") == (200, b"late")


def test_something_is_called_before_and_after_a_request(proxy: Proxy, s3: Server) -> None:
    s3.request("PUT", PATH, b"before")
    seen = []
    called = proxies.calls(lambda: seen.append(s3.request("GET", PATH)[1]), lambda: seen.append(b"over"))
    proxy.again(where(called, "PUT"))
    assert ask(proxy, "PUT", body=b"after")[0] == 200
    assert seen[0] == b"before"
    assert s3.request("GET", PATH) == (200, b"after")


def test_a_request_that_hangs_ends_with_the_proxy(s3: Server) -> None:
    arrived = threading.Event()
    failures: list[Exception] = []

    def hanging(proxy: Proxy) -> None:
        try:
            ask(proxy, "GET")
        except Exception as error:
            failures.append(error)

    with proxies.running_proxy(s3.endpoint) as proxy:
        proxy.rules.append(where(proxies.calls(arrived.set, then=proxies.hangs)))
        waiting = threading.Thread(target=hanging, args=[proxy])
        waiting.start()
        assert arrived.wait(60)
    waiting.join()
    assert len(failures) == 1
