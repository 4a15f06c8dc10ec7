"""How many sequences a step takes: the arithmetic of ranks and batches."""

from __future__ import annotations

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.errors import ConfigError


def global_batch_size(config: Training, num_ranks: int) -> int:
    """Return the sequences in one optimizer step. Raise ConfigError if the ranks cannot share them equally."""
    unit = config.batch_size * num_ranks
    total = unit if config.global_batch_size == -1 else config.global_batch_size
    if total % unit:
        raise ConfigError(
            f"training.global_batch_size: {total} is not a multiple of batch_size x ranks = {config.batch_size} x "
            f"{num_ranks} = {unit}; {_what_would_do(total, config.batch_size, num_ranks)}."
        )
    return total


def _what_would_do(total: int, batch_size: int, num_ranks: int) -> str:
    """Return, for each of the three values, the nearest ones that fit the other two, in the words of an error."""
    unit = batch_size * num_ranks
    totals = [str(multiple) for multiple in (total // unit * unit, (total // unit + 1) * unit) if multiple]
    batch_sizes, ranks = _nearest_factors(total, num_ranks, batch_size), _nearest_factors(total, batch_size, num_ranks)
    others = [f"batch_size {batch_sizes}"] if batch_sizes else []
    others += [f"{ranks} ranks"] if ranks else []
    return f"{' and '.join(totals)} would do" + (f", as would {', or '.join(others)}" if others else "")


def _nearest_factors(total: int, other: int, current: int) -> str:
    fitting = [factor for factor in range(1, total // other + 1) if total % (factor * other) == 0]
    below, above = [f for f in fitting if f < current], [f for f in fitting if f > current]
    return " or ".join(map(str, below[-1:] + above[:1]))
