"""What a folder of checkpoints asks of an object store: few verbs, each of them one request that may be repeated.

A key names one object below the address. Nothing here knows what a checkpoint is. Conditions are the only means by
which two jobs that write at the same time are kept apart: `put_if` is carried out by the store as one step, or
refused. Any thread, any rank.

The store is reached through the package `obstore`. Each verb ends before its deadline: the client tries again what a
busy store or a cut connection lost, for three quarters of it, and no request takes longer than the last quarter. So a
conditional write whose first answer was lost may be refused by its own first try; the caller finds out by reading. The
configuration is the environment's. A process has one client for each address; a forked child makes its own.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from pathlib import PosixPath
from typing import Any

from torchtitan_lite.config.address import Address
from torchtitan_lite.distributed.environment import variable_value
from torchtitan_lite.errors import ConfigError, ExtraMissing

Condition = Mapping[str, str]
"""What distinguishes one version of an object from every other: opaque, as the store's client returned it."""


class ConditionFailed(OSError):
    """The object is not in the state that a conditional write named, so nothing was written."""


class StoreUnavailable(OSError):
    """The store gave no usable answer before the deadline. A write may have been carried out, or may yet be."""


@dataclass(frozen=True)
class Listed:
    """One object, as a listing or `head` shows it."""

    key: str
    size: int
    """Bytes."""
    condition: Condition
    modified: float
    """Unix seconds, by the clock of the store."""


class ObjectPath(PosixPath):
    """A path that no file system has: s3://bucket/run/step-5.0123456789abcdef/__0_0.distcp."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


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


def connect(address: Address) -> Objects:
    """Return the objects below `address`; sends nothing yet. The same for each call in this process.

    Raises ExtraMissing without `obstore`, ConfigError if the environment does not suffice.
    """
    # The client of a parent has threads that its forked child lacks.
    return _connected_objects(address, os.getpid())


@functools.cache
def _connected_objects(address: Address, process: int) -> Objects:
    return Objects(address)


class Objects:
    """The objects below `address`. Any thread; requests end within `deadline_seconds`, those for bulk data later.

    A request that fails is sent up to `most_tries` times more. Every method raises `StoreUnavailable` without an answer
    before the deadline, PermissionError where the store refuses the key that it was given, and FileNotFoundError for an
    object (or a bucket) that does not exist.
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
        """As people write it: s3://bucket/run."""
        self._client = _client()
        # NotImplementedError: the environment switches conditional writes off.
        self._errors = (self._client.exceptions.BaseError, OSError, NotImplementedError)
        # Few stores say for a missing object that it is deleted now.
        self._deletes_in_bulk = address.scheme == "s3"
        self._small = _open_store(address, deadline_seconds, most_tries)
        self._bulk = _open_store(address, bulk_seconds, most_tries)

    def get(self, key: str) -> tuple[bytes, Condition]:
        """Return the contents of the small object `key`, and the condition that it has this version."""
        with self._translated(key):
            found = self._client.get(self._small, key)
            return bytes(found.bytes()), _version_condition(found.meta)

    def put(self, key: str, data: bytes) -> None:
        """Write the small object `key`; replace what was there."""
        with self._translated(key):
            self._client.put(self._small, key, data, mode="overwrite", use_multipart=False)

    def put_if(self, key: str, data: bytes, condition: Condition | None) -> Condition:
        """Replace the small object `key`, if it has the version of `condition`; with None, create it.

        Return its new version. Raises `ConditionFailed` if it has another version, or exists.
        """
        mode = "create" if condition is None else dict(condition)
        try:
            with self._translated(key):
                return _version_condition(self._client.put(self._small, key, data, mode=mode, use_multipart=False))
        except FileNotFoundError as error:
            if condition is None or not is_missing_object(error):
                raise
            raise ConditionFailed(error.errno, error.strerror, error.filename) from None

    def upload(self, key: str, parts: Iterator[memoryview], part_bytes: int, at_a_time: int) -> None:
        """Write the object `key` from `parts`, each of `part_bytes` but the last, in several requests at a time."""
        num_bytes, is_over = 0, False
        failure: BaseException | None = None  # The client replaces it by one of its own.

        def to_send() -> Iterator[memoryview]:
            nonlocal num_bytes, is_over, failure
            try:
                for part in parts:
                    num_bytes += len(part)
                    yield part
            except BaseException as error:
                failure = error
                raise
            is_over = True

        source = to_send()
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
            if failure is not None:
                raise failure from None
            if is_over and self._has(key, num_bytes):
                return  # The answer that says so was lost.
            if not is_missing_object(error):
                raise
            finding = "no usable answer from the store (the upload was lost)"
            raise StoreUnavailable(errno.ETIMEDOUT, finding, error.filename) from None

    def _has(self, key: str, num_bytes: int) -> bool:
        try:
            return self.head(key).size == num_bytes
        except OSError:
            return False

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of the object `key`; shorter where the object ends before."""
        if begin >= end:
            return memoryview(b"")
        try:
            with self._translated(key):
                return memoryview(self._client.get_range(self._bulk, key, start=begin, end=end))
        except PastTheEnd:
            return memoryview(b"")

    def head(self, key: str) -> Listed:
        """Return what is known of the object `key` without its contents."""
        with self._translated(key):
            # obstore 0.11 has the complete path in it.
            return dataclasses.replace(_listed_object(self._client.head(self._small, key)), key=key)

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield every object whose key begins with `prefix`, in any order."""
        # The client lists complete folders only.
        folder = prefix.rpartition("/")[0]
        with self._translated(prefix):
            for page in self._client.list(self._small, folder or None, chunk_size=1000):
                for each in page:
                    if each["path"].startswith(prefix):
                        yield _listed_object(each)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects `keys`; those that do not exist are no error."""
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


# What the errors of the client mean, in our words.
#
# Its own messages have URLs, signatures and bodies in them, so of a message only the status and the store's word for it
# are kept, and the original is never chained to ours.


_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_CONFLICTS = ("AlreadyExistsError", "PreconditionError", "NotModifiedError")
_REFUSED = ("PermissionDeniedError", "UnauthenticatedError")

_REFUSALS: Mapping[str, str] = {
    "RequestTimeTooSkewed": "the clock of this host and the clock of the store differ too much: set this host's clock",
    "ExpiredToken": "the credentials have expired: get new ones",
    "InvalidToken": "the store does not know the session token: see AWS_SESSION_TOKEN",
    "InvalidAccessKeyId": "the store does not know the access key: see AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is not that of the access key: see AWS_SECRET_ACCESS_KEY",
}
"""What these words of a store mean, and the fix."""
_NO_OBJECT = "there is no such object in the store"
_NO_PERMISSION = "the store refuses it: these credentials have no permission, or are wrong"
_NO_CREDENTIALS = "there are no credentials: set them, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://"
_NO_TLS = "the server is at http://, which is not encrypted: set AWS_ALLOW_HTTP=true if that is meant"
_NO_CONDITIONS = "conditional writes are switched off: unset AWS_CONDITIONAL_PUT"
_OTHER_REGION = "the bucket is in another region: set AWS_REGION"
# Where a machine in a cloud gets credentials, if the environment has none.
_METADATA_SERVICES = ("169.254.169.254", "/latest/api/token", "/latest/meta-data", "/computeMetadata/", "169.254.170.2")


class PastTheEnd(OSError):
    """An object ends before the first byte of a range."""


def meaning(error: Exception, key: str) -> OSError:
    """Return `error` of the client, about the object with the address `key`, as `Objects` raises it."""
    kind, text = type(error).__name__, str(error)
    status, code = _first_group(_STATUS, text), _first_group(_CODE, text)
    word = " ".join(filter(None, (status, code)))
    if any(service in text for service in _METADATA_SERVICES):
        return PermissionError(errno.EACCES, _NO_CREDENTIALS, key)
    if code in _REFUSALS:
        return PermissionError(errno.EACCES, f"{_REFUSALS[code]} ({word})", key)
    if code == "NoSuchBucket":
        return FileNotFoundError(errno.ENOENT, f"the bucket does not exist: create it ({word})", key)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, _NO_OBJECT, key)
    if status == "416":
        return PastTheEnd(errno.EINVAL, "the object ends before the range", key)
    if kind == "NotImplementedError":
        return PermissionError(errno.EACCES, _NO_CONDITIONS, key)
    if kind in _REFUSED or status in ("401", "403"):
        return PermissionError(errno.EACCES, f"{_NO_PERMISSION} ({word or kind})", key)
    if kind in _CONFLICTS or status in ("409", "412"):
        return ConditionFailed(errno.EEXIST, f"another version is there ({word or kind})", key)
    return _of_no_answer(text, status, word, key)


def is_missing_object(error: OSError) -> bool:
    """Return whether `error` of `meaning` says that an object does not exist, though its bucket may."""
    return error.strerror == _NO_OBJECT


def _of_no_answer(text: str, status: str, word: str, key: str) -> OSError:
    if "source: BadScheme" in text:
        return PermissionError(errno.EACCES, _NO_TLS, key)
    if "redirect without LOCATION" in text or status in ("301", "307"):
        return PermissionError(errno.EACCES, _OTHER_REGION, key)
    # 408 and 429 are an overloaded store's, and another upload may be begun; others would be the same at every try.
    if status.startswith("4") and status not in ("408", "429") and "NoSuchUpload" not in word:
        return OSError(errno.EINVAL, f"the store does not accept the request ({word})", key)
    return StoreUnavailable(errno.ETIMEDOUT, f"no usable answer from the store ({word or _cause(text)})", key)


def _cause(text: str) -> str:
    """Return what became of a request without a status."""
    causes = {
        "dns error": "the name of the server is not known",
        "ConnectionRefused": "the server refuses connections",
        "InvalidContentType": "the server does not speak TLS: its address may be http://",
        "InvalidCertificate": "the server's certificate is not trusted",
        "TimedOut": "too slow",
        "ConnectionReset": "the connection was cut",
        "IncompleteMessage": "the connection was cut",
    }
    return next((words for pattern, words in causes.items() if pattern in text), "the connection failed")


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""
