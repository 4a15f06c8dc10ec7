"""Log lines about direct I/O that the system refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lite.disk.durable import log_no_direct_io
from torchtitan_lite.log import logger


@contextmanager
def refusals_logged() -> Iterator[list[str]]:
    """Collect the lines that the package logs about refused direct I/O."""
    log_no_direct_io.cache_clear()
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "direct I/O is refused" in record.getMessage():
                lines.append(record.getMessage())

    listener, level = Listener(), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
