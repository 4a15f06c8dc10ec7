"""Folders in messages, as the person named them.

The store knows absolute paths only, because a save must survive a change of the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def as_spelled(text: str, arguments: Sequence[str]) -> str:
    """Return `text` with the absolute path of each relative one among `arguments` in its own spelling."""
    # FOLDER:10 names a folder too, and so does --option=FOLDER.
    words = {word for each in arguments for word in (each, each.rpartition(":")[0], each.partition("=")[2])}
    spelled = {str(Path(word).absolute()): str(Path(word)) for word in words if word and not Path(word).is_absolute()}
    if not spelled:
        return text
    longest_first = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./-])({longest_first})(?![\w.-])", lambda found: spelled[found[1]], text)
