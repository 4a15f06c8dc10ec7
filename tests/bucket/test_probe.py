"""A folder is refused where the store ignores conditions, and nothing stays of the probe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bucket import proxy as proxies
from tests.bucket.proxy import Proxy, Request, where
from tests.examples import mostly_slow
from torchtitan_lite.bucket.identity import probe
from torchtitan_lite.bucket.objects import Objects, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.errors import FolderUnusable


@pytest.fixture
def objects(proxy: Proxy, folder: str) -> Objects:
    return connect(parse_address(folder))


def test_a_store_with_conditions_passes_and_nothing_stays(objects: Objects, proxy: Proxy) -> None:
    probe(objects)
    assert list(objects.list("")) == []
    assert [entry.method for entry in proxy.log][:4] == ["PUT"] * 4


def test_jobs_that_probe_at_once_pass(objects: Objects) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(probe, [objects] * 8)) == [None] * 8


@pytest.mark.promise("A store that ignores conditions is refused.", section="bucket")
@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_ignores_a_condition_is_refused(objects: Objects, proxy: Proxy, header: str) -> None:
    proxy.rules.append(lambda request: proxies.strips_conditions if header in request.headers else None)
    with pytest.raises(FolderUnusable, match="does not carry out conditional writes") as caught:
        probe(objects)
    assert caught.value.folder == objects.address
    assert list(objects.list("")) == []


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_refuses_every_condition_is_refused(objects: Objects, proxy: Proxy, header: str) -> None:
    refuses = proxies.answers(412, "PreconditionFailed")
    proxy.rules.append(lambda request: refuses if header in request.headers else None)
    with pytest.raises(FolderUnusable, match="does not carry out conditional writes"):
        probe(objects)


@pytest.mark.parametrize("number", mostly_slow(range(1, 5), kept=[2]))
@pytest.mark.parametrize("action", [proxies.loses_answer, proxies.resets, proxies.answers(503, "SlowDown")])
def test_a_lost_request_of_the_probe_is_no_finding(
    objects: Objects, proxy: Proxy, number: int, action: proxies.Action
) -> None:
    puts: list[Request] = []

    def rule(request: Request) -> proxies.Action | None:
        puts.extend([request] * (request.method == "PUT"))
        return action if request.method == "PUT" and len(puts) == number else None

    proxy.rules.append(rule)
    probe(objects)
    assert list(objects.list("")) == []


def test_a_probe_that_stays_is_a_warning(objects: Objects, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.rules.append(where(proxies.answers(403, "AccessDenied"), "POST"))
    probe(objects)
    assert "Could not delete" in caplog.text
