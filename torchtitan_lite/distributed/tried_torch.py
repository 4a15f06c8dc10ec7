"""Which versions of torch this package was tried with, and which of datasets it refuses; see docs/versions.md."""

from __future__ import annotations

import re
import sys

import torch

from torchtitan_lite import __version__
from torchtitan_lite.errors import ConfigError
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


def refuse_stuck_stream(name: str, dataset: object) -> None:
    """Raise ConfigError for a `datasets.IterableDataset` of datasets 5.0.0, whose position is lost by a load.

    Earlier and later versions are right.
    """
    is_stream = any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)
    if is_stream and getattr(sys.modules.get("datasets"), "__version__", "") == "5.0.0":
        raise ConfigError(
            f"{name}: with datasets 5.0.0 the position of a stream does not advance after a resume, so the next "
            "resume would read it again from its beginning. Install another version: pip install 'datasets!=5.0.0'"
        )


def minor_version(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"; (0, 0) for what begins with no two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
