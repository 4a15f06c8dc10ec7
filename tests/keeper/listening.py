"""A socket of a keeper that a test plays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lite.memory.keeper import messages


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Listen at `path`, with `serve` for the connections in a thread; at the end its `accept` fails, and it ends."""
    with messages.new_socket() as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
