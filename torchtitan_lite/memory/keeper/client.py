"""This process's end of the keeper of a folder of checkpoints.

Each call is a connection of its own, so there is nothing that a forked child could share; any rank and any thread may
call. No call waits long for a keeper that is silent, and no trouble with a keeper is more than a `KeeperUnavailable`:
training continues without images. What one call reads from a keeper is checked as what another user could have sent.

The socket is in a private folder of this user, under a name made from the folder of checkpoints. Whoever may write into
that folder could answer in the place of the keeper, so one that is not private is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.host_memory import host_id
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.asking import HungUp, NoKeeper, connected
from torchtitan_lite.memory.keeper.starting import START_SECONDS, refuse_system, spawn

ANSWER_SECONDS = 10.0
"""How long all answers to one question may take together: a millisecond, unless the machine swaps or is overloaded.

One that is stopped costs this once in a start, but not at its end; one that does not run is known at once.
"""
FREE_SECONDS = 120.0
"""How long a keeper may take to free memory, which is 0.2 s for each GB."""


@dataclass(frozen=True)
class HeldMemory:
    """What a keeper holds under one name. The descriptors are the caller's to close."""

    name: str
    arena_fd: int
    mark_fd: int
    is_mapped: bool
    """Whether a process of another start lives, which could still write into it."""

    def close(self) -> None:
        """Close both descriptors; call it once, unless another object has taken them."""
        messages.close_all((self.arena_fd, self.mark_fd))


@dataclass(frozen=True)
class KeeperDescription:
    """A keeper that answers."""

    pid: int
    ttl_seconds: float
    living: tuple[int, ...]
    """The processes that are registered and live; 0 stands for those in another PID namespace."""
    seconds_left: float | None
    """Until it ends, if no process joins; None while one lives."""


class Keeper:
    """The keeper of `folder`, which lives `ttl_seconds` longer than the last process that joined."""

    def __init__(self, folder: Path, ttl_seconds: float, *, runtime: Path | None = None) -> None:
        self.folder = folder
        self.ttl_seconds = min(ttl_seconds, messages.MAX_TTL_SECONDS)
        self._runtime = runtime
        self._start_id = ""
        self._member = secrets.token_hex(8)
        self._is_forked = self._hurries = False
        self._pidfd = -1
        self._watching = threading.Lock()
        forget_in_children(self.forget)

    def start(self) -> None:
        """Start the keeper, unless one answers; return once it does. Any rank, any thread.

        Raises `KeeperUnavailable`: no such sockets or memory here, a folder that is not private, a keeper of another
        version.
        """
        with self._as_unavailable():
            refuse_system()
            path = self._path()
            make_private(path.parent)
            with suppress(NoKeeper, HungUp):
                # Renewed: its time could be over before this process joins.
                self._ask({"what": "hello", "renew": True})
                return
            # One that is stopped has cost no rank more than its own wait: they hold the lock one after another.
            with locked(path.parent, START_SECONDS):
                for _ in range(3):
                    try:
                        self._ask({"what": "hello", "renew": True})
                        return
                    except NoKeeper:
                        path.unlink(missing_ok=True)
                        spawn(path, self.ttl_seconds)
                    except HungUp:
                        time.sleep(0.02)  # It removes its socket as its last act.
            self._ask({"what": "hello"})

    def join(self, start_id: str, also: Sequence[int] = ()) -> None:
        """Register this process, and those with the pids `also`, as living; all ranks of a start have one `start_id`.

        `also` are children of this process. Idempotent. Raises `KeeperUnavailable`.
        """
        with self._as_unavailable():
            self._start_id, self._hurries = start_id, False
            self._join(self._member, os.getpid())
            for pid in also:
                with suppress(ProcessLookupError):
                    self._join(f"{self._member}+{pid}", pid)
            with connected(self._path(), ANSWER_SECONDS, lambda: self._hurries) as ask:
                self._watch(ask.open_peer())

    def has_ended(self) -> bool:
        """Return whether the keeper that this process joined has ended; False if that cannot be known. Any thread."""
        with self._watching:
            return self._pidfd >= 0 and not self._is_forked and messages.has_ended(self._pidfd, 0.0)

    def wait(self) -> None:
        """Wait until the keeper that runs now has ended; return at once if none does. Raises `KeeperUnavailable`."""
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            with connected(self._path(), ANSWER_SECONDS) as ask:
                pidfd = ask.open_peer()
            if pidfd < 0:
                raise KeeperUnavailable("the keeper runs in a PID namespace that is not visible here")
            try:
                messages.has_ended(pidfd, None)
            finally:
                os.close(pidfd)

    def hurry(self) -> None:
        """Wait only shortly for a keeper that is stopped, until `join`: this process leaves. Any thread."""
        self._hurries = True

    @property
    def pid(self) -> int:
        """The keeper that this process joined; 0 if that is not known here."""
        with self._watching:
            return messages.pid_of(self._pidfd) if self._pidfd >= 0 else 0

    def keep(self, name: str, fds: tuple[int, int]) -> None:
        """Let the keeper hold duplicates of the arena's and the mark's descriptor, in place of what had that name.

        A name is at most 200 printable letters of ASCII. Raises `KeeperUnavailable`.
        """
        with self._as_unavailable():
            if not messages.is_name(name) or not all(map(messages.is_shared_memory, fds)):
                raise KeeperUnavailable(f"{name!r:.80} is no name, or its descriptors are none of a file in memory")
            self._ask({"what": "keep", "name": name, "start": self._start_id}, fds, may_free=True)

    def drop(self, names: Sequence[str]) -> None:
        """Let the keeper close what it holds under `names`, some of its own; return when it has. None need be there.

        Raises `KeeperUnavailable`.
        """
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            self._ask({"what": "drop", "names": list(names)}, may_free=True)

    def held(self, start_id: str | None = None) -> list[HeldMemory]:
        """Return what the keeper holds, with new descriptors; nothing if there is no keeper.

        `start_id` is that of the caller, by default the one of `join`; a start that looks has the full time to live to
        load and join. Takes at most `ANSWER_SECONDS`. Raises `KeeperUnavailable`.
        """
        found: list[HeldMemory] = []
        try:
            with self._as_unavailable(), suppress(NoKeeper, HungUp), connected(self._path(), ANSWER_SECONDS) as ask:
                listed, _ = ask({"what": "list", "start": self._start_id if start_id is None else start_id})
                for name in messages.names_in(listed):
                    answer, fds = ask({"what": "take", "name": name}, may_fail=True, wants_fds=True)
                    if "error" in answer:  # Dropped since it was listed.
                        continue
                    if len(fds) != messages.MAX_FDS or not all(map(messages.is_shared_memory, fds)):
                        messages.close_all(fds)
                        raise KeeperUnavailable(f"the keeper holds something other than memory, under {name!r}")
                    found.append(HeldMemory(name, fds[0], fds[1], listed.get("is_mapped") is not False))
        except BaseException:
            for each in found:
                each.close()
            raise
        return found

    def wait_until_unmapped(self, seconds: float, start_id: str) -> bool:
        """Wait until every process that joined under another start has ended; return whether that is so in `seconds`.

        False at once if this very process is one of them, as where a manager was not closed. Raises
        `KeeperUnavailable`.
        """
        deadline = time.monotonic() + seconds
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            while True:
                _, fds = self._ask({"what": "other", "start": start_id}, wants_fds=True)
                if not fds:
                    return True
                try:
                    left = deadline - time.monotonic()
                    if left <= 0 or messages.pid_of(fds[0]) == os.getpid() or not messages.has_ended(fds[0], left):
                        return False
                finally:
                    messages.close_all(fds)
        return True

    def leave(self) -> None:
        """Let this process no longer count as living; those that it joined with `also` count until they end.

        No keeper is no error. Raises `KeeperUnavailable`.
        """
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            self._watch(-1)
            self._ask({"what": "leave", "member": self._member})

    def finish(self) -> None:
        """End the keeper with all that it holds, because the run has finished; return when its memory is free.

        If a process of another start lives, that one keeps its images. Idempotent; no keeper is no error. Raises
        `KeeperUnavailable`.
        """
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            # No longer watched: its end is wanted, and must not be taken for a kill.
            self._watch(-1)
            _, fds = self._ask({"what": "finish", "start": self._start_id}, may_free=True, wants_fds=True)
            _wait_for_end(fds)

    def describe(self) -> KeeperDescription | None:
        """Return what the keeper says of itself; None if there is none. Raises `KeeperUnavailable`."""
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            return _keeper_description(self._ask({"what": "hello"})[0])
        return None

    def end(self) -> tuple[int, ...]:
        """End the keeper with all that it holds, unless a registered process lives; return the pids of those that do.

        Raises `KeeperUnavailable`.
        """
        with self._as_unavailable(), suppress(NoKeeper, HungUp):
            answer, fds = self._ask({"what": "end"}, wants_fds=True)
            if not fds:
                return _keeper_description(answer).living
            _wait_for_end(fds)
        return ()

    def forget(self) -> None:
        """Make this object unusable in a forked child: what it would say of its process would be wrong."""
        self._is_forked = True

    def _join(self, member: str, pid: int) -> None:
        # A pidfd and not a number, which the system may give to another process; it also holds in other PID namespaces,
        # and its end wakes the keeper, which then needs no timer.
        pidfd = os.pidfd_open(pid)
        try:
            request = {"what": "join", "member": member, "start": self._start_id, "ttl_seconds": self.ttl_seconds}
            self._ask(request, [pidfd])
        finally:
            os.close(pidfd)

    def _watch(self, pidfd: int) -> None:
        """Watch the process of `pidfd`, which this owns, in place of the one before; -1 for none."""
        with self._watching:
            pidfd, self._pidfd = self._pidfd, pidfd
        if pidfd >= 0:
            os.close(pidfd)

    def _path(self) -> Path:
        if self._is_forked:
            raise KeeperUnavailable("this process was forked from the one that uses the keeper")
        path = socket_path(self.folder, self._runtime)
        refuse_shared(path.parent)
        return path

    def _ask(
        self,
        request: Mapping[str, Any],
        fds: Sequence[int] = (),
        *,
        may_free: bool = False,
        wants_fds: bool = False,
    ) -> tuple[dict[str, Any], list[int]]:
        if may_free:
            # One that is stopped would cost FREE_SECONDS.
            self._ask({"what": "hello"})
        seconds = FREE_SECONDS if may_free else ANSWER_SECONDS
        with connected(self._path(), seconds, lambda: self._hurries) as ask:
            return ask(request, fds, wants_fds=wants_fds)

    @contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        """Raise what goes wrong in the block as `KeeperUnavailable`."""
        try:
            yield
        except TimeoutError:
            raise KeeperUnavailable(f"the keeper did not start within {START_SECONDS:g} s") from None
        except messages.BadMessage as error:
            raise KeeperUnavailable(f"the keeper's answer is not understood: {error}") from None
        except NoKeeper:
            raise KeeperUnavailable("no keeper is running") from None
        except HungUp:
            raise KeeperUnavailable("the keeper closed the connection without an answer") from None
        except OSError as error:
            raise KeeperUnavailable(str(error)) from error


def _keeper_description(answer: Mapping[str, Any]) -> KeeperDescription:
    try:
        living = tuple(map(int, answer["living"]))
        left = answer["seconds_left"]
        seconds_left = None if left is None else float(left)
        return KeeperDescription(int(answer["pid"]), float(answer["ttl_seconds"]), living, seconds_left)
    except (KeyError, TypeError, ValueError):
        raise messages.BadMessage("it does not describe a keeper") from None


def _wait_for_end(fds: Sequence[int]) -> None:
    try:
        for fd in fds:
            if messages.is_process(fd):
                messages.has_ended(fd, FREE_SECONDS)
    finally:
        messages.close_all(fds)


_NAME = "torchtitan_lite"
_ADDRESS_BYTES = 107
"""What fits into sun_path, without the zero at its end: the path of a socket is shorter."""


def socket_path(folder: Path, runtime: Path | None) -> Path:
    """Return the path of the socket of the keeper of `folder`. Raises `KeeperUnavailable`, and OSError.

    It is in `runtime`, the user's folder for such files, if that is one and short enough, else in the system's folder
    for temporary files. That may be on a disk that hosts share, so each start of each host has names of its own.
    """
    name = xxhash.xxh3_128_hexdigest(os.fsencode(os.path.realpath(folder)) + b"\0" + host_id().encode())
    temporary = Path(tempfile.gettempdir()).absolute() / f"{_NAME}-{os.geteuid()}"
    candidates = [temporary / name]
    if runtime is not None and runtime.is_absolute():
        with suppress(OSError):
            found = runtime.stat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                candidates.insert(0, runtime / _NAME / name)
    for path in candidates:
        if len(os.fsencode(path)) <= _ADDRESS_BYTES:
            return path
    finding = f"the address of a socket holds {_ADDRESS_BYTES} bytes, and {candidates[-1]} is longer"
    raise KeeperUnavailable(f"{finding}. Set a shorter TMPDIR")


def make_private(folder: Path) -> None:
    """Make `folder` unless it is there, and refuse one that is not private.

    Raises `KeeperUnavailable`, and OSError.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    refuse_shared(folder)


def refuse_shared(folder: Path) -> None:
    """Raise `KeeperUnavailable` if `folder` is there and is not a folder that only this user can use."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        seen = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise KeeperUnavailable(f"{folder}: expected a drwx------ of user {os.geteuid()}, found {seen}; remove it")
