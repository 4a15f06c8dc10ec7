"""Recognizes seed checkpoints: a seed holds the weights that a run begins with, and nothing else.

A step-0 that holds only a model is a seed. A step-0 with an optimizer, a step counter or random
generators is the first checkpoint of a loop that counts from 0, and a resume loads all of it.
"""

from __future__ import annotations

from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.config.job_config import EXCLUDABLE_STATES
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.store.place import Place

_OF_A_RUN = tuple(f"{name}." for name in EXCLUDABLE_STATES)
"""Beginnings of keys that are in every full checkpoint, ours and torchtitan's, and in no seed checkpoint of ours."""


def is_seed(path: Place, step: int) -> bool:
    """Return whether the checkpoint of `step` at `path` is a seed; for an unreadable step 0, True. Coordinator."""
    if step != 0:
        return False
    try:
        contents = CheckpointFolder(path, "off").contents
    except CheckpointError:
        return True  # The load that follows meets the same error, and raises it.
    return not any(key.startswith(_OF_A_RUN) for key in contents)
