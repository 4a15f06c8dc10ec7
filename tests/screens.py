"""A terminal of a given width, and what a person sees on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

CONTROL = re.compile(r"\x1b\[[0-9;?]*([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """The two ends of a pseudo terminal: `stream` is the program's, `shown` is the person's."""

    def __init__(self, columns: int) -> None:
        self._person, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.stream: TextIO = os.fdopen(program, "w", encoding="utf-8")
        self._received = b""

    @property
    def received(self) -> str:
        """All that the program has written, as of the last `shown`."""
        return self._received.decode()

    def shown(self) -> list[str]:
        """Return the lines on the screen, as if it were high and long lines were not wrapped."""
        self.stream.flush()
        os.set_blocking(self._person, False)
        with suppress(OSError):  # Nothing more to read.
            while part := os.read(self._person, 65536):
                self._received += part
        return screen_of(self.received)

    def shown_at_end(self) -> list[str]:
        """Close the program's end here, and return the lines on the screen when every program has closed its own."""
        self.stream.close()
        with suppress(OSError):  # The last one has.
            while part := os.read(self._person, 65536):
                self._received += part
        return screen_of(self.received)

    def hang_up(self) -> None:
        """Close the person's end."""
        os.close(self._person)
        self._person = -1

    def close(self) -> None:
        with suppress(OSError):  # After a hang-up, what is left in the buffer cannot be written.
            self.stream.close()
        if self._person >= 0:
            os.close(self._person)


@contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    """Yield a terminal."""
    opened = Terminal(columns)
    try:
        yield opened
    finally:
        opened.close()


def screen_of(received: str) -> list[str]:
    """Return the lines that `received` leaves on a screen, without colours and without empty lines at the end."""
    lines, column = [""], 0
    for kind, moves, text in CONTROL.findall(received):
        if kind == "K":
            lines[-1] = lines[-1][:column]
        elif moves == "\r":
            column = 0
        elif moves == "\n":
            lines.append("")
        elif text:
            lines[-1] = lines[-1][:column] + text + lines[-1][column + len(text) :]
            column += len(text)
    while lines and not lines[-1]:
        lines.pop()
    return lines
