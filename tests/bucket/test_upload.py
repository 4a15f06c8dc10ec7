"""A file becomes an object with the same bytes and the digests of what was sent, from memory or through parts."""

from __future__ import annotations

import errno
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bucket import proxy as proxies
from tests.bucket.proxy import Proxy, where
from tests.disk.sources import bounced, in_place
from torchtitan_lite import faults
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.bucket.object_upload import MOST_PARTS, PART_BYTES, ObjectToUpload, part_bytes_of, upload
from torchtitan_lite.bucket.objects import Objects, StoreUnavailable, connect
from torchtitan_lite.bucket.s3_parts import S3Parts, s3_parts_at
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_writer import Bounced, FileSource
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord

DATA = random.Random(0).randbytes(2 * PART_BYTES + BLOCK_BYTES + 17)
SIZES = [0, 1, BLOCK_BYTES, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, len(DATA)]


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("source_of", [in_place, pytest.param(bounced, marks=pytest.mark.slow)])
def test_the_object_has_the_bytes_and_the_record_their_digests(folder: str, num_bytes: int, source_of) -> None:  # type: ignore[no-untyped-def]
    data = DATA[:num_bytes]
    new = ObjectToUpload(folder, "step-1.0123456789abcdef/__0_0.distcp")
    assert str(new) == f"{folder}/step-1.0123456789abcdef/__0_0.distcp"
    assert pickle.loads(pickle.dumps(new)) == new
    assert new.write(source_of(data)) == FileRecord.of(data)
    objects = connect(parse_address(folder))
    assert [(each.key, each.size) for each in objects.list("")] == [(new.key, num_bytes)]
    assert objects.get(new.key)[0] == data


def test_a_timeout_of_the_other_client_is_an_error_of_the_store() -> None:
    """Its errors of connections have the attribute `response`, and None in it."""
    exceptions = pytest.importorskip("botocore.exceptions")

    class Client:
        def get_paginator(self, name: str) -> None:
            raise exceptions.ReadTimeoutError(endpoint_url="http://store")

    with pytest.raises(StoreUnavailable, match="ReadTimeoutError"):
        S3Parts(Client(), parse_address("s3://bucket/run")).remove_all_but("step-1.0")


def test_a_record_that_is_known_is_not_made_again(folder: str) -> None:
    known = FileRecord(10, b"it is so")
    assert ObjectToUpload(folder, "a").write(in_place(b"0123456789", known)) is known


@given(st.integers(0, 5 << 40))
def test_parts_are_complete_blocks_and_no_more_than_a_store_takes(num_bytes: int) -> None:
    part_bytes = part_bytes_of(num_bytes)
    assert part_bytes % BLOCK_BYTES == 0
    assert part_bytes >= PART_BYTES
    assert -(-num_bytes // part_bytes) <= MOST_PARTS


@pytest.mark.slow
def test_a_small_file_is_one_request_and_a_large_one_is_sent_in_parts(proxy: Proxy, folder: str) -> None:
    objects = Objects(parse_address(folder))
    upload(objects, "a", in_place(DATA[: PART_BYTES - 1]))
    assert [entry.method for entry in proxy.log] == ["PUT"]
    proxy.again()
    upload(objects, "a", in_place(DATA))
    assert sorted(entry.method for entry in proxy.log) == ["POST", "POST", "PUT", "PUT", "PUT"]


def test_a_small_file_of_a_save_is_one_request_also_where_uploads_can_continue(proxy: Proxy, folder: str) -> None:
    pytest.importorskip("boto3")
    open_bucket(folder).send("step-1.0123456789abcdef", "a", in_place(b"small"))
    assert [(entry.method, entry.path.rpartition("/")[2]) for entry in proxy.log] == [("PUT", "a")]


def test_parts_come_without_checksums_that_not_every_store_knows(proxy: Proxy, folder: str) -> None:
    pytest.importorskip("boto3")
    names: set[str] = set()
    proxy.rules.append(lambda request: names.update(request.headers))  # type: ignore[func-returns-value]  # no action
    parts = s3_parts_at(folder)
    assert parts is not None
    parts.upload("a", in_place(b"small"))
    assert "authorization" in names
    assert not [name for name in names if "checksum" in name or name == "x-amz-trailer"]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_upload_that_is_unknown_at_its_end_counts_if_the_object_is_there_and_else_begins_again(
    proxy: Proxy, folder: str, is_there: bool
) -> None:
    """The answer that completes it may be lost; the request, sent again, finds no upload any more."""
    pytest.importorskip("boto3")
    parts, objects = s3_parts_at(folder), connect(parse_address(folder))
    assert parts is not None
    rules = [where(proxies.answers(404, "NoSuchUpload"), "POST", "*uploadId=*")]
    if is_there:
        rules.insert(0, where(proxies.loses_answer, "POST", "*uploadId=*", times=1))
        proxy.again(*rules)
        parts.upload("a", in_place(DATA))
    else:
        objects.put("a", b"of another size")
        for key in ("a", "b"):
            proxy.again(*rules)
            with pytest.raises(StoreUnavailable, match="NoSuchUpload"):
                parts.upload(key, in_place(DATA))
        parts.remove_all_but("")
        proxy.again()
        parts.upload("a", in_place(DATA))
    assert objects.get("a")[0] == DATA


def test_a_part_that_is_sent_again_has_the_same_bytes(proxy: Proxy, folder: str) -> None:
    proxy.rules += [
        where(proxies.loses_answer, "PUT", "*partNumber=1*", times=1),
        where(proxies.answers(503, "SlowDown"), "PUT", "*partNumber=2*", times=1),
    ]
    objects = Objects(parse_address(folder))
    assert upload(objects, "a", bounced(DATA)) == FileRecord.of(DATA)
    assert objects.get("a")[0] == DATA


@pytest.mark.parametrize("num_bytes", [100, len(DATA)])
def test_the_faults_of_a_write_happen_in_an_upload(folder: str, num_bytes: int) -> None:
    new, objects = ObjectToUpload(folder, "step-1.0123456789abcdef/__0_0.distcp"), connect(parse_address(folder))
    for spec, code in [
        ("EIO@write:path=*.distcp", errno.EIO),
        ("tear@write", errno.EIO),
        ("EDQUOT@open", errno.EDQUOT),
    ]:
        faults.install(spec, rank=0)
        with pytest.raises(OSError, match=r"s3://checkpoints/run-.*/__0_0\.distcp") as caught:
            new.write(in_place(DATA[:num_bytes]))
        assert caught.value.errno == code
        assert list(objects.list("")) == []
    faults.install("short@write:times=2", rank=0)
    assert new.write(in_place(DATA[:num_bytes])) == FileRecord.of(DATA[:num_bytes])
    assert objects.get(new.key)[0] == DATA[:num_bytes]


def test_what_the_source_raises_is_raised(folder: str) -> None:
    def fill(buffer: memoryview, begin: int, end: int) -> None:
        raise MemoryError("no room")

    source: FileSource = Bounced(len(DATA), fill)
    with pytest.raises(MemoryError, match="no room"):
        ObjectToUpload(folder, "a").write(source)
    assert list(connect(parse_address(folder)).list("")) == []
