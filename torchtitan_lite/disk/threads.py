"""Threads next to the training: work in the background, and work that several share.

A thread of the training process never gets a lower CPU priority: with all cores busy the kernel would not schedule it
while it holds the GIL, and training waits for the GIL. Only its I/O gives way (`lower_io`); a process of its own gives
way with both (`give_way`). `Background` runs work that no save waits for, such as removing old checkpoints: one task
after another, in a daemon thread, so it never keeps the process alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from torchtitan_lite.disk.shared_memory import libc
from torchtitan_lite.log import in_one_line, logger

NICE = 15
"""Niceness of the writer process, a compromise. Next to training that uses every core, steps take longer at 10; at 19 a
write takes several times as long and the next save waits for it (docs/performance.md)."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def give_way() -> None:
    """Lower the CPU and I/O priority of this process, for good: of the calling thread and those that it starts.

    Never in the training process.
    """
    # A sandbox may refuse it; the save matters more than its priority.
    with contextlib.suppress(OSError):
        os.nice(NICE)
    lower_io()


def lower_io() -> None:
    """Lower the I/O priority of the calling thread and of the threads that it starts, for good."""
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        this_thread, best_effort_lowest = 0, (2 << 13) | 7
        libc().syscall(number, 1, this_thread, best_effort_lowest)


def daemon(name: str, work: Callable[..., object], *args: object) -> threading.Thread:
    """Return a daemon thread that runs `work`. Raises OSError, not RuntimeError, if the system has no more threads."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread


def in_a_thread(name: str, run: Callable[[], object]) -> None:
    """Call `run`, which raises nothing, in a daemon thread, or here if the system has no more threads."""

    def run_below() -> None:
        lower_io()
        run()

    try:
        daemon(name, run_below)
    except OSError:
        run()


class Background:
    """A queue of tasks and a thread that runs them, which exists only while there are any. Any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._is_running = False
        self.is_closed = False
        """Whether the running task should end soon."""

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue `work`. A task with the same `key` that has not begun yet is replaced."""
        with self._changed:
            self.is_closed = False
            self._waiting[key] = work
            is_first, self._is_running = not self._is_running, True
        if is_first:
            in_a_thread(self._name, self._run_all)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`, which may be infinite, until no task is left; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, min(seconds, threading.TIMEOUT_MAX))

    def close(self, seconds: float) -> bool:
        """Wait as `wait` does, then drop the tasks that have not begun."""
        is_over = self.wait(seconds)
        with self._changed:
            self.is_closed = True
            self._waiting.clear()
        return is_over

    def _run_all(self) -> None:
        while work := self._next():
            try:
                work()
            except BaseException as error:  # Also SystemExit: `wait` would wait for a thread that has ended.
                logger.warning("Background task %s failed: %s", self._name, in_one_line(error))

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            self._is_running = False
            self._changed.notify_all()
            return None


# Work that several threads share.
#
# Each item is taken by one thread, in order. The caller is one of the threads. It returns, or raises, only when no
# thread works any more, because the memory they work on may be freed after that. After a failure (an interrupt of the
# caller is one, too) no further item is begun, and the caller raises the first failure.


T = TypeVar("T")


def in_threads(items: Iterable[T], threads: int, make_worker: Callable[[], Callable[[T], object]]) -> None:
    """Give each of `items` to one of `threads` workers; `make_worker` is called once in each thread."""
    waiting = iter(items)
    lock = threading.Lock()
    failures: list[BaseException] = []
    nothing = object()

    def run() -> None:
        try:
            work = make_worker()
            while not failures:
                with lock:
                    item = next(waiting, nothing)
                if item is nothing:
                    return
                work(item)  # type: ignore[arg-type]  # it is an item
        except BaseException as error:
            failures.append(error)

    helpers = [_Helper(run) for _ in range(threads - 1)]
    try:
        for helper in helpers:
            helper.start()
    except RuntimeError:
        # The system has no more threads: those that started do all of the work.
        pass
    except BaseException as error:
        failures.append(error)
    try:
        run()
    except BaseException as error:
        failures.append(error)
    for helper in helpers:
        # A helper without an ident has not begun, and will see the failure before it takes an item.
        if helper.ident is not None:
            _wait_for_helper(helper, failures)
    if failures:
        raise failures[0]


class _Helper(threading.Thread):
    """A thread with an event for its end. (After an interrupted `join`, threading takes a thread for ended.)"""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()


def _wait_for_helper(helper: _Helper, failures: list[BaseException]) -> None:
    """Wait until `helper` has ended, however often the caller is interrupted meanwhile."""
    while True:
        try:
            helper.ended.wait()
            return helper.join()
        except BaseException as error:
            failures.append(error)
