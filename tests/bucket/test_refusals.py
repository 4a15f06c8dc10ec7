"""What an object store refuses, and an environment that leads to none, is said in words, without a secret."""

from __future__ import annotations

import pickle
import sys

import pytest

from tests.bucket import proxy as proxies
from tests.bucket.proxy import PRIVATE_TEXT, Proxy, where
from tests.bucket.server import Server
from torchtitan_lite.bucket.objects import Objects, StoreUnavailable, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.errors import ConfigError, ExtraMissing

PART = 5 * BLOCK_BYTES

REFUSALS = [
    (403, "AccessDenied", PermissionError, r"these credentials have no permission, or are wrong \(403 AccessDenied\)"),
    (403, "InvalidAccessKeyId", PermissionError, "does not know the access key: see AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", PermissionError, "see AWS_SECRET_ACCESS_KEY"),
    (403, "RequestTimeTooSkewed", PermissionError, "the clock of this host and the clock of the store differ too much"),
    (400, "ExpiredToken", PermissionError, "the credentials have expired"),
    (401, "Unauthorized", PermissionError, "no permission"),
    (404, "NoSuchBucket", FileNotFoundError, "the bucket does not exist: create it"),
    (400, "InvalidRequest", OSError, r"does not accept the request \(400 InvalidRequest\)"),
    (501, "NotImplemented", StoreUnavailable, r"no usable answer from the store \(501 NotImplemented\)"),
    (503, "SlowDown", StoreUnavailable, r"no usable answer from the store \(503 SlowDown\)"),
]


@pytest.mark.parametrize(("status", "code", "kind", "words"), REFUSALS, ids=[code for _, code, *_ in REFUSALS])
def test_a_refusal_is_one_of_the_protocols_errors_without_a_secret(
    proxy: Proxy, folder: str, status: int, code: str, kind: type[OSError], words: str
) -> None:
    objects = Objects(parse_address(folder), most_tries=1)
    proxy.rules.append(where(proxies.answers(status, code)))
    for ask in (
        lambda: objects.get("a"),
        lambda: objects.put("a", b"a"),
        lambda: objects.put_if("a", b"a", None),
        lambda: objects.put_if("a", b"a", {"e_tag": '"1"'}),
        lambda: list(objects.list("")),
        lambda: objects.get_range("a", 0, 1),
        lambda: objects.upload("a", iter([memoryview(bytes(PART))] * 2), PART, 1),
        lambda: objects.delete(["a"]),
    ):
        with pytest.raises(kind, match=words) as caught:
            ask()
        check_shows_no_secret(caught.value)


def check_shows_no_secret(error: OSError) -> None:
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert error.filename and error.filename.startswith("s3://checkpoints/")
    shown = str(error) + repr(error) + repr(pickle.loads(pickle.dumps(error)))
    for secret in (PRIVATE_TEXT, "http://127", "AKIATESTTESTTEST", "secret-of-the-tests", "Signature="):
        assert secret not in shown


def test_a_store_that_is_not_there_is_unavailable(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    objects = Objects(parse_address(folder), most_tries=1)
    with pytest.raises(StoreUnavailable, match="the server refuses connections") as caught:
        objects.get("a")
    check_shows_no_secret(caught.value)


def test_a_store_that_hangs_is_unavailable_at_the_deadline(proxy: Proxy, folder: str) -> None:
    objects = Objects(parse_address(folder), deadline_seconds=0.5, bulk_seconds=0.5)
    proxy.rules.append(where(proxies.hangs))
    for ask in (
        lambda: objects.get("a"),
        lambda: objects.put("a", b"a"),
        lambda: objects.put_if("a", b"a", None),
        lambda: objects.get_range("a", 0, 1),
    ):
        with pytest.raises(StoreUnavailable, match="too slow"):
            ask()


def test_http_has_to_be_allowed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(PermissionError, match="set AWS_ALLOW_HTTP=true") as caught:
        Objects(parse_address(folder), most_tries=1).get("a")
    check_shows_no_secret(caught.value)


def test_missing_credentials_are_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(PermissionError, match="there are no credentials: set them, as AWS_ACCESS_KEY_ID") as caught:
        Objects(parse_address(folder), most_tries=1).get("a")
    check_shows_no_secret(caught.value)


def test_conditional_writes_that_are_switched_off_are_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    with pytest.raises(PermissionError, match="conditional writes are switched off: unset AWS_CONDITIONAL_PUT"):
        Objects(parse_address(folder)).put_if("a", b"a", None)


@pytest.mark.parametrize(
    ("address", "name", "value", "words"),
    [
        ("s3://no-store/run", "AWS_ENDPOINT_URL", "5ecret", "AWS_ENDPOINT_URL is no URL of a server"),
        ("s3://no-store/run", "AWS_CONDITIONAL_PUT", "5ecret", "the environment does not say how to reach the store"),
        ("s3://no-store/run", "AWS_ACCESS_KEY_ID", None, "Set its variables, such as AWS_ACCESS_KEY_ID"),
        ("az://no-store/run", "AWS_REGION", "5ecret", "Set its variables, such as AZURE_STORAGE_ACCOUNT_NAME"),
        ("gs://no-store/run", "GOOGLE_SERVICE_ACCOUNT", "/5ecret", "Set its variables, such as GOOGLE_SERVICE_ACCOUNT"),
    ],
)
def test_an_environment_that_leads_to_no_store_is_a_wrong_configuration(
    folder: str, monkeypatch: pytest.MonkeyPatch, address: str, name: str, value: str | None, words: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        connect(parse_address(address))
    assert "5ecret" not in str(caught.value)


def test_without_its_package_the_extra_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissing, match=r"obstore is not installed. Install it with: pip install '.*\[cloud\]'"):
        Objects(parse_address(folder))


def test_a_bucket_that_does_not_exist_is_named(s3: Server, folder: str) -> None:
    objects = connect(parse_address("s3://no-such-bucket/run"))
    for ask in (lambda: objects.put("a", b"a"), lambda: objects.put_if("a", b"a", None), lambda: objects.get("a")):
        with pytest.raises(FileNotFoundError, match=r"the bucket does not exist: create it.*s3://no-such-bucket/run/a"):
            ask()
