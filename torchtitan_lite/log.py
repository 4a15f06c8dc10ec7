"""The logger of the package.

Library code logs facts with units and never configures handlers; `setup` is for entry points. Ranks other than the
coordinator log warnings only, so that each fact is logged once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

__all__ = ["setup"]  # What a loop of your own calls; the rest may move.

logger = logging.getLogger("torchtitan_lite")

_LONGEST = 200
"""Characters of a value in a message: a tensor or a list of checkpoints has thousands."""


def setup(rank: int = 0) -> None:
    """Log to stderr in the format of torchtitan. **Any rank**.

    Idempotent: a second call sets the level for another rank.
    """
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("[titan] %(asctime)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)


def readable_bytes(num_bytes: int) -> str:
    """Return `num_bytes` with a binary unit, as in "1.9 GiB"."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "20,000 batches"; of a `noun` whose plural ends in -s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def listed(names: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """Return the first of `names`, `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def in_one_line(found: object) -> str:
    """Return what code of the user's returned or raised, on one line, cut off; without the end of a sentence."""
    text = f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else repr(found)
    return " ".join(text.split())[:_LONGEST].rstrip(".: ")


def forget_stdout() -> None:
    """Let what is left for stdout go nowhere: its reader has closed it, and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
