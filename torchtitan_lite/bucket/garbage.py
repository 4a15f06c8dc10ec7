"""Objects that no head lists: what cut saves and removals left.

A save that was cut leaves objects of an attempt that is in no head. They go once they have not changed for a day, by
the times of the store alone, because a head that was restored from a copy may lack what is needed. The manifest goes
first, so a checkpoint without some of its objects is never taken for one.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout

KEPT_SECONDS = 24 * 3600.0
"""For people, who look after a failure on the next day."""


def delete_attempt(objects: Objects, name: str) -> None:
    """Delete all objects of the checkpoint called `name`, the manifest first. May be cut and repeated."""
    objects.delete([f"{name}/{layout.MANIFEST}"])
    objects.delete([each.key for each in objects.list(f"{name}/")])


def remove(objects: Objects, names: Iterable[str]) -> list[str]:
    """Delete the checkpoints `names`, which no reader sees; return those that are gone. What stays is a warning."""
    removed = []
    for name in names:
        try:
            delete_attempt(objects, name)
            removed.append(name)
        except OSError as error:  # A few objects more are no reason not to train.
            logger.warning("Could not remove %s/%s, which is no longer kept: %s", objects.address, name, error)
    return removed


def remove_beats(objects: Objects, epochs: Iterable[int]) -> None:
    """Delete the beats of `epochs`; what stays is a warning."""
    try:
        objects.delete([naming.beat_key(epoch) for epoch in epochs])
    except OSError as error:
        logger.warning("Could not remove the heartbeats of earlier jobs in %s: %s", objects.address, error)
