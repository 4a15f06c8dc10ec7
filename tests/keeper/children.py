"""A forked process in which a function runs, without the interpreter's end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import TracebackType


class Child:
    """A process that runs `work` and says so, and then lives until it is killed or this object's context ends."""

    def __init__(self, work: Callable[[], object], *, with_own_session: bool = False) -> None:
        ours, its = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if with_own_session:
                    os.setsid()
                work()
                os.write(its, b"done")
                signal.pause()
            finally:
                os._exit(1)
        os.close(its)
        self.is_done = os.read(ours, 8) == b"done"
        os.close(ours)
        self._is_reaped = False

    def kill(self) -> None:
        """Kill it and wait for its end. Idempotent."""
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._is_reaped = True

    def __enter__(self) -> Child:
        assert self.is_done, "the child failed: its traceback is above"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
