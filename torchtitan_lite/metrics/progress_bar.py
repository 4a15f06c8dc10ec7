"""One line at the bottom of the terminal: steps, loss, speed, the last checkpoint, the time left.

Rank 0 draws it, while stderr is a terminal and the job is in its foreground; in a pipe or a file stderr is as without
it. Log lines appear above it, whole and unchanged. It needs no thread: the loop draws it after a step, at most every
`INTERVAL_SECONDS`, and checkpoint events do. The cursor waits at the start of the line and is never hidden: a job that
is killed leaves the terminal as it was, and what others print there (C++, another rank) begins at the first column.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.events import Committed, Event, Loaded, Resumed, SaveFailure, SaveStarted, Uploaded
from torchtitan_lite.log import logger

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_SECONDS = 0.5
"""Between two drawings after a step: drawing takes about 0.2 ms, so this is 0.04 % of the time."""
MIN_BAR_COLUMNS = 8
MAX_BAR_COLUMNS = 60
SAVED: Mapping[type[Event], str] = {
    SaveStarted: "saving {}",
    Committed: "saved {}",
    Resumed: "loaded {}",
    SaveFailure: "{} failed",
}
"""What the line says of a step after the event. What a start has loaded need not be on its own disk: an image in memory
or another run's checkpoint is not."""
_ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Progress:
    """What the line shows. Loss and tps are those of the last logged step, None before the first one."""

    step: int
    total_steps: int
    saved: str = ""
    loss: float | None = None
    tps: float | None = None
    seconds_left: float | None = None
    durable: int | None = None
    """The last step that is on disk; None if the run saves none."""
    uploaded: int | None = None
    """The last step that this start uploaded; None for none."""

    def fields(self) -> list[str]:
        """Return the texts on the right of the bar, in their order."""
        return [
            *([] if self.loss is None else [f"loss {self.loss:.4f}"]),
            *([] if self.tps is None else [f"tps {round(self.tps):,}"]),
            *([] if self.durable is None or self.step <= self.durable else [f"{self.step - self.durable} at risk"]),
            *([self.saved] if self.saved else []),
            *([] if self.uploaded is None else [f"uploaded {self.uploaded}"]),
            f"{'-:--' if self.seconds_left is None else readable_duration(self.seconds_left)} left",
        ]


class TerminalProgressBar:
    """A progress bar on the terminal `stream`. From `start` to `close`, log lines for it are written above the bar."""

    def __init__(
        self, stream: TextIO, console: Console, progress: Progress, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._console = stream, console
        self._progress = progress
        self._clock = clock
        self._handler: logging.StreamHandler[Any] | None = None
        self._is_open = False
        self._first: tuple[int, float] | None = None
        self._drawn_at = -INTERVAL_SECONDS
        self._line = ""
        forget_in_children(self._forget)

    def start(self, step: int) -> None:
        """Show the bar at `step`, the last one that was trained before this start."""
        self._change(step=step)
        on_stream = [each for each in logger.handlers if isinstance(each, logging.StreamHandler)]
        self._handler = next((each for each in on_stream if each.stream is self._stream), None)
        if self._handler is not None:
            self._handler.setStream(self)
        self._is_open = True
        self._draw()

    def step_done(self) -> None:
        """Count one more step."""
        now, step = self._clock(), self._progress.step + 1
        if self._first is None:  # The first step also compiles, fills caches and so on: its time is no estimate.
            self._first = step, now
        since_step, since = self._first
        per_step = (now - since) / (step - since_step) if step > since_step else None
        left = None if per_step is None else per_step * (self._progress.total_steps - step)
        self._change(step=step, seconds_left=left)
        if now - self._drawn_at >= INTERVAL_SECONDS:
            self._draw()

    def logged(self, loss: float, tps: float) -> None:
        """Take the figures of a logged step."""
        self._change(loss=loss, tps=tps)

    def note(self, event: Event) -> None:
        """Take a checkpoint event. **Any thread**."""
        if self._progress.durable is not None:
            match event:
                case Committed():
                    self._change(durable=event.step)
                case Loaded():
                    self._change(durable=event.step - event.at_risk_steps)
        if isinstance(event, Uploaded):
            self._change(uploaded=max(event.step, self._progress.uploaded or 0))
        if type(event) in SAVED:
            self._change(saved=SAVED[type(event)].format(event.step))
            self._draw()

    def write(self, text: str) -> int:
        """Write a log line above the bar. Its handler calls this, and holds its lock."""
        if self._line:
            self._line = self._rendered()
            text = f"{_ERASE}{text}{self._line}\r"
        self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the terminal."""
        self._stream.flush()

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        with self._lock():
            if self._is_open and self._line:
                with contextlib.suppress(OSError, ValueError):
                    self._stream.write(_ERASE)
                    self._stream.flush()
            self._forget()

    def _change(self, **fields: Any) -> None:
        with self._lock():
            self._progress = replace(self._progress, **fields)

    def _draw(self) -> None:
        """Draw the line in the place of the last one. A terminal that has gone ends the bar, not the training."""
        with self._lock():
            if not self._is_open:
                return
            self._drawn_at = self._clock()
            try:
                self._line = self._rendered() if is_in_foreground(self._stream.fileno()) else ""
                self._stream.write(f"{_ERASE}{self._line}\r" if self._line else "")
                self._stream.flush()
            except (OSError, ValueError):
                self._forget()

    def _rendered(self) -> str:
        return render_progress(self._progress, self._console, os.get_terminal_size(self._stream.fileno()).columns or 80)

    def _lock(self) -> AbstractContextManager[Any]:
        # The lock of the handler, which logging renews in a forked child: one of the bar's own could stay locked there.
        return self._handler.lock if self._handler is not None and self._handler.lock else nullcontext()

    def _forget(self) -> None:
        """Let the log lines go to the terminal itself again, and draw no more."""
        self._is_open, self._line = False, ""
        if self._handler is not None and self._handler.stream is self:
            self._handler.stream = self._stream


def build_progress_bars(config: JobConfig, rank: int) -> list[TerminalProgressBar]:
    """Return the bar of this rank; none unless this is rank 0 and its stderr is a terminal."""
    if rank or not config.metrics.enable_progress_bar or not sys.stderr.isatty():
        return []
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal:
        return []
    saves = config.checkpoint.enable_checkpoint and not config.checkpoint.load_only
    saved, durable = ("none saved", 0) if saves else ("", None)
    return [TerminalProgressBar(sys.stderr, console, Progress(0, config.training.steps, saved, durable=durable))]


def render_progress(progress: Progress, console: Console, columns: int) -> str:
    """Return the line in the console's colours, shorter than `columns`.

    Where space is short, the bar is short; then loss and tps are left out, which log lines have, too, and so on.
    """
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    steps, fields = f"step {progress.step}/{progress.total_steps}", progress.fields()
    while (space := columns - 3 - len(steps) - sum(2 + len(field) for field in fields)) < MIN_BAR_COLUMNS and fields:
        del fields[0]
    bar = ProgressBar(
        total=max(1, progress.total_steps),
        completed=progress.step,
        width=min(MAX_BAR_COLUMNS, max(1, space)),
        complete_style="cyan",
        finished_style="cyan",
    )
    row = (Text(f"{steps}  ", style="bold"), bar, Text("".join(f"  {field}" for field in fields)))
    with console.capture() as captured:
        console.print(*row, sep="", end="", no_wrap=True, overflow="crop", width=columns - 1)
    return captured.get()


def readable_duration(seconds: float) -> str:
    """Return `seconds` as "1:05", "2:03:09", or from two days on "3 d 4 h"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_in_foreground(terminal: int) -> bool:
    """Return False if the shell has this job in the background of the terminal, where a bar would disturb its user."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # The terminal is another process group's: torchrun starts each worker apart from it.
        return _launcher_is_in_foreground()


def _launcher_is_in_foreground() -> bool:
    try:
        status = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # Not Linux.
    _, _, group, _, _, group_in_foreground, *_ = status.rpartition(")")[2].split()
    return group == group_in_foreground or int(group_in_foreground) < 1
