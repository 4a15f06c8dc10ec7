"""The keeper: a process that holds the descriptors of images, so that the memory outlives the trainer that filled it.

Descriptors, because files in /dev/shm would outlive a job that never comes back, and containers limit them. A process
of its own, because torchrun's agent ends with torchrun.

It never maps or reads them, and it has no torch. It has a session of its own, no parent that could end it, and no
stream, pipe or socket of the trainer that started it. While trainers live it waits without a timer. It ends when the
run has finished, when no registered process has lived for the time to live, when a person asks for it while none lives,
and when its socket is removed or replaced, because nothing could find it then. `client` has the other end. The process
is small only because this module and what it imports are, so it imports little. In a container without an init it
stays as a zombie after its end; `docker run --init` prevents that.
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
from typing import Any, NamedTuple

from torchtitan_lite.memory.keeper import messages

_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NAME = "titan-keeper"
"""In top and ps. `pkill python`, which cleans up after a job that hangs, does not mean the keeper."""
_OWN_NAME = Path("/proc/self/comm")
_MAX_DESCRIPTORS = 4096
_MAX_CONNECTIONS = 256
_LOOK_SECONDS = 30.0
"""Between two looks at the socket's path where the system has no watches left to give."""
_LONGEST_WAIT_SECONDS = 86400.0
_UNLINKED = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_DELETE_SELF and IN_MOVE_SELF."""
_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK


def main(path: str, ttl_seconds: float) -> None:
    """Bind the socket at `path` and serve it in a child without a parent; the caller's process ends as soon as it can.

    Raises OSError if the socket cannot be bound.
    """
    os.closerange(3, 1 << 20)  # What the trainer had open for its children.
    os.chdir("/")
    # Before the socket is bound: only this user may connect to it.
    os.umask(0o077)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    listener = messages.new_socket()
    listener.bind(path)
    listener.listen(socket.SOMAXCONN)
    # The socket is bound, so the keeper answers as soon as its start returns. With this parent gone the keeper is no
    # child of the job: neither a signal to a process group nor a tool that ends all children of a job reaches it.
    if os.fork():
        os._exit(0)
    # Errors up to here went to the report that `spawn` reads, which must not stay open as long as this process lives.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    with suppress(OSError):
        _OWN_NAME.write_text(NAME)
    # Others see this process at the other end, not its parent.
    listener.listen(socket.SOMAXCONN)
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    Server(Path(path), listener, ttl_seconds).run()
    os._exit(0)


class Server:
    """The sockets, watches and signals of the keeper. It runs in one thread; others only free memory."""

    def __init__(self, path: Path, listener: socket.socket, ttl_seconds: float) -> None:
        self._path, self._identity = path, _identity(path)
        self._connections: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._contents = KeeperContents(ttl_seconds, watch=self._watch_process, unwatch=self._selector.unregister)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._can_watch = self._watch_path()
        self._end_on_sigterm()

    def run(self) -> None:
        """Serve until the keeper has no more use."""
        while self._is_at_its_path() and (seconds := self._seconds_to_wait()) != 0:
            ready = [key for key, _ in self._selector.select(seconds)]
            # The ends of processes first: whoever asks afterwards gets an answer without them.
            for key in sorted(ready, key=lambda key: key.data != self._contents.ended):
                if key.fd in self._selector.get_map():
                    key.data(key.fileobj)
        # While the listener is open no other process takes the socket for one of a dead keeper.
        with suppress(OSError):
            if self._is_at_its_path():
                self._path.unlink()

    def _seconds_to_wait(self) -> float | None:
        """Return how long to wait for the next request: None for without end, 0 to end."""
        longest = None if self._can_watch else _LOOK_SECONDS
        left = self._contents.seconds_left()
        if left is None:
            return longest
        return min(max(left, 0.0), longest or _LONGEST_WAIT_SECONDS)

    def _is_at_its_path(self) -> bool:
        return self._identity is not None and _identity(self._path) == self._identity

    def _watch_path(self) -> bool:
        """Watch the folder of the socket; return whether the system can."""
        library = ctypes.CDLL(None, use_errno=True)
        fd = library.inotify_init1(_CLOEXEC_NONBLOCK)
        if fd < 0:
            return False
        if library.inotify_add_watch(fd, os.fsencode(self._path.parent), _UNLINKED) < 0:
            os.close(fd)
            return False
        self._selector.register(fd, selectors.EVENT_READ, _drain)
        return True

    def _watch_process(self, pidfd: int) -> None:
        self._selector.register(pidfd, selectors.EVENT_READ, self._contents.ended)

    def _end_on_sigterm(self) -> None:
        """End by SIGTERM once no registered process lives: else a shutdown of the host would wait for this process."""
        reader, writer = os.pipe2(_CLOEXEC_NONBLOCK)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, self._terminated)

    def _terminated(self, fd: int) -> None:
        _drain(fd)
        self._contents.end_once_unused()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._close_oldest()
            return
        if messages.peer_of(connection)[1] != os.geteuid():
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
            # Another process has used up the descriptors of the system.
            time.sleep(0.1)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            request, fds = messages.receive(connection)
            answer = self._contents.answer(request, fds)
            fds = []
            if answer.freed:
                # Freeing a large image takes seconds, and the answer says that its memory is free.
                _answer_in_thread(answer, connection)
            else:
                messages.send(connection, answer.message, answer.fds)
        except messages.BadMessage as error:
            messages.close_all(fds)
            _send(connection, {"error": f"the request is not understood: {error}"})
        except BlockingIOError:
            return
        except Exception:
            # Whatever one request does, the images of the others stay.
            messages.close_all(fds)
            self._close(connection)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.read(fd, 1 << 16)


def _answer_in_thread(answer: Answer, connection: socket.socket) -> None:
    try:
        _thread.start_new_thread(_free, (answer, connection))
    except RuntimeError:  # This user may have no more threads.
        _free(answer, connection)


def _free(answer: Answer, connection: socket.socket) -> None:
    messages.close_all(answer.freed)
    _send(connection, answer.message)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # The other end has hung up.
        messages.send(connection, message)


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
    """What a keeper holds, which processes are registered with it, and what it answers to a request.

    It owns the descriptors that it is given, and reads no socket. A process is known by its pidfd, never by its number,
    which the system gives to another process later. `watch` and `unwatch` begin and end the watch of a pidfd, whose end
    `ended` gets.
    """

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
        if fds and what not in ("join", "keep"):
            raise messages.BadMessage("it has descriptors that it does not need")
        match what:
            case "join":
                return self._join(request, fds)
            case "keep":
                return self._keep(request, fds)
            case "hello":
                if request.get("renew") is True:
                    self._expect()
                return Answer(self._described())
            case "list":
                return self._list(_name_field(request, "start"))
            case "take":
                entry = self._held.get(_name_field(request, "name"))
                return Answer({}, entry.fds) if entry else Answer({"error": "there is no such name"})
            case "drop":
                return Answer({}, freed=self._drop(messages.names_in(request)))
            case "other":
                other = self._other_than(_name_field(request, "start"))
                return Answer({}, () if other is None else (other.pidfd,))
            case "leave":
                self._leave(_name_field(request, "member"))
                return Answer({})
            case "finish":
                return self._finish(_name_field(request, "start"))
            case "end":
                return Answer(self._described()) if self._members else self._over()
        raise messages.BadMessage(f"it asks for {what!r:.40}")

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
        name, start = _name_field(request, "member"), _name_field(request, "start")
        ttl_seconds = request.get("ttl_seconds")
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
        name, start = _name_field(request, "name"), _name_field(request, "start")
        if not name or len(fds) != messages.MAX_FDS or not all(map(messages.is_shared_memory, fds)):
            raise messages.BadMessage("expected a name and the descriptors of two files in memory")
        if name not in self._held and len(self._held) >= messages.MAX_ENTRIES:
            return Answer({"error": f"{messages.MAX_ENTRIES} in-memory snapshots are held already"}, freed=fds)
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


def _name_field(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if value != "" and not messages.is_name(value):
        raise messages.BadMessage(f"{name}: expected at most {messages.MAX_NAME_LETTERS} letters of ASCII")
    return str(value)
