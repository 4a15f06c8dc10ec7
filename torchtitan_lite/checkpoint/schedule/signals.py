"""The signals that this process watches, for however many watches there are.

Python has one wakeup descriptor and one handler for each signal, so there is one hub of them: it is
set up by the first listener and gives back what was there before with the last one, whichever closes
first. What another library installs meanwhile stays, and hears what it would hear without the hub.
Forked children have none of it: a signal to a worker of a pool must end the worker, and must not
preempt the job whose sockets it inherited.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Protocol

_WAKE_UP = 0
"""Written to the pipe instead of a signal's number."""
_BY_HANDLER = 128
"""Added to a number that Python did not write there itself: it is not another descriptor's to hear again."""


class Listener(Protocol):
    """What hears of signals, in the hub's thread."""

    numbers: Sequence[int]

    def hear(self, number: int) -> None:
        """Take note of a signal, one of `numbers`."""

    def seconds_left(self) -> float:
        """Return after how many seconds `time_is_up` is due; infinity for never."""
        ...

    def time_is_up(self) -> None:
        """Act on it."""


class SignalHub:
    """Hands signals on to listeners. `add` and `remove` in the main thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._before: dict[int, signal._HANDLER] = {}
        self._ignored: set[int] = set()
        self._wakeup_before = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._mask = threading.local()

    def has(self, listener: Listener) -> bool:
        """Return whether `listener` hears of signals, in this process."""
        return any(each is listener for each in self._listeners)

    def add(self, listener: Listener) -> None:
        """Have `listener` hear of its signals from now on."""
        if self._pipe is None:
            self._begin()
        with self._lock:
            self._listeners.append(listener)
        for number in listener.numbers:
            if number not in self._before:
                before = signal.signal(number, _leave_it_to_the_hub)
                # None stands for a handler that is not Python's, and cannot be put back.
                self._before[number] = signal.SIG_DFL if before is None else before

    def remove(self, listener: Listener, *, ignore: bool = False) -> None:
        """Tell `listener` nothing more; a signal without a listener does what it did before, or nothing: `ignore`."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]
        if ignore:
            self._ignored |= set(listener.numbers)
        for number in set(self._before) - {number for each in self._listeners for number in each.numbers}:
            self._give_back(number)
        if not self._listeners:
            self._end()

    def hold(self) -> None:
        """Keep signals from this thread, which is about to fork: the child must not take one for ours."""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before) if self._before else None

    def let_go(self) -> None:
        """End `hold`, in the process that forked."""
        if getattr(self._mask, "before", None) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def forget(self) -> None:
        """Be as new, in a process that was just forked: signals do what they did before the first listener."""
        mask = getattr(self._mask, "before", None)
        self._ignored = set()
        for number in list(self._before):
            self._give_back(number)
        if self._pipe is not None:
            self._give_back_wakeup(self._pipe[1])
            for end in self._pipe:
                end.close()
        self.__dict__.update(SignalHub().__dict__)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: int) -> None:
        """Have the thread look at `number`. Any thread, signal handlers included."""
        if self._pipe is not None:
            with suppress(OSError):  # It is full: the thread looks already.
                self._pipe[1].send(bytes([number]))

    def _begin(self) -> None:
        self._pipe = socket.socketpair()
        for end in self._pipe:
            end.setblocking(False)
        self._ignored = set()
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1].fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="preemption", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        assert self._pipe is not None and self._thread is not None
        self._give_back_wakeup(self._pipe[1])
        self.send(_WAKE_UP)
        self._thread.join()
        for end in self._pipe:
            end.close()
        self._pipe = self._thread = None

    def _give_back(self, number: int) -> None:
        before = self._before.pop(number)
        if signal.getsignal(number) is _leave_it_to_the_hub:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else before)

    def _give_back_wakeup(self, own: socket.socket) -> None:
        current = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # It was closed meanwhile.
            signal.set_wakeup_fd(self._wakeup_before if current == own.fileno() else current)

    def _watch(self, pipe: socket.socket) -> None:
        while True:
            with self._lock:
                seconds = min((each.seconds_left() for each in self._listeners), default=math.inf)
            ready = select.select([pipe], [], [], None if seconds == math.inf else seconds)[0]
            with self._lock:
                for each in self._listeners:
                    if not ready and each.seconds_left() <= 0:
                        each.time_is_up()
            numbers = pipe.recv(64) if ready else b""
            self._hand_on(bytes(number for number in numbers if _WAKE_UP < number < _BY_HANDLER))
            self._tell(number % _BY_HANDLER for number in numbers)
            if not self._listeners and _WAKE_UP in numbers:
                return

    def _hand_on(self, numbers: bytes) -> None:
        if numbers and self._wakeup_before != -1:
            with suppress(OSError):
                os.write(self._wakeup_before, numbers)

    def _tell(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with self._lock:
                for each in self._listeners:
                    if number in each.numbers:
                        each.hear(number)


def _leave_it_to_the_hub(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for Python to write to the wakeup pipe, which may be another library's by now."""
    HUB.send(number + _BY_HANDLER)


HUB = SignalHub()
"""That of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=HUB.hold, after_in_parent=HUB.let_go, after_in_child=HUB.forget)
