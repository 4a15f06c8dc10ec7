"""What the client sends to Google Cloud Storage and makes of its answers, on exchanges as its documentation has them.

No server here keeps the conditions of that store, so nothing shows that the store itself does what it documents.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.http_server import serving
from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects
from torchtitan_lite.config.address import parse_address

pytest.importorskip("obstore")


XML = {"Content-Type": "application/xml; charset=UTF-8"}
NAMESPACE = "xmlns='http://s3.amazonaws.com/doc/2006-03-01/'"
FIRST, SECOND = "1764000000000001", "1764000000000002"
ONLY_NEW = "x-goog-if-generation-match: 0"


class Exchange(NamedTuple):
    """A request of the client, and the store's answer."""

    request: str
    """The method and the path, and in a second line its condition or range, if it has one."""
    status: int
    headers: dict[str, str]
    body: bytes = b""
    sent: bytes = b""
    """The body of the request."""


def version(generation: str) -> dict[str, str]:
    return {"ETag": f'"{generation}-md5"', "x-goog-generation": generation, "x-goog-metageneration": "1"}


def condition(generation: str) -> Condition:
    return {"e_tag": f'"{generation}-md5"', "version": generation}


def stored(generation: str) -> dict[str, str]:
    return version(generation) | {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "x-goog-hash": "crc32c=AAAAAA=="}


def error(code: str, text: str) -> bytes:
    return f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()


FAILED = error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
MISSING = error("NoSuchKey", "The specified key does not exist.")


@contextmanager
def replayed(exchanges: list[Exchange], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """Yield the objects of a server that takes each request of `exchanges` out of them, in any order; none is left."""
    left, unknown, lock = exchanges, list[str](), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = {name.lower() for name in self.headers} & {"range", "x-goog-if-generation-match", "if-match"}
            lines = [f"{self.command} {self.path}", *(f"{name}: {self.headers[name]}" for name in sorted(asked))]
            with lock:
                found = next((each for each in left if (each.request, each.sent) == ("\n".join(lines), sent)), None)
                if found is None:
                    unknown.append(f"{lines} {sent!r}")
                else:
                    left.remove(found)
            answer = found or Exchange("", 400, {})
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers and answer.status != 204:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with serving(Handler) as address:
        account = {"gcs_base_url": f"http://{address}", "disable_oauth": True}
        key = folder / "account.json"
        key.write_text(json.dumps(account | dict.fromkeys(("client_email", "private_key", "private_key_id"), "")))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(key))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield Objects(parse_address("gs://bucket/run"), deadline_seconds=8.0, most_tries=1)
        assert (unknown, left) == ([], [])


def test_a_condition_is_the_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = [
        Exchange(f"PUT /bucket/run%2Fa\n{ONLY_NEW}", 200, version(FIRST), sent=b"first"),
        Exchange(f"PUT /bucket/run%2Fa\n{ONLY_NEW}", 412, XML, FAILED, sent=b"second"),
        Exchange(f"PUT /bucket/run%2Fa\nx-goog-if-generation-match: {FIRST}", 200, version(SECOND), sent=b"third"),
        Exchange(f"PUT /bucket/run%2Fa\nx-goog-if-generation-match: {FIRST}", 412, XML, FAILED, sent=b"fourth"),
        Exchange("PUT /bucket/run%2Fb", 200, version(FIRST), sent=b"plain"),
    ]
    with replayed(exchanges, tmp_path, monkeypatch) as objects:
        assert objects.put_if("a", b"first", None) == condition(FIRST)
        with pytest.raises(ConditionFailed, match=r"another version is there \(412"):
            objects.put_if("a", b"second", None)
        assert objects.put_if("a", b"third", condition(FIRST)) == condition(SECOND)
        with pytest.raises(ConditionFailed):
            objects.put_if("a", b"fourth", condition(FIRST))
        objects.put("b", b"plain")


def test_what_is_read_has_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"Content-Range": "bytes 1-3/5"}
    exchanges = [
        Exchange("GET /bucket/run%2Fa", 200, stored(FIRST), b"hello"),
        Exchange("HEAD /bucket/run%2Fa", 200, stored(FIRST) | {"Content-Length": "5"}),
        Exchange("GET /bucket/run%2Fa\nrange: bytes=1-3", 206, stored(FIRST) | part, b"ell"),
        Exchange("GET /bucket/run%2Fb", 404, XML, MISSING),
    ]
    with replayed(exchanges, tmp_path, monkeypatch) as objects:
        assert objects.get("a") == (b"hello", condition(FIRST))
        found = objects.head("a")
        assert (found.size, dict(found.condition)) == (5, condition(FIRST))
        assert bytes(objects.get_range("a", 1, 4)) == b"ell"
        with pytest.raises(FileNotFoundError):
            objects.get("b")


def test_a_list_has_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(name: str, size: int, rest: str) -> bytes:
        contents = (
            f"<Contents><Key>run/s/{name}</Key><Generation>{FIRST}</Generation><MetaGeneration>1</MetaGeneration>"
            f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{FIRST}-md5"</ETag><Size>{size}</Size></Contents>'
        )
        text = f"<ListBucketResult {NAMESPACE}><Name>bucket</Name><Prefix>run/s/</Prefix>{rest}{contents}"
        return f"<?xml version='1.0' encoding='UTF-8'?>{text}</ListBucketResult>".encode()

    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>"
    exchanges = [
        Exchange("GET /bucket?list-type=2&prefix=run%2Fs%2F", 200, XML, page("a", 5, more)),
        Exchange(
            "GET /bucket?list-type=2&prefix=run%2Fs%2F&continuation-token=next",
            200,
            XML,
            page("b", 6, "<IsTruncated>false</IsTruncated>"),
        ),
    ]
    with replayed(exchanges, tmp_path, monkeypatch) as objects:
        assert [(each.key, each.size) for each in objects.list("s/")] == [("s/a", 5), ("s/b", 6)]


def test_a_missing_object_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = [
        Exchange("DELETE /bucket/run%2Fa", 204, {}),
        Exchange("DELETE /bucket/run%2Fb", 404, XML, MISSING),
        Exchange("DELETE /bucket/run%2Fc", 204, {}),
    ]
    with replayed(exchanges, tmp_path, monkeypatch) as objects:
        objects.delete(["a", "b", "c"])
    assert exchanges == []


def test_a_large_object_goes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = f"<InitiateMultipartUploadResult {NAMESPACE}><Bucket>bucket</Bucket><Key>run/a</Key><UploadId>U</UploadId>"
    done = f'<CompleteMultipartUploadResult {NAMESPACE}><Bucket>bucket</Bucket><Key>run/a</Key><ETag>"e-2"</ETag>'
    parts = "".join(f'<Part><ETag>"{number}"</ETag><PartNumber>{number}</PartNumber></Part>' for number in (1, 2))
    exchanges = [
        Exchange("POST /bucket/run%2Fa?uploads=", 200, XML, f"{begun}</InitiateMultipartUploadResult>".encode()),
        Exchange("PUT /bucket/run%2Fa?partNumber=1&uploadId=U", 200, {"ETag": '"1"'}, sent=b"11111111"),
        Exchange("PUT /bucket/run%2Fa?partNumber=2&uploadId=U", 200, {"ETag": '"2"'}, sent=b"2"),
        Exchange(
            "POST /bucket/run%2Fa?uploadId=U",
            200,
            XML | {"x-goog-generation": FIRST},
            f"{done}</CompleteMultipartUploadResult>".encode(),
            sent=f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode(),
        ),
    ]
    with replayed(exchanges, tmp_path, monkeypatch) as objects:
        objects.upload("a", iter([memoryview(b"11111111"), memoryview(b"2")]), part_bytes=8, at_a_time=2)
    assert exchanges == []


@pytest.mark.parametrize(
    ("status", "code", "finding"),
    [
        (403, "AccessDenied", "these credentials have no permission, or are wrong"),
        (401, "AuthenticationRequired", "these credentials have no permission, or are wrong"),
        (404, "NoSuchBucket", "the bucket does not exist: create it"),
    ],
)
def test_a_refusal_is_one_sentence(
    status: int, code: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Exchange("GET /bucket/run%2Fa", status, XML, error(code, "private text"))
    with replayed([refused], tmp_path, monkeypatch) as objects, pytest.raises(OSError, match=finding) as caught:
        objects.get("a")
    assert "private text" not in str(caught.value)
