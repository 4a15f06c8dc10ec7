"""How often a run fails, estimated from its hours and its unclean ends. Pure functions.

The estimate is the mean of a gamma distribution of the failure rate: a prior, which counts like half a failure (the
shape of Jeffreys' prior for a rate), updated by what was seen. So one failure soon counts more than the prior, and a
run without any is trusted more with every hour.
"""

from __future__ import annotations

from dataclasses import dataclass

ACCELERATOR_HOURS = 50_000.0
"""Hours of one accelerator between failures: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd
of Models, 2024, section 3.3.4) are one in 50,700."""
OTHER_HOURS = 168.0
"""Hours between failures that do not depend on the number of ranks (a host, a file system, a person): one a week. An
assumption, not a measurement."""
PRIOR_WEIGHT = 0.5
"""Failures that the prior counts for."""


@dataclass(frozen=True)
class Past:
    """What is known of how a run has run so far: by default, nothing."""

    hours: float = 0.0
    """Hours that its starts ran, all together."""
    unclean_ends: int = 0
    """Starts that neither finished nor left for a signal."""


def prior_hours(num_ranks: int) -> float:
    """Return the mean hours between failures of a run on `num_ranks` of which nothing is known."""
    return 1 / (1 / OTHER_HOURS + num_ranks / ACCELERATOR_HOURS)


def mtbf_hours(past: Past, prior: float) -> float:
    """Return the estimated mean hours between failures of a run with this past; `prior` is that of an unknown run."""
    return (PRIOR_WEIGHT * prior + past.hours) / (PRIOR_WEIGHT + past.unclean_ends)
