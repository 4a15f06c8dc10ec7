"""An object store in memory, which fails where a test says so.

`Bucket` is the store, honest: a condition and its write are one step, and a version is the digest of the contents, as
in S3. `MemoryObjects` is one client's view of it. It numbers its requests from 1, but for those of heartbeats, which
another thread makes, and does to each what its `fate` says.
"""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Listed, StoreUnavailable

ADDRESS = "s3://bucket/run"
WRITES = ("put", "put_if_absent", "put_if_match", "delete")

T = TypeVar("T")


class Killed(BaseException):
    """The end of the process that made a request."""


class Fate(enum.Enum):
    """What becomes of a request."""

    CARRIED_OUT = "carried out"
    NEVER_SENT = "the store is not reached"
    NO_ANSWER = "carried out, and the answer is lost"
    REPEATED = "carried out, the answer is lost, and the client sends it again"
    LATE = "no answer, and it is carried out when the bucket delivers it"
    KILLED_BEFORE = "the process ends before it"
    KILLED_AFTER = "the process ends after it"


class Request(NamedTuple):
    number: int
    verb: str
    key: str

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES


class Stored(NamedTuple):
    data: bytes
    modified: float

    @property
    def condition(self) -> Mapping[str, str]:
        return {"e_tag": hashlib.md5(self.data, usedforsecurity=False).hexdigest()}


@dataclass
class Bucket:
    """What is stored; any number of clients use it."""

    stored: dict[str, Stored] = field(default_factory=dict)
    now: float = 1e9
    """The clock of the store, in Unix seconds."""
    late: list[Callable[[], object]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def deliver(self) -> None:
        """Carry out the requests that were late; what they would have answered reaches no client."""
        while self.late:
            try:
                self.late.pop(0)()
            except OSError:
                continue

    def get(self, key: str) -> Stored:
        if key not in self.stored:
            raise FileNotFoundError(key)
        return self.stored[key]

    def put(self, key: str, data: bytes) -> Condition:
        self.stored[key] = Stored(data, self.now)
        return self.stored[key].condition

    def put_if(self, key: str, data: bytes, condition: Condition | None) -> Condition:
        found = self.stored[key].condition if key in self.stored else None
        if found != condition:
            raise ConditionFailed(key)
        return self.put(key, data)

    def list(self, prefix: str) -> list[Listed]:
        return [
            Listed(key, len(each.data), each.condition, each.modified)
            for key, each in self.stored.items()
            if key.startswith(prefix)
        ]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.stored.pop(key, None)

    def state(self) -> dict[str, bytes]:
        """Return the contents of each object but the beats."""
        return {key: each.data for key, each in self.stored.items() if not key.startswith("beat-")}


def carried_out(request: Request) -> Fate:
    return Fate.CARRIED_OUT


class MemoryObjects:
    """A client of `bucket`; `before` is called before each request of a thread that is no heartbeat."""

    def __init__(self, bucket: Bucket) -> None:
        self.address = ADDRESS
        self.bucket = bucket
        self.fate: Callable[[Request], Fate] = carried_out
        self.before: Callable[[Request], object] = carried_out
        self.requests: list[Request] = []
        self.is_dead = False

    def get(self, key: str) -> tuple[bytes, Condition]:
        found = self._sent("get", key, lambda: self.bucket.get(key))
        return found.data, found.condition

    def put(self, key: str, data: bytes) -> None:
        self._sent("put", key, lambda: self.bucket.put(key, data))

    def put_if(self, key: str, data: bytes, condition: Condition | None) -> Condition:
        verb = "put_if_absent" if condition is None else "put_if_match"
        version = None if condition is None else dict(condition)
        return self._sent(verb, key, lambda: self.bucket.put_if(key, data, version))

    def upload(self, key: str, parts: Iterator[memoryview], part_bytes: int, at_a_time: int) -> None:
        self.put(key, b"".join(parts))

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        return memoryview(self.get(key)[0])[begin:end]

    def head(self, key: str) -> Listed:
        found = self._sent("head", key, lambda: self.bucket.get(key))
        return Listed(key, len(found.data), found.condition, found.modified)

    def list(self, prefix: str) -> Iterator[Listed]:
        yield from self._sent("list", prefix, lambda: self.bucket.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._sent("delete", key, lambda key=key: self.bucket.delete([key]))  # type: ignore[misc]  # a default

    def _sent(self, verb: str, key: str, carry_out: Callable[[], T]) -> T:
        if threading.current_thread().name.startswith("heartbeat"):
            return self._sent_by_a_heart(key, carry_out)
        if self.is_dead:
            raise Killed
        request = Request(len(self.requests) + 1, verb, key)
        self.requests.append(request)
        self.before(request)
        return self._befallen(self.fate(request), key, carry_out)

    def _sent_by_a_heart(self, key: str, carry_out: Callable[[], T]) -> T:
        if self.is_dead:
            raise StoreUnavailable(key)
        with self.bucket.lock:
            return carry_out()

    def _befallen(self, fate: Fate, key: str, carry_out: Callable[[], T]) -> T:
        with self.bucket.lock:
            if fate is Fate.CARRIED_OUT:
                return carry_out()
            if fate is Fate.LATE:
                self.bucket.late.append(carry_out)
            elif fate in (Fate.NO_ANSWER, Fate.REPEATED, Fate.KILLED_AFTER):
                carry_out()
            if fate is Fate.REPEATED:
                return carry_out()
        if fate in (Fate.KILLED_BEFORE, Fate.KILLED_AFTER):
            self.is_dead = True
            raise Killed
        raise StoreUnavailable(key)


def at(number: int, fate: Fate) -> Callable[[Request], Fate]:
    """Return what gives the request `number` that `fate`, and lets all others be carried out."""
    return lambda request: fate if request.number == number else Fate.CARRIED_OUT
