"""One start of a job, rank by rank and without an agent: it takes half a second, and ends as the test wants."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.e2e.jobs import read_lines, send
from tests.e2e.random_kills import Order, is_, run_rank
from tests.forked import Forked

DEADLINE_SECONDS = 90.0
GRACE_SECONDS = 3.0
"""From the death of one rank to SIGKILL for the others, which got SIGTERM."""


class BareStart:
    """Start number `number` of the job of `order`."""

    def __init__(self, order: Order, number: int) -> None:
        order.folder.mkdir(parents=True, exist_ok=True)
        self.order, self.number = order, number
        self._ranks = [Forked(run_rank, order, number, rank) for rank in range(order.ranks)]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what `rank` recorded, in order."""
        return [line for line in read_lines(self.order.record(rank)) if line["start"] == f"{self.number}.0"]

    def of_event(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return what `rank` recorded of `event`."""
        return [line for line in self.lines(rank) if is_(line, event)]

    def steps(self, event: str) -> set[int]:
        """Return the steps for which every rank recorded `event`."""
        return set.intersection(*({line["step"] for line in self.of_event(event, rank)} for rank in self.all_ranks))

    @property
    def all_ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.order.ranks)

    @property
    def resumed(self) -> int | None:
        """The step that it resumed, 0 for a fresh start; None if it did not get there on every rank."""
        return max(self.steps("resumed"), default=None)

    @property
    def is_from_memory(self) -> bool:
        """Whether what it resumed was in memory."""
        return any(line["origin"] == "memory" for line in self.of_event("loaded"))

    def trained(self, of_ranks: Callable[[Sequence[int]], int] = min) -> int:
        """Return the last step that all ranks have trained, or with `max` that any of them has; 0 for none."""
        lines = [self.of_event("trained", rank) for rank in self.all_ranks]
        return of_ranks([max((line["step"] for line in each), default=0) for each in lines])

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds; return whether it does: False if a rank has ended before."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened for {DEADLINE_SECONDS:.0f} s:\n{self.tail()}"
            if any(rank.poll() is not None for rank in self._ranks):
                return condition()
            time.sleep(0.002)
        return True

    def kill_one(self, rank: int) -> None:
        """Kill `rank`; the others get SIGTERM, and later SIGKILL, as from torchrun."""
        self._ranks[rank].kill()
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all ranks at once."""
        for rank in self._ranks:
            rank.kill()
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that live."""
        for rank in self._ranks:
            if rank.poll() is None:
                send(rank.pid, number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> list[int | None]:
        """Wait until all ranks have ended, at most `seconds`, then kill those that live. Return all exit codes."""
        deadline = time.monotonic() + seconds
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        for rank in self._ranks:
            rank.kill()
            rank.wait(DEADLINE_SECONDS)
        return [rank.returncode for rank in self._ranks]

    def tail(self) -> str:
        """Return the end of the output of all starts."""
        return self.order.log.read_text(errors="replace")[-6000:] if self.order.log.exists() else ""
