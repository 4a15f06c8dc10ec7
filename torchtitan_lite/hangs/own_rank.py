"""A rank, as the watcher process next to it sees it: its steps, its state in the system, its stack.

The rank counts its steps in shared memory, so a watcher needs nothing of it to see that it stands. For evidence the
watcher asks a thread of it, which has to run Python to answer, and sends a signal, which faulthandler answers with the
stack of its main thread even while a call in C holds the GIL.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, Literal

from torchtitan_lite.disk.helper import Line, is_stopped
from torchtitan_lite.hangs.verdict import Evidence, frames_of

COUNT, STEP, BOUND_MS, IS_PAUSED = range(4)
"""The words of the shared memory."""
WORDS_BYTES = mmap.PAGESIZE
ANSWER_SECONDS = 1.0
QUIET_SECONDS = 0.1
"""Without another byte, after which the stack counts as complete: it has no end mark."""
_SHORT_QUIET_SECONDS = 0.02
"""Of a rank that was stopped, which trains on until it is stopped again."""
_LONGEST_TICK, _SHORTEST_TICK = 0.5, 0.05
_POLL_SECONDS = 0.005
_MOST_BYTES = 1 << 16


def dump_signal() -> int:
    """Return the signal that a watched rank answers with its stack: no scheduler, launcher or key has it."""
    return signal.SIGRTMIN + 7


def map_words(fd: int) -> memoryview:
    """Return the shared memory as words."""
    return memoryview(mmap.mmap(fd, WORDS_BYTES)).cast("Q")


class OwnRank:
    """The process `pid`. It has the other end of `line`, and writes its stack to `stacks_fd`."""

    def __init__(self, rank: int, pid: int, words: memoryview, stacks_fd: int, line: Line) -> None:
        self.rank = rank
        self.line = line
        self.seconds = 0.0
        """For how long its count has stood."""
        self._pid = pid
        self._words = words
        self._stacks_fd = stacks_fd
        self._stillness = Stillness()
        self._owes_answer = False
        """Whether it has not answered the last question yet."""

    @property
    def tick_seconds(self) -> float:
        """How long to wait until the next look."""
        bound = self._words[BOUND_MS] / 1000
        return min(_LONGEST_TICK, max(_SHORTEST_TICK, bound / 20)) if bound else _LONGEST_TICK

    def is_overdue(self) -> bool:
        """Look at the count; return whether the step takes longer than its bound."""
        words = self._words
        is_paused = bool(words[IS_PAUSED] or not words[BOUND_MS])
        self.seconds = self._stillness.look(
            time.monotonic(), words[COUNT], is_paused=is_paused, tick_seconds=self.tick_seconds
        )
        return not is_paused and self.seconds >= words[BOUND_MS] / 1000

    def has_ended(self) -> bool:
        """Return whether the rank has closed its end of the line. Drops answers that came late."""
        try:
            while self.line.is_ready():
                self._answer()
        except (EOFError, OSError):
            return True
        return False

    def evidence(self) -> Evidence:
        """Return what can be found out about the rank, within `ANSWER_SECONDS`. A stopped one stays stopped."""
        was_stopped, before = is_stopped(self._pid), os.fstat(self._stacks_fd).st_size
        step, stopped_for = self._words[STEP], self.seconds
        # In a pause it works, and is left alone. Others have waited for it, so it counts as in one for as long again
        # as a step may take.
        if not was_stopped and (self._words[IS_PAUSED] or self._stillness.since_pause < self._words[BOUND_MS] / 1000):
            return self._evidence(step, 0.0)
        self.has_ended()
        if not self._owes_answer:  # Else questions to one that reads none would fill the line.
            self._owes_answer = True
            with suppress(OSError):
                self.line.send("?")
        self._send_to_main_thread(dump_signal())
        if was_stopped:
            self._send(signal.SIGCONT)
        answer = self._wait(before, _SHORT_QUIET_SECONDS if was_stopped else QUIET_SECONDS)
        if was_stopped:
            self._send(signal.SIGSTOP)
        self.is_overdue()
        return self._evidence(
            step,
            stopped_for if was_stopped else self.seconds,
            is_stopped=was_stopped,
            answers=answer is not None,
            collectives=answer or {},
            stack=frames_of(os.pread(self._stacks_fd, _MOST_BYTES, before).decode(errors="replace")),
        )

    def kill(self) -> None:
        """End the rank, and with it this process."""
        self._send(signal.SIGKILL)

    def _evidence(self, step: int, seconds: float, **more: Any) -> Evidence:
        return Evidence(self.rank, socket.gethostname(), self._pid, step, seconds, **more)

    def _wait(self, size: int, quiet_seconds: float) -> dict[str, int] | None:
        """Wait for a stack after the first `size` bytes, and for the answer. Return the answer, None without one."""
        answer: dict[str, int] | None = None
        first, begin = size, time.monotonic()
        grown = begin
        while (now := time.monotonic()) < begin + ANSWER_SECONDS:
            if (found := os.fstat(self._stacks_fd).st_size) != size:
                size, grown = found, now
            with suppress(EOFError, OSError):
                answer = self._answer() if self.line.is_ready() else answer
            if answer is not None and size > first and now > grown + quiet_seconds:
                break
            time.sleep(_POLL_SECONDS)
        return answer

    def _answer(self) -> dict[str, int]:
        self._owes_answer = False
        counts: dict[str, int] = self.line.receive()
        return counts

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _send_to_main_thread(self, number: int) -> None:
        # A signal to the process may go to any thread, and meanwhile a rank that was stopped trains on. The C library
        # has this call from version 2.30 on.
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
        if tgkill is None or tgkill(self._pid, self._pid, number):
            self._send(number)


# How long a step may take before its rank counts as hung, and how long it has taken. Values only: no clock.


STEPS_BEFORE_AUTO = 10
"""Steps of a start before "auto" watches. A number of seconds counts from the first step on, which may compile."""
SLOWEST_OF = 100
FACTOR = 10.0
LEAST_SECONDS = 60.0


class Bound:
    """The most seconds that a step may take, by the key `comm.hang_seconds` and the steps of this start."""

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self._fixed_seconds = None if setting == "auto" else float(setting)
        self._steps_before = STEPS_BEFORE_AUTO if setting == "auto" else 1
        self._num_steps = 0
        self._last_steps: deque[float] = deque(maxlen=SLOWEST_OF)

    def step_took(self, seconds: float) -> None:
        """Note that a step of this start is over; `seconds` are without its pauses. The first one, which may compile,
        says nothing about the others."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._last_steps.append(seconds)

    @property
    def seconds(self) -> float:
        """The most that the next step may take; 0 while no step is watched."""
        if self._num_steps < self._steps_before:
            return 0.0
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        return max(LEAST_SECONDS, FACTOR * max(self._last_steps))


class Stillness:
    """How long the count of a rank has stood, in time in which the watcher itself ran.

    So a job that is suspended and continued, with its watchers, has not hung.
    """

    def __init__(self) -> None:
        self._count = -1
        self._last_look = 0.0
        self._seconds = 0.0
        self.since_pause = math.inf
        """Seconds since the last pause was seen; infinity if none was."""

    def look(self, now: float, count: int, *, is_paused: bool, tick_seconds: float) -> float:
        """Return the seconds for which `count` has stood at `now`; 0 in a pause.

        `tick_seconds` are those until the look after this one was to come.
        """
        passed = min(now - self._last_look, 2 * tick_seconds)
        self._seconds = 0.0 if is_paused or count != self._count else self._seconds + passed
        self.since_pause = 0.0 if is_paused else self.since_pause + passed
        self._count, self._last_look = count, now
        return self._seconds
