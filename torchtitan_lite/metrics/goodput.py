"""What the time of a run goes into, from its loop and its events to the ledger.

Every rank counts its own time; only one that writes has a ledger, and with it the earlier starts. Without it the totals
of a run are those of its checkpoints, which leave out what was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchtitan_lite.accounts import PARTS, Accounts, Steps
from torchtitan_lite.events import CleanEnd, Committed, Event, Loaded, Resumed, SaveStarted
from torchtitan_lite.log import counted, logger
from torchtitan_lite.metrics.ledger import Ledger
from torchtitan_lite.metrics.run_clock import RunClock


class Goodput:
    """Count the time of this start on `clock`, and with a `ledger` that of the run."""

    def __init__(self, clock: RunClock, ledger: Ledger | None = None) -> None:
        self.clock = clock
        self.ledger = ledger
        self._earlier_steps = Steps()
        self._earlier_seconds, self._earlier_productive_seconds = 0.0, 0.0
        self._loaded: Loaded | None = None
        self._save_began: dict[int, float] = {}
        self._end: CleanEnd | None = None

    def begin(self, **about: Any) -> None:
        """Begin this start in the ledger, with `about`."""
        if self.ledger is not None:
            self.ledger.begin(**about)
            for start in self.ledger.before.starts:
                self._earlier_steps = self._earlier_steps.and_also(*start.steps)

    def resume(self, run_seconds: float, productive_seconds: float) -> None:
        """Add the totals that the loaded checkpoint has of the run up to its step."""
        self._earlier_seconds, self._earlier_productive_seconds = run_seconds, productive_seconds

    def completed(self, event: Event) -> Event:
        """Return `event` with what the ledger knows of a restart, or of a run that ends; another one as it is."""
        match event:
            case Resumed():
                return self._restart(event)
            case CleanEnd():
                return replace(event, **self._totals())
        return event

    def _restart(self, event: Resumed) -> Resumed:
        """Return `event` with what it cost that the last start ended; as it is for a first start."""
        if self.ledger is None or not self.ledger.before.starts:
            return event
        down = max(0.0, self.ledger.began - self.ledger.before.starts[-1].last_beat)
        redone = max(0, self.ledger.before.starts[-1].last_step - event.step)
        number = counted(redone, "step") if redone else "No step"
        steps = f"{number} of the last start {'is' if redone < 2 else 'are'}"
        logger.info("%s trained again; it ended %.1f s before this one", steps, down)
        return replace(event, down_seconds=down, redone_steps=redone)

    def _totals(self) -> dict[str, Any]:
        """Return the figures of the run for the event of its end; {} without a ledger."""
        if self.ledger is None:
            return {}
        accounts = self.ledger.accounts()
        return {
            "goodput": accounts.goodput,
            "time_seconds": {part: seconds for part, seconds in accounts.seconds.items() if seconds},
            "redone_steps": accounts.redone_steps,
            "starts": len(accounts.starts),
        }

    def start_loop(self, step: int, checkpoints: str) -> None:
        """Note that training begins after `step`. `checkpoints` is the run's own folder of checkpoints."""
        self.clock.enter("other")
        if self.ledger is not None:
            source, loaded = _start_source(step, self._loaded, checkpoints), self._loaded
            if loaded is None:
                self.ledger.loaded(step, source, 0.0)
            else:
                self.ledger.loaded(step, source, loaded.seconds, (loaded.at_risk_steps, loaded.at_risk_seconds))

    def roll_back(self, step: int, loaded_step: int) -> None:
        """Note that the run rolled back from `step`, and trains again what follows `loaded_step`."""
        self._earlier_steps = self._earlier_steps.and_also(loaded_step, step - 1)
        self.clock.enter("other")
        if self.ledger is not None:
            self.ledger.rolled_back(step, loaded_step)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Count the block, the training of `step`: as redone if an earlier start trained it."""
        with self.clock.step("redone" if step in self._earlier_steps else "productive"):
            yield
        if self.ledger is not None:
            self.ledger.step_done(step)

    def note(self, event: Event) -> None:
        """Note what `event` says about saves, about the load, and about how the start ends."""
        match event:
            case Loaded():
                self._loaded = event
            case SaveStarted():
                self._save_began[event.step] = self.clock.elapsed
            case Committed() if self.ledger is not None:
                self.ledger.committed(event, began=self._save_began.pop(event.step, self.clock.elapsed))
            case CleanEnd():
                self.clock.leave()
                self._end = event

    def end(self, *, failed: bool) -> None:
        """Write the last line of the ledger, and log where the time of the run went."""
        if self.ledger is not None:
            self.ledger.end(None if failed else self._end)
            logger.info("%s", goodput_summary(self.ledger.accounts()))

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
        """Return the share of productive time in percent; with a ledger also the other figures, by TensorBoard tag."""
        if self.ledger is None:
            total = self.run_seconds
            return {"goodput(%)": 100 * self.productive_seconds / total if total > 0 else 0.0}
        accounts = self.ledger.accounts()
        steps, seconds = self.ledger.at_risk()
        return {
            "goodput(%)": 100 * accounts.goodput,
            **{f"goodput/{part}(s)": value for part, value in accounts.seconds.items()},
            "goodput/redone_steps": accounts.redone_steps,
            "goodput/starts": len(accounts.starts),
            "checkpoint/at_risk(s)": seconds,
            "checkpoint/at_risk_steps": steps,
        }


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
