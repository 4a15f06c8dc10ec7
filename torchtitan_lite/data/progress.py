"""How far a run is in its data."""

from __future__ import annotations

from typing import NamedTuple


class EpochProgress(NamedTuple):
    """The epoch of the last sample that was taken, and the part of that epoch that is taken, up to 1.0."""

    epoch: int = 0
    """The first epoch is 0."""
    fraction: float | None = 0.0
    """None where the length of an epoch is not known, as of a stream."""


def progress_at(next_position: int, num_samples: int) -> EpochProgress:
    """Return the progress where `next_position` samples were taken, of `num_samples` an epoch."""
    if next_position == 0:
        return EpochProgress()
    epoch, place = divmod(next_position - 1, num_samples)
    return EpochProgress(epoch, (place + 1) / num_samples)
