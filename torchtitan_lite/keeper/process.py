"""The keeper: a process that holds the descriptors of images, so that the memory outlives the trainer that filled it.

It never maps or reads them, and it has no torch. It has a session of its own, no parent that could end it, and no
stream, pipe or socket of the trainer that started it. While trainers live it waits without a timer. It ends when the
run has finished, when no registered process has lived for the time to live, when a person asks for it while none lives,
and when its socket is removed or replaced, because nothing could find it then. `client` has the other end. The process
is small only because this module and what it imports are, so it imports little.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.keeper import messages

_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MAX_DESCRIPTORS = 4096
_MAX_CONNECTIONS = 256
_MAX_PIDS = 99
_LOOK_SECONDS = 30.0
"""Between two looks at the socket's path where the system has no watches left to give."""
_LONGEST_WAIT_SECONDS = 86400.0
_UNLINKED = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_DELETE_SELF and IN_MOVE_SELF."""
_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK

Answer = tuple[dict[str, Any], Sequence[int]]
Handler = Callable[[Any], None]


def main(path: str, ttl_seconds: float) -> None:
    """Bind the socket at `path` and serve it in a child without a parent; the caller's process ends as soon as it can.

    Raises OSError if the socket cannot be bound.
    """
    os.umask(0o077)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    listener = messages.new_socket()
    listener.bind(path)
    listener.listen(socket.SOMAXCONN)
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    listener.listen(socket.SOMAXCONN)  # Others see this process at the other end, not its parent.
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    Server(Path(path), listener, ttl_seconds).run()
    os._exit(0)


class Server:
    """What the keeper holds, and how it answers. It runs in one thread; others only close descriptors."""

    def __init__(self, path: Path, listener: socket.socket, ttl_seconds: float) -> None:
        self._path, self._listener, self._ttl_seconds = path, listener, ttl_seconds
        self._identity = _identity(path)
        self._held: dict[str, _Entry] = {}
        self._members: dict[str, _Member] = {}
        self._connections: list[socket.socket] = []
        self._unused_since = time.monotonic()
        self._ends_once_unused = False
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._can_watch = self._watch_path()
        self._end_on_sigterm()

    def run(self) -> None:
        """Serve until the keeper has no more use."""
        while not self._is_over and (seconds := self._seconds_to_wait()) != 0:
            ready = [key for key, _ in self._selector.select(seconds)]
            # The ends of processes first: whoever asks afterwards gets an answer without them.
            for key in sorted(ready, key=lambda key: key.data != self._member_ended):
                if key.fd in self._selector.get_map():
                    key.data(key.fileobj)
            if not self._can_watch:
                self._look_at_path()
        # While the listener is open no other process takes the socket for one of a dead keeper.
        with suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()

    def _seconds_to_wait(self) -> float | None:
        """Return how long to wait for the next request: None for without end, 0 if the time to live is over."""
        longest = None if self._can_watch else _LOOK_SECONDS
        if self._members:
            return longest
        if self._ends_once_unused:
            return 0.0
        return min(self._seconds_left(), longest or _LONGEST_WAIT_SECONDS)

    def _seconds_left(self) -> float:
        return max(0.0, self._unused_since + self._ttl_seconds - time.monotonic())

    def _watch_path(self) -> bool:
        """Watch the folder of the socket; return whether the system can."""
        library = ctypes.CDLL(None, use_errno=True)
        try:
            fd = library.inotify_init1(_CLOEXEC_NONBLOCK)
        except AttributeError:
            return False
        if fd < 0:
            return False
        if library.inotify_add_watch(fd, os.fsencode(self._path.parent), _UNLINKED) < 0:
            os.close(fd)
            return False
        self._selector.register(fd, selectors.EVENT_READ, self._path_changed)
        self._look_at_path()  # It may have gone before the watch was there.
        return True

    def _path_changed(self, fd: int) -> None:
        with suppress(BlockingIOError):
            os.read(fd, 1 << 16)
        self._look_at_path()

    def _look_at_path(self) -> None:
        self._is_over |= _identity(self._path) != self._identity

    def _end_on_sigterm(self) -> None:
        """End by SIGTERM once no registered process lives: else a shutdown of the host would wait for this process."""
        reader, writer = os.pipe2(_CLOEXEC_NONBLOCK)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, self._terminated)

    def _terminated(self, fd: int) -> None:
        os.read(fd, 64)
        self._ends_once_unused = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._close_oldest()
            return
        if messages.user_of_peer(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._serve)
        if len(self._connections) > _MAX_CONNECTIONS:
            self._close_oldest()

    def _close_oldest(self) -> None:
        if self._connections:
            self._close(self._connections[0])
        else:
            time.sleep(0.1)  # Another process has used up the descriptors of the system.

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            request, fds = messages.receive(connection)
            answer, own, freed = self._answer(request, fds)
            if freed:
                # Freeing a large image takes seconds, and the answer says that its memory is free.
                _thread.start_new_thread(_free, (freed, connection, answer))
            else:
                messages.send(connection, answer, own)
        except messages.BadMessage as error:
            messages.close_all(fds)
            _send(connection, {"error": f"the request is not understood: {error}"})
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._close(connection)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int], list[int]]:
        """Return the answer, the descriptors that go with it, and those to close before it is sent."""
        match request.get("what"):
            case "hello":
                if request.get("renew") is True:
                    self._unused_since = time.monotonic()
                return self._described(), [], []
            case "join":
                return self._join(request, fds)
            case "keep":
                return self._keep(request, fds)
        if fds:
            raise messages.BadMessage("it has descriptors that it does not need")
        match request.get("what"):
            case "list":
                names = list(self._held)
                return {"names": names, "is_mapped": self._other_than(_text(request, "start")) is not None}, [], []
            case "take":
                entry = self._held.get(_text(request, "name"))
                return ({}, list(entry.fds), []) if entry else ({"error": "there is no such name"}, [], [])
            case "drop":
                return {}, [], self._drop([name for name in _texts(request, "names") if name in self._held])
            case "other":
                other = self._other_than(_text(request, "start"))
                return {}, [] if other is None else [other.pidfd], []
            case "leave":
                self._leave(_text(request, "member"))
                return {}, [], []
            case "finish":
                return self._finish(_text(request, "start"))
            case "end":
                return self._end()
        raise messages.BadMessage(f"it asks for {request.get('what')!r:.40}")

    def _described(self) -> dict[str, Any]:
        pids = sorted({member.pid for member in self._members.values()})
        return {
            "pid": os.getpid(),
            "ttl_seconds": self._ttl_seconds,
            "seconds_left": None if self._members else self._seconds_left(),
            "num_held": len(self._held),
            "living": pids[:_MAX_PIDS],
        }

    def _join(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int], list[int]]:
        name, start = _text(request, "member"), _text(request, "start")
        ttl_seconds = request.get("ttl_seconds")
        if not isinstance(ttl_seconds, int | float):
            raise messages.BadMessage("ttl_seconds: expected a number")
        if len(fds) != 1 or not messages.is_process(fds[0]):
            raise messages.BadMessage("expected the pidfd of one process")
        if name not in self._members and len(self._members) >= messages.MAX_ENTRIES:
            return {"error": f"{messages.MAX_ENTRIES} processes are registered already"}, [], fds
        self._leave(name)
        self._ttl_seconds = float(ttl_seconds)
        self._members[name] = _Member(name, start, fds[0])
        self._ends_once_unused = False
        self._selector.register(fds[0], selectors.EVENT_READ, self._member_ended)
        return {}, [], []

    def _member_ended(self, pidfd: int) -> None:
        for name in [name for name, member in self._members.items() if member.pidfd == pidfd]:
            self._leave(name)

    def _leave(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            self._selector.unregister(member.pidfd)
            os.close(member.pidfd)
            self._unused_since = time.monotonic()

    def _other_than(self, start: str) -> _Member | None:
        """Return a process that lives and joined with another start; None if there is none."""
        return next((member for member in self._members.values() if member.start != start), None)

    def _keep(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int], list[int]]:
        name, start = _text(request, "name"), _text(request, "start")
        if not name or len(fds) != messages.MAX_FDS or not all(map(messages.is_shared_memory, fds)):
            raise messages.BadMessage("expected a name and the descriptors of two files in memory")
        if name not in self._held and len(self._held) >= messages.MAX_ENTRIES:
            return {"error": f"{messages.MAX_ENTRIES} images are held already"}, [], fds
        before = self._drop([name] if name in self._held else [])
        self._held[name] = _Entry(start, fds)
        return {}, [], before

    def _drop(self, names: Sequence[str]) -> list[int]:
        """Return the descriptors of `names`, which are no longer held."""
        return [fd for name in dict.fromkeys(names) for fd in self._held.pop(name).fds]

    def _finish(self, start: str) -> tuple[dict[str, Any], list[int], list[int]]:
        """Free what that start left, and end unless a process of another start lives."""
        if self._other_than(start) is None:
            return self._over()
        for name in [name for name, member in self._members.items() if member.start == start]:
            self._leave(name)
        return {}, [], self._drop([name for name, entry in self._held.items() if entry.start == start])

    def _end(self) -> tuple[dict[str, Any], list[int], list[int]]:
        if self._members:
            return self._described(), [], []
        return self._over()

    def _over(self) -> tuple[dict[str, Any], list[int], list[int]]:
        """End after the answer, which has the pidfd of this process: once it has ended, the memory is free."""
        self._is_over = True
        return {}, [os.pidfd_open(os.getpid())], []


class _Entry:
    """Two descriptors that the keeper holds, and the start that they are from."""

    def __init__(self, start: str, fds: Sequence[int]) -> None:
        self.start, self.fds = start, fds


class _Member:
    """A process that is registered as living."""

    def __init__(self, name: str, start: str, pidfd: int) -> None:
        self.name, self.start, self.pidfd = name, start, pidfd

    @property
    def pid(self) -> int:
        """Return the process id here; 0 for a process in a PID namespace that this one cannot see."""
        with suppress(OSError, ValueError, StopIteration), Path(f"/proc/self/fdinfo/{self.pidfd}").open() as lines:
            return max(0, int(next(line for line in lines if line.startswith("Pid:")).split()[1]))
        return 0


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


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


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # The other end has hung up.
        messages.send(connection, answer)


def _free(fds: Sequence[int], connection: socket.socket, answer: dict[str, Any]) -> None:
    messages.close_all(fds)
    _send(connection, answer)
