"""What a verb prints: its result on stdout, notes and progress on stderr.

With `as_json` the result is JSON and stderr has errors only. In a pipe nothing is coloured, folded or cut: a line is as
long as its content. On a terminal a line has as many columns as that, but never fewer than 80: a narrower terminal
folds such lines itself, and cuts nothing. No meaning is in a colour alone.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.log import logger, readable_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SILENT_SECONDS = 1.0
"""Work that takes less shows no progress."""
LINE_SECONDS = 10.0
"""Between two lines of progress in a pipe."""
LEAST_COLUMNS = 80
"""Columns for which every table has room."""
_UNLIMITED = 10_000
"""Columns of a pipe."""
_NUMBERS = ("step", "rank", "size", "age", "files", "count", "tensors", "elements", "objects")
"""Columns of tables that are at the right."""
_FOLDED = ("name", "part", "dtypes", "run", "what it is", "what happens")
"""Columns of tables that are folded."""

Advance = Callable[[int], None]
"""Call it with the number of bytes done since the last call; from any thread."""


class Screen:
    """The two streams of a verb. `width` in columns, by default the terminal's; `spelled` is what becomes of a note."""

    def __init__(
        self, *, as_json: bool = False, width: int | None = None, spelled: Callable[[str], str] = lambda text: text
    ) -> None:
        self.as_json = as_json
        self._width = width
        self._spelled = spelled
        self._noted: set[str] = set()

    def show(self, data: Any, render: Callable[[], RenderableType]) -> None:
        """Print the result: `data` with --json, else what `render` returns."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
        else:
            self._print(render())
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print `text` as one line on stderr, once; nothing with --json."""
        line = self._spelled(text)
        if not self.as_json and line not in self._noted:
            self._noted.add(line)
            sys.stderr.write(f"{line}\n")

    @contextmanager
    def noting_warnings(self) -> Iterator[None]:
        """Print warnings of the package in the block as notes: what it found besides the result."""
        handler = _Notes(self)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @contextmanager
    def progress(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Show how many of `total_bytes` are done, once the block takes longer than a second.

        Yields the function that counts them: a bar on a terminal, a line now and then in a pipe, nothing with --json.
        """
        if self.as_json:
            yield lambda num_bytes: None
        elif sys.stderr.isatty():
            with _bar(label, total_bytes) as advance:
                yield advance
        else:
            yield _Lines(label, total_bytes).advance

    def _print(self, renderable: RenderableType) -> None:
        from rich.console import Console

        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # A path may have [brackets].
        console = Console(file=sys.stdout, width=self._width, **plain)
        if console.is_terminal:
            console.width = max(console.width, LEAST_COLUMNS)
        else:
            console = Console(file=io.StringIO(), width=self._width or _UNLIMITED, color_system=None, **plain)
        with console.capture() as printed:
            console.print(renderable)
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())


def plain_table(
    *columns: str, padding: tuple[int, int] | tuple[int, int, int, int] = (0, 2, 0, 0), show_header: bool = True
) -> Table:
    """Return a table without lines, with two spaces between its `columns`.

    Numbers are at the right, and words are folded where the screen is too narrow.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=padding, header_style="", show_header=show_header)
    for name in columns:
        table.add_column(
            name, justify="right" if name in _NUMBERS else "left", no_wrap=name not in _FOLDED, overflow="fold"
        )
    return table


class _Notes(logging.Handler):
    """Makes each warning a note on `screen`."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.note(f"note: {record.getMessage()}")


@contextmanager
def _bar(label: str, total_bytes: int) -> Iterator[Advance]:
    """Show a bar on the terminal, from `SILENT_SECONDS` on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True)
    task, begun = bar.add_task(label, total=total_bytes), time.monotonic()

    def advance(num_bytes: int) -> None:
        bar.advance(task, num_bytes)
        if time.monotonic() - begun > SILENT_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


class _Lines:
    """Lines in a pipe: the first after `SILENT_SECONDS`, then one every `LINE_SECONDS`."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
        self._begun = time.monotonic()
        self._next = self._begun + SILENT_SECONDS
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            now = time.monotonic()
            if now > self._next:
                self._next = now + LINE_SECONDS
                self._write(now - self._begun)

    def _write(self, seconds: float) -> None:
        speed = self._done_bytes / seconds
        left = (self._total_bytes - self._done_bytes) / speed if speed else 0.0
        done, total = readable_bytes(self._done_bytes), readable_bytes(self._total_bytes)
        sys.stderr.write(f"{self._label}: {done} of {total}, {left:.0f} s left\n")


# Ages and counts as a person reads them, and paths in their own spelling.


_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def age(seconds: float) -> str:
    """Return `seconds` in the largest unit of which there are two, as in "3 d" or "90 min"; at least "0 s"."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def count_text(value: int) -> str:
    """Return `value` with separators of thousands; the empty string for 0."""
    return f"{value:,}" if value else ""


def as_spelled(text: str, arguments: Sequence[str]) -> str:
    """Return `text` with the absolute path of each relative one among `arguments` in its own spelling."""
    # FOLDER:10 names a folder too, and so does --option=FOLDER.
    words = {word for each in arguments for word in (each, each.rpartition(":")[0], each.partition("=")[2])}
    spelled = {str(Path(word).absolute()): str(Path(word)) for word in words if word and not Path(word).is_absolute()}
    if not spelled:
        return text
    longest_first = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./-])({longest_first})(?![\w.-])", lambda found: spelled[found[1]], text)
