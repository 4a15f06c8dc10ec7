"""An object store, reached through the package `obstore`.

Each verb ends before its deadline: the client tries again what a busy store or a cut connection lost, for three
quarters of it, and no request takes longer than the last quarter. So a conditional write whose first answer was lost
may be refused by its own first try; the caller finds out by reading. The configuration is the environment's. A process
has one client for each address; a forked child makes its own.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, islice
from typing import Any

from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Listed, StoreUnavailable
from torchtitan_lite.bucket.refusals import PastTheEnd, is_missing_object, meaning
from torchtitan_lite.config.address import Address
from torchtitan_lite.distributed.environment import variable_value
from torchtitan_lite.errors import ConfigError, ExtraMissing

DEADLINE_SECONDS = 60.0
"""Of a verb on small objects, all tries together."""
BULK_SECONDS = 240.0
"""Of each part of an upload and each range: a part of 8 MiB in 60 s needs 140 KB/s."""
MOST_TRIES = 30
"""After the first; the deadline comes sooner."""
_FIRST_PAUSE_SECONDS = 0.1
_DELETED_AT_A_TIME = 1000
"""What S3 takes in one request."""
_URL = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?")
_VARIABLES = {
    "s3": "such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "such as GOOGLE_SERVICE_ACCOUNT",
    "az": "such as AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""By scheme."""


def connect(address: Address) -> ObstoreObjects:
    """Return the objects below `address`; sends nothing yet. The same for each call in this process.

    Raises ExtraMissing without `obstore`, ConfigError if the environment does not suffice.
    """
    # The client of a parent has threads that its forked child lacks.
    return _connected_objects(address, os.getpid())


@functools.cache
def _connected_objects(address: Address, process: int) -> ObstoreObjects:
    return ObstoreObjects(address)


class ObstoreObjects:
    """The objects below `address`. Any thread; requests end within `deadline_seconds`, those for bulk data later.

    A request that fails is sent up to `most_tries` times more.
    """

    def __init__(
        self,
        address: Address,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        bulk_seconds: float = BULK_SECONDS,
        most_tries: int = MOST_TRIES,
    ) -> None:
        self.address = str(address)
        self._client = _client()
        # NotImplementedError: the environment switches conditional writes off.
        self._errors = (self._client.exceptions.BaseError, OSError, NotImplementedError)
        # Few stores say for a missing object that it is deleted now.
        self._deletes_in_bulk = address.scheme == "s3"
        self._small = _open_store(address, deadline_seconds, most_tries)
        self._bulk = _open_store(address, bulk_seconds, most_tries)

    def get(self, key: str) -> tuple[bytes, Condition]:
        with self._translated(key):
            found = self._client.get(self._small, key)
            return bytes(found.bytes()), _version_condition(found.meta)

    def put(self, key: str, data: bytes) -> None:
        with self._translated(key):
            self._client.put(self._small, key, data, mode="overwrite", use_multipart=False)

    def put_if(self, key: str, data: bytes, condition: Condition | None) -> Condition:
        mode = "create" if condition is None else dict(condition)
        try:
            with self._translated(key):
                return _version_condition(self._client.put(self._small, key, data, mode=mode, use_multipart=False))
        except FileNotFoundError as error:
            if condition is None or not is_missing_object(error):
                raise
            raise ConditionFailed(error.errno, error.strerror, error.filename) from None

    def upload(self, key: str, parts: Iterator[memoryview], part_bytes: int, at_a_time: int) -> None:
        source = _PartsToSend(parts)
        first = next(source, memoryview(b""))
        try:
            with self._translated(key):
                # What fits into one part is one request.
                if len(first) < part_bytes:
                    self._client.put(self._bulk, key, first, use_multipart=False)
                else:
                    several = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": at_a_time}
                    self._client.put(self._bulk, key, chain([first], source), **several)
        except OSError as error:
            if source.failure is not None:
                raise source.failure from None
            if self._is_complete(key, source):
                return
            if not is_missing_object(error):
                raise
            finding = "no usable answer from the store (the upload was lost)"
            raise StoreUnavailable(errno.ETIMEDOUT, finding, error.filename) from None

    def _is_complete(self, key: str, source: _PartsToSend) -> bool:
        """Return whether the new object `key` is there, though the answer that says so was lost."""
        try:
            return source.is_over and self.head(key).size == source.num_bytes
        except OSError:
            return False

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        if begin >= end:
            return memoryview(b"")
        try:
            with self._translated(key):
                return memoryview(self._client.get_range(self._bulk, key, start=begin, end=end))
        except PastTheEnd:
            return memoryview(b"")

    def head(self, key: str) -> Listed:
        with self._translated(key):
            # obstore 0.11 has the complete path in it.
            return dataclasses.replace(_listed_object(self._client.head(self._small, key)), key=key)

    def list(self, prefix: str) -> Iterator[Listed]:
        # The client lists complete folders only.
        folder = prefix.rpartition("/")[0]
        with self._translated(prefix):
            for page in self._client.list(self._small, folder or None, chunk_size=1000):
                for each in page:
                    if each["path"].startswith(prefix):
                        yield _listed_object(each)

    def delete(self, keys: Iterable[str]) -> None:
        waiting = iter(keys)
        while batch := list(islice(waiting, _DELETED_AT_A_TIME if self._deletes_in_bulk else 1)):
            try:
                self._delete(batch)
            except StoreUnavailable:
                # Once more: the client does not repeat it after a cut connection, and it may be repeated.
                self._delete(batch)

    def _delete(self, batch: Sequence[str]) -> None:
        try:
            with self._translated(batch[0]):
                self._client.delete(self._small, batch)
        except FileNotFoundError as error:
            if not is_missing_object(error):
                raise

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        _refuse_after_a_fork(self.address)
        try:
            yield
        except self._errors as error:
            raise meaning(error, f"{self.address}/{key}") from None
        except BaseException as error:
            # What the client's language raises for a bug of its own is no Exception, and would end a heartbeat unseen.
            if type(error).__name__ != "PanicException":
                raise
            raise OSError(errno.EIO, "the client of the store failed; its message is above", key) from None


class _PartsToSend:
    """The parts of an object, and the exception that ended them: the client replaces it by one of its own."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self.num_bytes = 0
        self.is_over = False
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        try:
            part = next(self._parts)
        except StopIteration:
            self.is_over = True
            raise
        except BaseException as error:
            self.failure = error
            raise
        self.num_bytes += len(part)
        return part


def _client() -> Any:
    """Return the module obstore. Raises ExtraMissing."""
    try:
        import obstore
    except ImportError as error:
        raise ExtraMissing.of(error, "cloud", "obstore") from None
    return obstore


_user: list[int] = []
"""The process that has used the client first: in a forked child, its parent."""


def _refuse_after_a_fork(address: str) -> None:
    """Raise RuntimeError in a child forked by a process that has used the client.

    There the client would wait forever for its threads, which only the parent has.
    """
    if not _user:
        _user.append(os.getpid())
    if _user[0] != os.getpid():
        raise RuntimeError(f"{address}: a forked process cannot use the client of its parent; start processes by spawn")


def _open_store(address: Address, deadline_seconds: float, most_tries: int) -> Any:
    """Return the client's store for `address`, whose requests end within `deadline_seconds`. Raises ConfigError."""
    import obstore.store as kinds
    from obstore.exceptions import BaseError

    kind = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[address.scheme]
    _refuse_wrong_endpoints(address)
    backoff = {
        "init_backoff": timedelta(seconds=min(_FIRST_PAUSE_SECONDS, deadline_seconds / 600)),
        "max_backoff": timedelta(seconds=deadline_seconds / 12),
        "base": 2,
    }
    tries = {"max_retries": most_tries, "retry_timeout": timedelta(seconds=deadline_seconds * 3 / 4)}
    # As `client_options` it would replace what the environment has, AWS_ALLOW_HTTP for one.
    config = {"timeout": f"{round(deadline_seconds * 250)}ms"}
    try:
        return kind(address.bucket, prefix=address.prefix, config=config, retry_config={**tries, "backoff": backoff})
    except (BaseError, OSError, ValueError):
        # The client's message has values of the variables in it.
        finding = "the environment does not say how to reach the store"
        raise ConfigError(f"{address}: {finding}. Set its variables, {_VARIABLES[address.scheme]}.") from None


def _refuse_wrong_endpoints(address: Address) -> None:
    """Raise ConfigError for a server in the environment that is no URL: the client would crash."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        if (value := variable_value(name)) and _URL.fullmatch(value) is None:
            raise ConfigError(f"{address}: {name} is no URL of a server: expected https://HOST or https://HOST:PORT.")


def _version_condition(found: Any) -> Condition:
    return {name: found[name] for name in ("e_tag", "version") if found.get(name) is not None}


def _listed_object(found: Any) -> Listed:
    return Listed(found["path"], found["size"], _version_condition(found), found["last_modified"].timestamp())
