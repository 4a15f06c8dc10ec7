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
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.keeper import messages
from torchtitan_lite.keeper.contents import Answer, KeeperContents

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
        try:
            fd = library.inotify_init1(_CLOEXEC_NONBLOCK)
        except AttributeError:
            return False
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
                _in_thread(answer, connection)
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


def _in_thread(answer: Answer, connection: socket.socket) -> None:
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
