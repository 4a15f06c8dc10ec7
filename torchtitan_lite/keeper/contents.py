"""What a keeper holds, which processes are registered with it, and what it answers to a request.

It owns the descriptors that it is given, and reads no socket. A process is known by its pidfd, never by its number,
which the system gives to another process later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchtitan_lite.keeper import messages

_MAX_PIDS = 99
"""More are not listed: the answer must fit into a message."""


EMPTY_SECONDS = 5.0
"""How long a keeper that holds nothing outlives the last process: another rank of that start may join only now."""


class Answer(NamedTuple):
    """What is sent, and what to close before that."""

    message: dict[str, Any]
    fds: Sequence[int] = ()
    freed: Sequence[int] = ()


class _HeldImage(NamedTuple):
    """An image, and the start that it is from."""

    start: str
    fds: Sequence[int]


class _Member(NamedTuple):
    """A process that is registered as living, and its start."""

    start: str
    pidfd: int


class KeeperContents:
    """Images and processes. `watch` and `unwatch` begin and end the watch of a pidfd, whose end `ended` gets."""

    def __init__(
        self,
        ttl_seconds: float,
        watch: Callable[[int], object],
        unwatch: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._watch, self._unwatch, self._clock = watch, unwatch, clock
        self._held: dict[str, _HeldImage] = {}
        self._members: dict[str, _Member] = {}
        self._unused_since = clock()
        self._is_expected = True
        """Whether a start has asked, and not joined yet."""
        self._ends_once_unused = False
        self._is_finished = False

    def seconds_left(self) -> float | None:
        """Return in how many seconds the keeper ends if nothing happens; 0 or less for now, None for never."""
        if self._is_finished:
            return 0.0
        if self._members:
            return None
        if self._ends_once_unused:
            return 0.0
        seconds = self._ttl_seconds if self._held or self._is_expected else min(self._ttl_seconds, EMPTY_SECONDS)
        return self._unused_since + seconds - self._clock()

    def end_once_unused(self) -> None:
        """End as soon as no registered process lives, unless one joins before."""
        self._ends_once_unused = True

    def ended(self, pidfd: int) -> None:
        """Forget the process of `pidfd`, which has ended."""
        for name in [name for name, member in self._members.items() if member.pidfd == pidfd]:
            self._leave(name)

    def answer(self, request: dict[str, Any], fds: list[int]) -> Answer:
        """Do what `request` asks for. Raises `BadMessage`; then `fds` stay the caller's to close."""
        what = request.get("what")
        match what:
            case "join":
                return self._join(request, fds)
            case "keep":
                return self._keep(request, fds)
        if fds:
            raise messages.BadMessage("it has descriptors that it does not need")
        match what:
            case "hello":
                return self._hello(request)
            case "list":
                return self._list(_text(request, "start"))
            case "take":
                entry = self._held.get(_text(request, "name"))
                return Answer({}, entry.fds) if entry else Answer({"error": "there is no such name"})
            case "drop":
                return Answer({}, freed=self._drop(_texts(request, "names")))
            case "other":
                other = self._other_than(_text(request, "start"))
                return Answer({}, () if other is None else (other.pidfd,))
            case "leave":
                self._leave(_text(request, "member"))
                return Answer({})
            case "finish":
                return self._finish(_text(request, "start"))
            case "end":
                return Answer(self._described()) if self._members else self._over()
        raise messages.BadMessage(f"it asks for {what!r:.40}")

    def _hello(self, request: dict[str, Any]) -> Answer:
        if request.get("renew") is True:
            self._expect()
        return Answer(self._described())

    def _list(self, start: str) -> Answer:
        # A start that looks comes back: it needs the images until it has loaded and joins.
        if start:
            self._expect()
        return Answer({"names": list(self._held), "is_mapped": self._other_than(start) is not None})

    def _expect(self) -> None:
        self._unused_since, self._is_expected = self._clock(), True

    def _described(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "ttl_seconds": self._ttl_seconds,
            "seconds_left": self.seconds_left(),
            "living": sorted({messages.pid_of(member.pidfd) for member in self._members.values()})[:_MAX_PIDS],
        }

    def _join(self, request: dict[str, Any], fds: list[int]) -> Answer:
        name, start, ttl_seconds = _text(request, "member"), _text(request, "start"), request.get("ttl_seconds")
        if not isinstance(ttl_seconds, int | float) or not 0 <= ttl_seconds <= messages.MAX_TTL_SECONDS:
            raise messages.BadMessage(f"ttl_seconds: expected 0 to {messages.MAX_TTL_SECONDS}")
        if len(fds) != 1 or not messages.is_process(fds[0]):
            raise messages.BadMessage("expected the pidfd of one process")
        if name not in self._members and len(self._members) >= messages.MAX_ENTRIES:
            return Answer({"error": f"{messages.MAX_ENTRIES} processes are registered already"}, freed=fds)
        self._leave(name)
        self._watch(fds[0])
        self._members[name] = _Member(start, fds[0])
        self._ttl_seconds = float(ttl_seconds)
        self._ends_once_unused = self._is_expected = False
        return Answer({})

    def _leave(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            self._unwatch(member.pidfd)
            os.close(member.pidfd)
            self._unused_since = self._clock()

    def _other_than(self, start: str) -> _Member | None:
        """Return a process that lives and joined with another start; None if there is none."""
        return next((member for member in self._members.values() if member.start != start), None)

    def _keep(self, request: dict[str, Any], fds: list[int]) -> Answer:
        name, start = _text(request, "name"), _text(request, "start")
        if not name or len(fds) != messages.MAX_FDS or not all(map(messages.is_shared_memory, fds)):
            raise messages.BadMessage("expected a name and the descriptors of two files in memory")
        if name not in self._held and len(self._held) >= messages.MAX_ENTRIES:
            return Answer({"error": f"{messages.MAX_ENTRIES} images are held already"}, freed=fds)
        before = self._drop([name])
        self._held[name] = _HeldImage(start, fds)
        return Answer({}, freed=before)

    def _drop(self, names: Sequence[str]) -> list[int]:
        """Return the descriptors of those of `names` that are held; they are no longer."""
        return [fd for name in dict.fromkeys(names) if name in self._held for fd in self._held.pop(name).fds]

    def _finish(self, start: str) -> Answer:
        """Free what that start left, and end unless a process of another start lives."""
        if self._other_than(start) is None:
            return self._over()
        for name in [name for name, member in self._members.items() if member.start == start]:
            self._leave(name)
        return Answer({}, freed=self._drop([name for name, entry in self._held.items() if entry.start == start]))

    def _over(self) -> Answer:
        """End after the answer, which has the pidfd of this process: once it has ended, the memory is free."""
        self._is_finished = True
        return Answer({}, (os.pidfd_open(os.getpid()),))


def _text(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if value != "" and not messages.is_name(value):
        raise messages.BadMessage(f"{name}: expected at most {messages.MAX_NAME_LETTERS} letters of ASCII")
    return str(value)


def _texts(request: dict[str, Any], name: str) -> list[str]:
    values = request.get(name)
    if not isinstance(values, list) or not all(map(messages.is_name, values)):
        raise messages.BadMessage(f"{name}: expected a list of names")
    return values
