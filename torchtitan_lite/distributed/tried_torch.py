"""Which versions of torch this package was tried with; docs/versions.md has the tests that ran with each."""

from __future__ import annotations

import re

import torch

from torchtitan_lite import __version__
from torchtitan_lite.log import logger

OLDEST_TRIED, LATEST_TRIED = (2, 11), (2, 15)


def report_later_torch(rank: int) -> None:
    """Log on rank 0 that this process has a torch that is later than any that was tried."""
    if rank == 0 and minor_version(torch.__version__) > LATEST_TRIED:
        tried = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST_TRIED, LATEST_TRIED))
        logger.info(
            "Torch %s is later than any that torchtitan_lite %s was tried with (%s)",
            torch.__version__,
            __version__,
            tried,
        )


def minor_version(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"; (0, 0) for what begins with no two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
