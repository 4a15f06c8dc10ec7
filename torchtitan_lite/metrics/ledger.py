"""The ledger of a run: {dump_folder}/ledger.jsonl, which only grows, whatever checkpoint a start resumes from.

A start writes a line when it begins, when it has loaded, for each save and when it ends, and a beat every
few seconds, so that after a SIGKILL it is known how long the start lived. The beat of each step overwrites the file
ledger.now, which the next start copies into the ledger: no step is lost, and the ledger does not grow with the steps.
`accounts` reads both. A disk that refuses is one warning.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.accounts import (
    BEAT,
    COMMITTED,
    END,
    FAILED,
    LATEST_BEAT_FILE,
    LEDGER_FILE,
    LOADED,
    ROLLED_BACK,
    START,
    Accounts,
    Start,
    read_accounts,
)
from torchtitan_lite.events import CleanEnd, Committed, Preempted
from torchtitan_lite.json_lines import JsonLines
from torchtitan_lite.log import logger
from torchtitan_lite.metrics.run_clock import RunClock

_BEAT_BYTES = 1024
"""Length of ledger.now: each beat overwrites all of the last one, in one write within a page."""


class Ledger:
    """Write what `clock` counts. One process writes into a `dump_folder`, the first rank's. **Any thread**."""

    def __init__(self, dump_folder: Path, clock: RunClock, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._dump_folder, self._clock = dump_folder, clock
        self._lines = JsonLines(dump_folder / LEDGER_FILE)
        self._latest = _LatestBeat(dump_folder / LATEST_BEAT_FILE)
        # Times of this start are its beginning plus what a monotonic clock counts: setting the clock changes no sum.
        self.began = wall_clock() - clock.elapsed
        """Unix seconds."""
        self._lock = threading.Lock()
        self.id = uuid.uuid4().hex[:8]
        """The name of this start."""
        self.before = Accounts()
        """The accounts of the earlier starts, from `begin` on."""
        self._has_begun = False
        self._loaded_step: int | None = None
        self._step, self._durable_step, self._durable_at = 0, 0, 0.0
        self._given_up_steps = 0

    def begin(self, **about: Any) -> None:
        """Read the accounts of earlier starts, and write the first line of this one, with `about`."""
        try:
            self.before = read_accounts(self._dump_folder)
        except OSError as error:
            logger.warning("Could not read %s: %s. Earlier starts are not counted", self._lines.path, error)
        with self._lock:
            if self.before.starts:
                last = self.before.starts[-1]
                self._step = self._durable_step = last.durable_step
                if not last.end and (latest := self._latest.read()):
                    self._lines.append(latest)
            self._lines.append({"record": START, "time": self.began, "start": self.id} | about)
            self._has_begun = True

    def beat(self) -> None:
        """Write that the start lives."""
        with self._lock:
            self._append(BEAT, self._step, self._figures())

    def loaded(self, step: int, source: str, seconds: float, at_risk: tuple[int, float] = (0, 0.0)) -> None:
        """Note that training begins after `step`, with the state from `source`.

        Of what is loaded from memory the disk lacks `at_risk`: steps and seconds of training.
        """
        with self._lock:
            self._loaded_step = self._step = step
            self._durable_step, self._durable_at = step - at_risk[0], self._clock.elapsed - at_risk[1]
            durable = {"durable_step": self._durable_step, "at_risk_seconds": round(at_risk[1], 3)}
            self._append(LOADED, step, {"from": source, "seconds": seconds} | durable)

    def rolled_back(self, step: int, loaded_step: int) -> None:
        """Note that the start rolled back from `step` to `loaded_step`, which is durable."""
        with self._lock:
            self._given_up_steps += max(0, step - 1 - loaded_step)
            self._step = self._durable_step = loaded_step
            self._durable_at = self._clock.elapsed
            self._append(ROLLED_BACK, loaded_step, {"from_step": step})

    def step_done(self, step: int) -> None:
        """Note that `step` is trained. One write; no line of the ledger."""
        with self._lock:
            self._step = step
            self._latest.write(self._record(BEAT, step, self._figures()))

    def committed(self, event: Committed, *, began: float) -> None:
        """Note that a step is durable; `began` is the clock's reading when its save began."""
        figures: dict[str, float | None] = {
            "blocked": event.stall_seconds,
            "seconds": event.seconds,
            "bytes": event.bytes,
        }
        if event.slowest_rank is not None:
            figures |= {"slowest_rank": event.slowest_rank, "slowest_seconds": event.slowest_seconds}
        with self._lock:
            if event.kind == "full":
                self._durable_step, self._durable_at = event.step, began
            self._append(COMMITTED, event.step, figures)

    def at_risk(self) -> tuple[int, float]:
        """Return what would be lost if the job died now: steps, and seconds since the last one that is durable."""
        if self._loaded_step is None:
            return 0, 0.0
        return max(0, self._step - self._durable_step), self._clock.elapsed - self._durable_at

    def accounts(self) -> Accounts:
        """Return the accounts of all starts up to now, without the saves."""
        seconds = self._clock.seconds()
        now = Start(
            self.id,
            began=self.began,
            last_beat=self.began + sum(seconds.values()),
            seconds=seconds,
            loaded_step=self._loaded_step,
            last_step=self._step,
            durable_step=self._durable_step,
            at_risk_seconds=self.at_risk()[1],
            given_up_steps=self._given_up_steps,
        )
        return Accounts((*self.before.starts, now))

    def end(self, event: CleanEnd | None) -> None:
        """Write the last line: the start ended with `event`; for None it failed. A later line opens the file again."""
        why = {"why": FAILED if event is None else event.name}
        signal = {"signal": event.signal} if isinstance(event, Preempted) else {}
        with self._lock:
            self._append(END, self._step, why | signal | self._figures())
            self._lines.close()
            self._latest.close()

    def _figures(self) -> dict[str, Any]:
        seconds = {part: round(value, 4) for part, value in self._clock.seconds().items()}
        return {"seconds": seconds, "durable_step": self._durable_step, "at_risk_seconds": round(self.at_risk()[1], 3)}

    def _append(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        if self._has_begun:  # A seed checkpoint is saved by no start.
            self._lines.append(self._record(kind, step, figures))

    def _record(self, kind: str, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        elapsed = sum(figures["seconds"].values()) if isinstance(figures.get("seconds"), dict) else self._clock.elapsed
        return {"record": kind, "time": self.began + elapsed, "start": self.id, "step": step} | dict(figures)


class _LatestBeat:
    """One JSON line in a file of fixed length, overwritten in place. Raises nothing: the ledger's lines warn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace the line by `record`."""
        with suppress(OSError):
            if self._fd is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, json.dumps(record).encode().ljust(_BEAT_BYTES - 1) + b"\n", 0)

    def read(self) -> dict[str, Any] | None:
        """Return the record; None if there is none."""
        try:
            record = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):
                os.close(fd)
