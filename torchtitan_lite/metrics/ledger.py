"""What the time of a run goes into, and its ledger: {dump_folder}/ledger.jsonl, which only grows.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
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
    PARTS,
    ROLLED_BACK,
    START,
    Accounts,
    Start,
    Steps,
    read_accounts,
)
from torchtitan_lite.events import CleanEnd, Committed, Event, Loaded, Preempted, Resumed, SaveStarted
from torchtitan_lite.json_lines import JsonLines, object_in
from torchtitan_lite.log import counted, logger

_BEAT_BYTES = 1024
"""Length of ledger.now: each beat overwrites all of the last one, in one write within a page."""


class Ledger:
    """Count the time of this start on `clock`, and that of the run.

    One process writes into a `dump_folder`, the first rank's: only that one knows the earlier starts. Where `writes` is
    false the totals of the run are those of its checkpoints, which leave out what was lost.
    """

    def __init__(
        self, dump_folder: Path, clock: RunClock, *, writes: bool = True, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._dump_folder, self._writes = dump_folder, writes
        self.clock = clock
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
        self._rollbacks: tuple[tuple[int, int], ...] = ()
        self._earlier_steps = Steps()
        self._earlier_seconds, self._earlier_productive_seconds = 0.0, 0.0
        self._loaded: Loaded | None = None
        self._save_began: dict[int, float] = {}

    def begin(self, **about: Any) -> None:
        """Read the accounts of earlier starts, and write the first line of this one, with `about`."""
        if not self._writes:
            return
        try:
            self.before = read_accounts(self._dump_folder)
        except OSError as error:
            logger.warning("Could not read %s: %s. Earlier starts are not counted", self._lines.path, error)
        with self._lock:
            if self.before.starts:
                last = self.before.starts[-1]
                self._step = self._durable_step = last.durable_step
                if not last.end and (latest := self._latest.read()):
                    self._lines.append(latest, is_owed=True)
            self._lines.append({"record": START, "time": self.began, "start": self.id} | about, is_owed=True)
            self._has_begun = True
        self._earlier_steps = self.before.steps

    def resume(self, run_seconds: float, productive_seconds: float) -> None:
        """Add the totals that the loaded checkpoint has of the run up to its step."""
        self._earlier_seconds, self._earlier_productive_seconds = run_seconds, productive_seconds

    def completed(self, event: Event) -> Event:
        """Return `event` with what is known of a restart, or of a run that ends; another one as it is."""
        match event:
            case Resumed() if self.before.starts:
                return self._restart(event, self.before.starts[-1])
            case CleanEnd():
                accounts = self.accounts()
                spent = {part: seconds for part, seconds in accounts.seconds.items() if seconds}
                counts = {"redone_steps": accounts.redone_steps, "starts": len(accounts.starts)}
                return replace(event, goodput=accounts.goodput, time_seconds=spent, **counts)
        return event

    def _restart(self, event: Resumed, last: Start) -> Resumed:
        """Return `event` with what it cost that the start `last` ended."""
        down, redone = max(0.0, self.began - last.last_beat), max(0, last.last_step - event.step)
        number = counted(redone, "step") if redone else "No step"
        steps = f"{number} of the last start {'is' if redone < 2 else 'are'}"
        logger.info("%s trained again; it ended %.1f s before this one", steps, down)
        return replace(event, down_seconds=down, redone_steps=redone)

    def note(self, event: Event) -> None:
        """Note what `event` says about saves, about the load, and that the start ends. **Any thread**."""
        match event:
            case Loaded():
                self._loaded = event
            case SaveStarted():
                self._save_began[event.step] = self.clock.elapsed
            case Committed():
                self._committed(event, began=self._save_began.pop(event.step, self.clock.elapsed))
            case CleanEnd():
                self.clock.leave()

    def start_loop(self, step: int, checkpoints: str) -> None:
        """Note that training begins after `step`. `checkpoints` is the run's own folder of checkpoints."""
        self.clock.enter("other")
        loaded = self._loaded
        at_risk = (loaded.at_risk_steps, loaded.at_risk_seconds) if loaded is not None else (0, 0.0)
        source = {"from": _start_source(step, loaded, checkpoints), "seconds": loaded.seconds if loaded else 0.0}
        with self._lock:
            self._loaded_step = self._step = step
            self._durable_step, self._durable_at = step - at_risk[0], self.clock.elapsed - at_risk[1]
            durable = {"durable_step": self._durable_step, "at_risk_seconds": round(at_risk[1], 3)}
            self._append(LOADED, step, source | durable)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Count the block, the training of `step`: as redone if an earlier start trained it. One write at its end."""
        with self.clock.step("redone" if step in self._earlier_steps else "productive"):
            yield
        with self._lock:
            self._step = step
            if self._has_begun:
                self._latest.write(self._record(BEAT, step, self._figures()))

    def beat(self) -> None:
        """Write that the start lives. **Any thread**."""
        with self._lock:
            self._append(BEAT, self._step, self._figures())

    def rolled_back(self, step: int, loaded_step: int) -> None:
        """Note that the start rolled back from `step` to `loaded_step`, which is durable."""
        self._earlier_steps = self._earlier_steps.and_also(loaded_step, step - 1)
        self.clock.enter("other")
        with self._lock:
            self._rollbacks += ((step - 1, loaded_step),)
            self._step = self._durable_step = loaded_step
            self._durable_at = self.clock.elapsed
            self._append(ROLLED_BACK, loaded_step, {"from_step": step})

    def _committed(self, event: Committed, *, began: float) -> None:
        """Note that a step is durable; `began` is the clock's reading when its save began."""
        figures: dict[str, Any] = {"blocked": event.stall_seconds, "seconds": event.seconds, "bytes": event.bytes}
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
        return max(0, self._step - self._durable_step), self.clock.elapsed - self._durable_at

    def accounts(self) -> Accounts:
        """Return the accounts of all starts up to now, without the saves."""
        seconds = self.clock.seconds()
        now = Start(
            self.id,
            began=self.began,
            last_beat=self.began + sum(seconds.values()),
            seconds=seconds,
            loaded_step=self._loaded_step,
            last_step=self._step,
            durable_step=self._durable_step,
            at_risk_seconds=self.at_risk()[1],
            rollbacks=self._rollbacks,
        )
        return Accounts((*self.before.starts, now), self.before)

    @property
    def run_seconds(self) -> float:
        """Seconds of the run so far: of this start, and of earlier ones up to the step that was loaded."""
        return self._earlier_seconds + self.clock.elapsed

    @property
    def productive_seconds(self) -> float:
        """The seconds of it that went into training."""
        seconds = self.clock.seconds()
        return self._earlier_productive_seconds + seconds.get("productive", 0.0) + seconds.get("redone", 0.0)

    def tags(self) -> dict[str, float]:
        """Return the share of productive time in percent; if it writes also the other figures, by TensorBoard tag."""
        if not self._writes:
            total = self.run_seconds
            return {"goodput(%)": 100 * self.productive_seconds / total if total > 0 else 0.0}
        accounts = self.accounts()
        steps, seconds = self.at_risk()
        return {
            "goodput(%)": 100 * accounts.goodput,
            **{f"goodput/{part}(s)": value for part, value in accounts.seconds.items()},
            "goodput/redone_steps": accounts.redone_steps,
            "goodput/starts": len(accounts.starts),
            "checkpoint/at_risk(s)": seconds,
            "checkpoint/at_risk_steps": steps,
        }

    def end(self, event: CleanEnd | None) -> None:
        """Write the last line, and log where the time of the run went.

        The start ended with `event`; for None it failed. A later line opens the file again.
        """
        why = {"why": FAILED if event is None else event.name}
        signal = {"signal": event.signal} if isinstance(event, Preempted) else {}
        with self._lock:
            self._append(END, self._step, why | signal | self._figures())
            self._lines.close()
            self._latest.close()
        logger.info("%s", goodput_summary(self.accounts()))

    def _figures(self) -> dict[str, Any]:
        seconds = {part: round(value, 4) for part, value in self.clock.seconds().items()}
        return {"seconds": seconds, "durable_step": self._durable_step, "at_risk_seconds": round(self.at_risk()[1], 3)}

    def _append(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        if self._has_begun:  # A seed checkpoint is saved by no start.
            # Without these the start's beats say nothing; another beat follows.
            self._lines.append(self._record(kind, step, figures), is_owed=kind in (LOADED, ROLLED_BACK))

    def _record(self, kind: str, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        elapsed = sum(figures["seconds"].values()) if isinstance(figures.get("seconds"), dict) else self.clock.elapsed
        return {"record": kind, "time": self.began + elapsed, "start": self.id, "step": step} | dict(figures)


def _start_source(step: int, loaded: Loaded | None, checkpoints: str) -> str:
    """Return what was loaded; None for a fresh start."""
    if loaded is None:
        return "fresh"
    if loaded.origin == "memory":
        return "memory"
    return "checkpoint" if step else "seed" if loaded.path.rpartition("/")[0] == checkpoints else "initial"


def goodput_summary(accounts: Accounts) -> str:
    """Return one line about where the time went: the parts of at least a tenth of a percent, the largest first."""
    seconds = accounts.seconds
    total = sum(seconds.values())
    shares = [(100 * seconds[part] / total if total > 0 else 0.0, part.replace("_", " ")) for part in PARTS]
    parts = ", ".join(f"{part} {share:.1f} %" for share, part in sorted(shares, reverse=True) if share >= 0.1)
    num = len(accounts.starts)
    unclean = accounts.unclean_ends if num > 1 else 0
    starts = counted(num, "start") + (f" ({unclean} ended uncleanly)" if unclean else "")
    redone = counted(accounts.redone_steps, "step")
    return f"Time of the run: {total:.1f} s in {starts}: {parts}; {redone} trained again"


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
        with suppress(OSError):
            return object_in(self._path.read_bytes())
        return None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):
                os.close(fd)


# The time of this start, by what the main thread does: parts that are disjoint and sum to the time since the start.
#
# At each moment the start is in exactly one part; `part` changes it for a block. The first step counts as compiling
# until the second one has shown what a step takes: then so much of it moves to the part of the steps. The names of the
# parts are in `accounts`.


_FIRST, _LAST = "starting", "leaving"


class RunClock:
    """Count seconds from `began`, a reading of `clock`; by default from now. Only the main thread changes the part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        self._clock = clock
        self._since = self._began = clock() if began is None else began
        self._part = _FIRST
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._num_steps = 0
        self._first_step: tuple[str, float] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start. **Any thread**."""
        return self._clock() - self._began

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part that there was so far. **Any thread**."""
        with self._lock:
            now = self._clock()
            return {**self._seconds, self._part: self._seconds[self._part] + now - self._since}

    def enter(self, part: str) -> None:
        """Count the time from now on for `part`, unless the start is leaving."""
        with self._lock:
            now = self._clock()
            self._seconds[self._part] += now - self._since
            self._since = now
            self._part = _LAST if self._part == _LAST else part

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Count the block for `part`, and what comes after it as before."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def leave(self) -> None:
        """Count the present stay in a part, and all that follows, for leaving."""
        with self._lock:
            self._part = _LAST

    @contextmanager
    def step(self, part: str) -> Iterator[None]:
        """Count the block, a step of training, for `part`; the first one counts as said above."""
        self._num_steps += 1
        if self._num_steps > 2:
            with self.part(part):
                yield
            return
        first = self._num_steps == 1
        began, before = self.elapsed, self._seconds["saving"]
        with self.part("compiling" if first else part):
            yield
        seconds = self.elapsed - began - (self._seconds["saving"] - before)
        if first:
            self._first_step = (part, seconds)
        elif self._first_step is not None:
            part_of_first, seconds_of_first = self._first_step
            self._move(min(seconds, seconds_of_first), part_of_first)

    def _move(self, seconds: float, to: str) -> None:
        with self._lock:
            seconds = min(seconds, self._seconds["compiling"])
            self._seconds["compiling"] -= seconds
            self._seconds[to] += seconds
