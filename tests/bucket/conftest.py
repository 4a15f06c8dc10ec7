"""Fixtures: an S3 server, and a fresh folder in a bucket of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.bucket.azurite import PROGRAM, running_azurite
from tests.bucket.memory_objects import Bucket
from tests.bucket.proxy import Proxy, running_proxy
from tests.bucket.saving import Job, started
from tests.bucket.server import Server, running_server

BUCKET = "checkpoints"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server with the bucket `BUCKET`; the same for all tests of this process."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with running_server() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def folder(s3: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder that no other test uses; the environment leads to its server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture(scope="session")
def azure() -> Iterator[dict[str, str]]:
    """The variables that lead to an Azure Blob server with the container `BUCKET`."""
    pytest.importorskip("obstore")
    if PROGRAM is None:
        pytest.skip("azurite is not installed: ./run_tests.sh --all installs it, where npm is there")
    with running_azurite(BUCKET) as environment:
        yield environment


@pytest.fixture
def azure_folder(azure: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder that no other test uses, on an Azure Blob server."""
    for name, value in azure.items():
        monkeypatch.setenv(name, value)
    return f"az://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture
def proxy(s3: Server, folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between this test and its server; the environment leads to the proxy."""
    with running_proxy(s3.endpoint) as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket() -> Bucket:
    """An empty bucket in memory."""
    return Bucket()


@pytest.fixture
def job(bucket: Bucket) -> Job:
    """A job that has taken the folder in `bucket`."""
    return started(bucket)
