"""What the errors of an object store's client mean, in our words.

The client's own messages have URLs, signatures and bodies in them, so of a message only the status and the store's word
for it are kept, and the original is never chained to ours. Every function is pure.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

from torchtitan_lite.bucket.objects import ConditionFailed, StoreUnavailable

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
    # 408 and 429 are an overloaded store's; other statuses below 500 would be the same at every try.
    if status.startswith("4") and status not in ("408", "429"):
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
